"""One grant of this side's blocks: what is published, under which capability, until when, and how it ended."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvcache.block_table import BlockTable
from transceiver.awaits_outcome import AwaitsOutcome
from transceiver.loop_context import Timer
from transceiver.transfer_state import TransferState, TransferStateMachine
from transceiver.transfer_types import GrantTicket

__all__ = ["Publication"]


class Publication(AwaitsOutcome):
    """Blocks that a peer may pull. The caller keeps their pages in use until `future` resolves.

    It pins committed blocks. The pages of a grant that still grows belong to the caller's live sequence and are not
    pinned: a sequence that ends or is preempted gives them up at once. That is safe, not prevented: a page that is
    given out anew changes its generation number, and the receiver, which reads these numbers after the data, fails.

    `future` resolves with DONE when the receiver acknowledged, FAILED when it reported a failure or was lost,
    CANCELLED, or TIMED_OUT when the lease ran out. It never raises for a peer's fault.
    """

    def __init__(
        self, ticket: GrantTicket, tables: tuple[BlockTable, ...], conversation: bytes, scope: bytes, lease_s: float,
        created: float, request_cancel: Callable[[Publication], None],
        request_extend: Callable[[Publication, tuple[BlockTable, ...], bool], None], complete: bool = True,
        receiver: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.ticket = ticket
        self.conversation = conversation
        self.scope = scope
        self.receiver = receiver
        self.lease_s = lease_s
        self.created = created
        self.machine = TransferStateMachine()
        self.timer: Timer | None = None
        self.complete = complete
        self._extending = threading.Lock()
        self._closed = "publish it with open_ended=True to add some later" if complete else ""  # why no more may come
        self._request_cancel = request_cancel
        self._request_extend = request_extend
        self._tables: dict[int, list[BlockTable]] = {}
        self.add(tables)

    @property
    def transfer_id(self) -> str:
        return self.ticket.transfer_id

    @property
    def state(self) -> TransferState:
        """Where this transfer stands (a snapshot)."""
        return self.machine.state

    def cancel(self) -> bool:
        """Ask to end this grant; any thread. True when it is over now, False when a peer may still be reading.

        After False the caller keeps the pages until `future` resolves; the peer is told at once.
        """
        if self.future.done():
            return True
        self._request_cancel(self)
        return self.future.done()

    def extend(self, tables: tuple[BlockTable, ...], *, last: bool) -> None:
        """Publish more blocks of an open-ended grant (`last`: no more will come); any thread, never blocks.

        Order is kept. The pages stay with the caller's sequence, like those before; if it gives one up meanwhile, the
        receiver finds the page's generation number changed and fails. A grant that has ended meanwhile, which the
        caller cannot know, is left as it is. Raises ValueError, and changes nothing, for impossible tables, for a grant
        that was not published with `open_ended`, and after the call with `last`.
        """
        with self._extending:
            if self._closed:
                raise ValueError(f"grant {self.transfer_id!r} takes no more blocks: {self._closed}")
            self._request_extend(self, tables, last)
            if last:
                self._closed = "its last ones were published with last=True"

    def add(self, tables: tuple[BlockTable, ...]) -> None:
        """Add rows (loop only after publishing)."""
        for table in tables:
            self._tables.setdefault(table.group, []).append(table)

    def tables(self) -> list[BlockTable]:
        """Everything published so far."""
        return [table for tables in self._tables.values() for table in tables]

    def find(
        self, group: int, ordinals: NDArray[np.int32], valid_tokens: NDArray[np.int32]
    ) -> tuple[NDArray[np.int32], NDArray[np.uint64]]:
        """(pages, generations) of the wanted ordinals; page -1 where a block, or enough of its tokens, is not here."""
        pages = np.full(len(ordinals), -1, dtype=np.int32)
        generations = np.zeros(len(ordinals), dtype=np.uint64)
        for table in self._tables.get(group, ()):
            if not len(table):
                continue
            at = np.minimum(np.searchsorted(table.ordinals, ordinals), len(table) - 1)
            found = (table.ordinals[at] == ordinals) & (table.valid_tokens[at] >= valid_tokens)
            pages[found] = table.pages[at][found]
            generations[found] = table.generations[at][found]
        return pages, generations
