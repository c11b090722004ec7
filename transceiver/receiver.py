"""The receiving side of one transfer: asks, reads, checks generations, then digests, reports. Runs in the loop.

Only this side's own reads ever write into the destination pages. `settled` resolves when none can do so any more; until
then the pages are in quarantine. A block that fails a check is named in the outcome and must not be used.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING

import numpy as np

from kvcache.block_table import BlockTable
from transceiver.arrival_checks import ArrivalChecks
from transceiver.awaits_outcome import AwaitsOutcome, unshakable_future
from transceiver.errors import LinkClosedError
from transceiver.grant_checks import grant_problem, is_duplicate_grant
from transceiver.loop_context import LoopContext, Timer
from transceiver.pull_data import PullData, Read
from transceiver.pull_reads import MISSING_PAGE, Rows, Segment, plan_segments
from transceiver.transfer_checks import phase_seconds
from transceiver.transfer_state import TransferState, TransferStateMachine
from transceiver.transfer_types import GrantTicket, TransferOutcome, TransferStatus
from transceiver.wire import Ack, Cancel, Digests, Grant, GroupRows, PullRequest, Refuse, encode

if TYPE_CHECKING:
    from transceiver.peer import Peer

__all__ = ["Pull"]

_log = logging.getLogger(__name__)
_MAX_RETRIES = 1


class Pull(AwaitsOutcome):
    """Blocks on their way into this side's pages. Made by `CacheTransceiver.pull`.

    `future` resolves once with the outcome and never raises for a peer's fault. `settled` resolves when no operation
    may touch the destination pages any more: only then may they be freed. FAILED with `bad_ordinals` means that
    exactly those blocks did not arrive whole; all others are verified.
    """

    def __init__(
        self, context: LoopContext, pull_id: int, ticket: GrantTicket, tables: tuple[BlockTable, ...],
        conversation: bytes, scope: bytes, timeout_s: float, on_settled: Callable[[Pull], None],
    ) -> None:  # fmt: skip
        super().__init__()
        self.ticket = ticket
        self.settled: Future[None] = unshakable_future()
        self.pull_id = pull_id
        self._ctx = context
        self._tables = tables
        self._identity = (conversation, scope)
        self._timeout_s = timeout_s
        self._on_settled = on_settled
        self._machine = TransferStateMachine()
        self._timer: Timer | None = None
        self._peer: Peer | None = None
        self._created = context.clock()
        self._marks: dict[str, float] = {}
        self.retries = 0
        self._rows = Rows.wanted(tables)
        self._last = False
        self._checking = False
        self._checks = ArrivalChecks(self._rows)
        self.data = PullData(context, self, self._rows, self._checks)

    # --- any thread ---------------------------------------------------------------------------------------------

    @property
    def state(self) -> TransferState:
        """Where this transfer stands (a snapshot)."""
        return self._machine.state

    @property
    def wanted(self) -> tuple[BlockTable, ...]:
        """The blocks that were asked for, and the pages that receive them."""
        return self._tables

    def cancel(self) -> bool:
        """Ask to stop. True when nothing touches the pages any more, False: not yet, wait for `settled`."""
        if not self.settled.done():
            self._ctx.post(lambda: self.fail(TransferStatus.CANCELLED, "cancelled by the receiver"))
        return self.settled.done()

    # --- loop ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """The deadline runs from here on."""
        self._timer = self._ctx.after(
            self._timeout_s, lambda: self.fail(TransferStatus.TIMED_OUT, f"not done within {self._timeout_s:g} s")
        )

    def on_link(self, peer: Peer) -> None:
        """The link to the holder is ready: ask."""
        again = self.retries and self._peer is None and self.state is TransferState.READY
        if not again and not self._machine.advance(TransferState.READY):
            return
        self._peer = peer
        self._marks["connect"] = self._ctx.clock()
        groups = tuple(GroupRows(t.group, t.ordinals, t.valid_tokens) for t in self._tables)
        try:
            peer.link.send(encode(self._request(groups)))
        except LinkClosedError as error:
            self.fail(TransferStatus.FAILED, str(error))
        except Exception as error:  # this pull's own trouble: it must neither hang nor cost others their link
            _log.exception("pull %s could not be asked for", self.ticket.transfer_id)
            self.break_off(error)

    def break_off(self, error: Exception) -> None:
        """This side's own code failed: FAILED, whatever it takes, and settled when no read is under way."""
        reason = f"internal error: {error!a}"
        try:
            self.fail(TransferStatus.FAILED, reason)
        finally:
            if not self.future.done():
                self._machine.end(TransferStatus.FAILED)
                self.future.set_result(TransferOutcome(TransferStatus.FAILED, reason))
                self._try_settle()

    def _request(self, groups: tuple[GroupRows, ...]) -> PullRequest:
        verify, timeout_ms, ticket = int(self._ctx.config.verify), int(self._timeout_s * 1000), self.ticket
        return PullRequest(
            self.pull_id, ticket.transfer_id, ticket.token, *self._identity, verify, timeout_ms, groups
        )  # fmt: skip

    def farewell(self) -> tuple[bytes, ...]:
        """What the holder must still hear of a pull that ended before it could ask (nothing if it did ask)."""
        if self._peer is not None:
            return ()
        outcome = self.future.result()
        ack = Ack(self.pull_id, outcome.status.value, outcome.reason[:2000], 0, 0)
        return encode(self._request(())), encode(ack)

    def on_refuse(self, message: Refuse) -> None:
        """The holder does not serve this pull."""
        self.fail(TransferStatus.FAILED, f"refused by the holder ({message.field}): {message.reason}", tell=False)

    def on_cancel(self, message: Cancel) -> None:
        """The holder ends the grant."""
        status = TransferStatus.CANCELLED if message.status == "cancelled" else TransferStatus.FAILED
        self.fail(status, f"ended by the holder: {message.reason}")

    def on_lost(self, reason: str) -> None:
        """The holder is gone; its reads were completed before this call."""
        self.fail(TransferStatus.FAILED, f"holder lost: {reason}", tell=False)

    def try_again(self) -> bool:
        """The link broke. True when the holder had not answered yet: ask again, once, on a new link.

        It helps when the request never reached the holder: a link that stood idle may have been cut by anything between
        the two. A holder that has read the request ends the grant when it sees the link break, and refuses the second
        one; if the holder died, the new link fails at once.
        """
        if self._machine.terminal or "grant" in self._marks or self.retries >= _MAX_RETRIES:
            return False
        self.retries += 1
        self._peer = None
        return True

    def on_grant(self, message: Grant) -> None:
        """Rows that may be read now."""
        peer = self._peer
        if self._machine.terminal or self._last or peer is None:
            self._ctx.stats.stale_messages += 1
            return
        rows = message.rows
        if is_duplicate_grant(self._rows, message):
            self._ctx.stats.stale_messages += 1
            return
        problem = grant_problem(self._rows, message, [peer.num_pages(g) for g in range(len(peer.parts))])
        if problem is not None:
            self.fail(TransferStatus.FAILED, f"the holder granted {problem}")
            return
        self._marks.setdefault("grant", self._ctx.clock())
        self._machine.advance(TransferState.TRANSFERRING)
        self._rows.remote[rows] = message.pages
        self._rows.generation[rows] = message.generations
        self._checks.miss(rows[message.pages == MISSING_PAGE])
        self._last = bool(message.last)
        if message.digests:
            self._checks.expect(rows, message.digests)
        segments = plan_segments(
            self._rows, rows[message.pages >= 0].astype(np.int64), self._ctx.storage, peer.parts,
            [peer.page_bytes(g) for g in range(len(peer.parts))], self.data.batch_bytes(peer.link),
            peer.link.direct_read_bytes, by_row=self._ctx.config.verify and peer.link.copies_itself,
            mapped=peer.link.maps_pools,
        )  # fmt: skip
        self.data.add(segments, peer)
        self.go_on()

    def on_digests(self, message: Digests) -> None:
        """Digests that were not ready with the grant."""
        rows = message.rows
        if self._machine.terminal or (len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < len(self._rows)):
            self._ctx.stats.stale_messages += 1
            return
        self._checks.expect(rows, message.digests)
        self._check_done()

    def on_read(self, segment: Segment | None, error: str | None) -> None:
        """A read ended (`segment` None: one of generation numbers)."""
        self.data.on_read(segment, error, wanted=not self._machine.terminal)
        if error is not None:
            self.fail(TransferStatus.FAILED, f"a read failed: {error}")
        self.go_on()

    def go_on(self) -> None:
        """Start what can start, and end what has ended."""
        if not self._machine.terminal:
            self.data.pump()
        self._check_done()
        self._try_settle()

    def _check_done(self) -> None:
        if self._machine.terminal or not self._last or not self.data.all_read:
            return
        if not self._checking:
            self._checking = True
            self._marks["data"] = self._ctx.clock()
            if self.data.read_generations():
                return
        if self._machine.state is not TransferState.TRANSFERRED:
            self._ctx.stats.stale_generations += self._checks.find_stale()
            self._machine.advance(TransferState.TRANSFERRED)
        if self.data.working:
            return
        if self._ctx.config.verify:
            if not self._checks.complete:
                return
            self._ctx.stats.digests_checked += self._checks.compare()
            self._ctx.stats.digest_mismatches += self._checks.num_mismatches
        complaint = self._checks.complaint()
        self._end(TransferStatus.FAILED if complaint else TransferStatus.DONE, complaint)

    def fail(self, status: TransferStatus, reason: str, *, tell: bool = True) -> None:
        """End without success; late calls change nothing."""
        if self._machine.terminal:
            return
        self._checks.give_up()
        self._end(status, reason, tell=tell)

    def _end(self, status: TransferStatus, reason: str, *, tell: bool = True) -> None:
        if not self._machine.end(status):
            if not self._machine.end(TransferStatus.FAILED):
                return
            status, reason = TransferStatus.FAILED, f"impossible end in state {self.state}: {reason}"
        if self._timer is not None:
            self._timer.cancel()
        self.data.drop_waiting()
        good = self._checks.num_good
        peer, now = self._peer, self._ctx.clock()
        if tell and peer is not None:
            try:
                peer.link.send(encode(Ack(self.pull_id, status.value, reason[:2000], good, self.data.bytes)))
            except Exception as error:  # whatever it is, the future below must resolve
                _log.debug("acknowledgement not sent: %s", error)
        transport = peer.link.transport if peer is not None else ""
        outcome = TransferOutcome(
            status, reason, good, self.data.bytes, self.data.segments, transport, self._checks.bad_ordinals(),
            phase_seconds(self._marks, self._created, now), self.retries, self._checks.num_mismatches,
        )  # fmt: skip
        if self.data.reads and peer is not None:
            link = peer.link
            self._ctx.guarded(lambda: link.give_up(lambda token: isinstance(token, Read) and token.pull is self))
        self._ctx.post(lambda: self._watch_drain(peer))
        self.future.set_result(outcome)
        self._try_settle()

    def _watch_drain(self, peer: Peer | None) -> None:
        if peer is not None and not self.settled.done():
            wait = self._ctx.config.drain_timeout_ms / 1000
            self._timer = self._ctx.after(wait, lambda: self._cut(peer))

    def _cut(self, peer: Peer) -> None:
        if not self.settled.done() and self.data.reads:
            _log.warning("pull %s: reads did not end within the drain time, cutting the link", self.ticket.transfer_id)
            peer.cut("reads did not end within drain_timeout_ms")

    def _try_settle(self) -> None:
        if self._machine.terminal and self.data.idle:
            self.force_settled()

    def force_settled(self) -> None:
        """Nothing can touch the pages any more (also called when the transport is gone)."""
        if not self.settled.done():
            if self._timer is not None:
                self._timer.cancel()
            self.settled.set_result(None)
            self._on_settled(self)
