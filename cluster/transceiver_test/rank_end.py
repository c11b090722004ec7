"""One end of a transfer cell: pages, a transceiver, and the orders to fill, publish, pull and compare them.

Lives in a rank process and is driven by its commands, one at a time. Knows nothing of the other end but its tickets.
"""

from __future__ import annotations

import dataclasses
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from cluster.transceiver_test.pattern import block_pattern, state_pattern
from kvcache.block_table import BlockTable
from kvcache.layout import KvLayout, LifeCycleKind
from kvcache.storage import BytesPageStorage
from transceiver import CacheTransceiver, CacheTransceiverConfig, GrantTicket, Publication, Pull, TransferOutcome
from transceiver.parallel_layout import Interval, RankShare

__all__ = ["RankEnd", "outcome_to_dict", "shares_from_lists", "ticket_from_dict", "ticket_to_dict"]

_T = TypeVar("_T")
_SCOPE = b"transceiver-test"
_CONVERSATION = "transceiver-test"


class RankEnd:
    """`open`ed by its constructor, `close`d once."""

    def __init__(
        self,
        name: str,
        layout: KvLayout,
        shares: tuple[RankShare, ...] | None,
        first_heads: tuple[int, ...],
        pages: list[int],
        config: CacheTransceiverConfig,
        secret: bytes,
        host: str,
    ) -> None:
        self.layout = layout
        self.storage = BytesPageStorage(layout, pages, shared=config.wants_shared_pools)
        self._first_heads = first_heads
        for group in range(len(layout.groups)):
            self.storage.generations(group)[:] = 1
        self.transceiver = CacheTransceiver(
            worker_id=name, storage=self.storage, config=config, secret=secret, host=host, shares=shares
        )
        self.transceiver.start()
        self._publication: Publication | None = None
        self._pulls: list[Pull] = []

    def close(self) -> None:
        """Stop the transceiver, then free the pages."""
        self.transceiver.close()
        self.storage.close()

    def erase(self) -> None:
        """Overwrite every page, so that nothing right can be left over from a request before."""
        for group in range(len(self.layout.groups)):
            for page in range(self.storage.num_pages(group)):
                words = np.frombuffer(self.storage.page(page, group), np.uint64)
                words[:] = np.uint64(0xDEADBEEFDEADBEEF)

    def fill(self, request: int, wanted: list[list[tuple[int, int]]]) -> None:
        """Write the expected bytes of `wanted` (per group: ordinal, valid tokens) into pages 0, 1, ...

        A page given to new content gets a new generation, as a cache manager gives it.
        """
        for group, rows in enumerate(wanted):
            self.storage.generations(group)[: len(rows)] += np.uint64(1)
            for page, (ordinal, valid) in enumerate(rows):
                self._cells(group, page, valid)[...] = self._expected(group, request, ordinal, valid)

    def publish(self, transfer: str, wanted: list[list[tuple[int, int]]], lease_s: float) -> GrantTicket:
        """Offer the filled pages."""
        self._publication = self.transceiver.publish(
            transfer, self._tables(wanted), conversation_id=_CONVERSATION, scope=_SCOPE, lease_s=lease_s
        )
        return self._publication.ticket

    def published(self, timeout_s: float) -> TransferOutcome:
        """How the offer ended. Raises TimeoutError."""
        assert self._publication is not None
        return _result(self._publication.future, timeout_s)

    def pull(
        self, tickets: list[GrantTicket], wanted: list[list[tuple[int, int]]], timeout_s: float
    ) -> tuple[list[TransferOutcome], float]:
        """Pull from every ticket at once; returns the outcomes and the seconds until the last was settled.

        Raises TimeoutError when one is neither done nor settled: its pages must never be freed then.
        """
        tables = self._tables(wanted)
        began = time.perf_counter()
        self._pulls = [
            self.transceiver.pull(ticket, tables, conversation_id=_CONVERSATION, scope=_SCOPE, timeout_s=timeout_s)
            for ticket in tickets
        ]
        outcomes = [_result(pull.future, timeout_s + 3.0) for pull in self._pulls]
        elapsed = time.perf_counter() - began
        for pull in self._pulls:
            _result(pull.settled, timeout_s + 3.0)
        return outcomes, elapsed

    def cancel_at_once(self, ticket: GrantTicket, wanted: list[list[tuple[int, int]]], timeout_s: float) -> str:
        """Start a pull and cancel it; returns how it ended, once no operation can touch the pages any more."""
        pull = self.transceiver.pull(
            ticket, self._tables(wanted), conversation_id=_CONVERSATION, scope=_SCOPE, timeout_s=timeout_s
        )
        pull.cancel()
        outcome = _result(pull.future, timeout_s + 3.0)
        _result(pull.settled, timeout_s + 3.0)
        return str(outcome.status)

    def verify(self, request: int, wanted: list[list[tuple[int, int]]]) -> list[str]:
        """Every difference between the pages and the expected bytes, as text (at most ten)."""
        found: list[str] = []
        for group, rows in enumerate(wanted):
            for page, (ordinal, valid) in enumerate(rows):
                expected = self._expected(group, request, ordinal, valid)
                different = self._cells(group, page, valid) != expected
                if different.any():
                    first = tuple(int(index[0]) for index in np.nonzero(different))
                    count = int(np.count_nonzero(different))
                    found.append(
                        f"group {group} block {ordinal}: {count} of {expected.size} words differ, first {first}"
                    )
        return found[:10]

    def damage(self, wanted: list[list[tuple[int, int]]]) -> None:
        """Flip one bit of the first page (--force-mismatch)."""
        group = next(index for index, rows in enumerate(wanted) if rows)
        self.storage.page(0, group)[0] ^= 1

    def _tables(self, wanted: list[list[tuple[int, int]]]) -> tuple[BlockTable, ...]:
        tables = []
        for group, rows in enumerate(wanted):
            count = len(rows)
            tables.append(
                BlockTable(
                    group,
                    np.array([ordinal for ordinal, _ in rows], np.int32),
                    np.arange(count, dtype=np.int32),
                    self.storage.generations(group)[:count].copy(),
                    np.array([valid for _, valid in rows], np.int32),
                )
            )
        return tuple(tables)

    def _cells(self, group: int, page: int, valid: int) -> NDArray[np.uint64]:
        """The valid part of a page as words, in the pattern's shape."""
        kind = self.layout.groups[group]
        words = np.frombuffer(self.storage.page(page, group), np.uint64)
        if kind.kind is LifeCycleKind.RECURRENT:
            return words.reshape(len(kind.layers), -1)
        tokens = self.layout.tokens_per_block
        shape = (len(kind.layers), kind.kv_factor, kind.num_kv_heads, tokens, -1)
        return words.reshape(shape)[:, :, :, :valid, :]

    def _expected(self, group: int, request: int, ordinal: int, valid: int) -> NDArray[np.uint64]:
        kind = self.layout.groups[group]
        if kind.kind is LifeCycleKind.RECURRENT:
            return state_pattern(kind, request * 131 + ordinal)
        first = ordinal * self.layout.tokens_per_block
        seeds = np.uint64(request) * np.uint64(1 << 20) + np.arange(first, first + valid, dtype=np.uint64)
        return block_pattern(kind, self._first_heads[group], seeds)


def _result(future: Future[_T], timeout_s: float) -> _T:
    try:
        return future.result(timeout_s)
    except FutureTimeoutError:
        raise TimeoutError(f"no end within {timeout_s:g} s") from None


def ticket_to_dict(ticket: GrantTicket) -> dict[str, Any]:
    """For JSON."""
    return {**dataclasses.asdict(ticket), "token": ticket.token.hex()}


def ticket_from_dict(data: dict[str, Any]) -> GrantTicket:
    """Inverse of `ticket_to_dict`."""
    return GrantTicket(**{**data, "token": bytes.fromhex(data["token"])})


def outcome_to_dict(outcome: TransferOutcome) -> dict[str, Any]:
    """What a report needs of an outcome."""
    return {
        "status": str(outcome.status),
        "reason": outcome.reason,
        "blocks": outcome.blocks,
        "bytes": outcome.bytes,
        "transport": outcome.transport,
    }


def shares_from_lists(data: list[list[int]] | None) -> tuple[RankShare, ...] | None:
    """Shares sent as [heads in all, first, stop]."""
    return None if data is None else tuple(RankShare(total, Interval(start, stop)) for total, start, stop in data)
