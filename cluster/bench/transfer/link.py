"""A holder process and a receiver here, and the measuring of one case between them, round by round beside a copy."""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cluster.bench.transfer.holder_process import SECRET, HolderProcess
from cluster.bench.transfer.pools import PAGE_LAYOUTS, Shape, block_table, copy_pages, filled_storage
from transceiver import CacheTransceiver, CacheTransceiverConfig, Pull, TransferOutcome
from transceiver.parallel_layout import RankShare

__all__ = ["BenchLink", "Measured", "Peer"]

_names = itertools.count()
Pages = NDArray[np.int32]
Peer = Callable[[Pages, Pages], float | None]  # pages here, pages there -> seconds for the same bytes


@dataclass(slots=True)
class Measured:
    """Rounds of one case, in seconds: request to last byte, to the end, the copy, and each peer's time.

    Ratios are medians over rounds of the ratio inside a round, so that a slow moment of the machine falls on both.
    """

    nbytes: int
    transport: str = ""
    data: list[float] = field(default_factory=list)
    total: list[float] = field(default_factory=list)
    copy: list[float] = field(default_factory=list)
    peers: dict[str, list[float]] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        """Bytes per second of the median round."""
        return self.nbytes / statistics.median(self.data)

    @property
    def r(self) -> float:
        """Throughput over the copy's."""
        return _ratio(self.copy, self.data)

    @property
    def fixed_ms(self) -> float:
        """What a transfer takes from request to end above the copy."""
        return statistics.median(total - copy for total, copy in zip(self.total, self.copy, strict=True)) * 1e3

    def over(self, peer: str) -> float | None:
        """Throughput over a peer's, None when it was not measured in every round."""
        times = self.peers.get(peer, [])
        return _ratio(times, self.data) if len(times) == len(self.data) else None


def _ratio(theirs: Sequence[float], ours: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(theirs, ours, strict=True))


class BenchLink:
    """A holder process and this process's receiver, with pools of one kind."""

    def __init__(
        self, layout: str, pages: int, settings: dict[str, Any], *, here: str | None = None,
        shares: tuple[RankShare, RankShare] | None = None, namespace: str | None = None, host: str = "127.0.0.1",
    ) -> None:  # fmt: skip
        self._stack = contextlib.ExitStack()
        self.pages = pages
        self.holder = self._stack.enter_context(
            HolderProcess(layout, pages, settings, shares and shares[0], namespace=namespace, host=host)
        )
        config = CacheTransceiverConfig(**settings)
        kind = {"shared": config.wants_shared_pools}
        self.storage = filled_storage(PAGE_LAYOUTS[here or layout], pages, 0, **kind)
        self.source = filled_storage(PAGE_LAYOUTS[here or layout], pages, 7, **kind)
        self._stack.callback(self.source.close)
        self._stack.callback(self.storage.close)
        self.transceiver = self._stack.enter_context(
            CacheTransceiver(
                worker_id="bench-receiver", storage=self.storage, config=config,
                secret=SECRET, shares=(shares[1],) if shares else None,
            )
        )  # fmt: skip
        self.rng = np.random.default_rng(1)

    def __enter__(self) -> BenchLink:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def offer(self, theirs: Pages) -> Any:
        """A ticket for pages of the holder."""
        (ticket,) = self.holder.offer([(f"bench-{next(_names)}", theirs)])
        return ticket

    def pull(self, mine: Pages, theirs: Pages) -> TransferOutcome:
        """One transfer. Raises RuntimeError when it does not succeed on both sides."""
        ticket = self.offer(theirs)
        pull = self.transceiver.pull(ticket, (block_table(mine),), conversation_id=None, scope=b"", timeout_s=60)
        outcome = pull.future.result(60)
        pull.settled.result(10)
        if outcome.status.value != "done" or self.holder.outcomes() != ["done"]:
            raise RuntimeError(f"a benchmark transfer failed: {outcome.reason}")
        return outcome

    def stream(self, count: int, warm_up: int, window: int) -> float:
        """Bytes a second of `count` contiguous transfers after `warm_up` others, `window` of them under way at a time.

        Each has a part of the pools of its own. Timed from the end of the last one before to the end of the last one.
        Raises RuntimeError when one fails.
        """
        part = self.pages // window
        pages = [np.arange(part, dtype=np.int32) + index % window * part for index in range(warm_up + count)]
        tickets = self.holder.offer([(f"bench-{next(_names)}", each) for each in pages])
        pulls: list[Pull] = []
        started = 0.0
        for index, (ticket, each) in enumerate(zip(tickets, pages, strict=True)):
            if index >= window:
                pulls[index - window].settled.result(60)
            if index - window == warm_up - 1:
                started = time.perf_counter()
            table = (block_table(each),)
            pulls.append(self.transceiver.pull(ticket, table, conversation_id=None, scope=b"", timeout_s=60))
        for pull in pulls:
            pull.settled.result(60)
        seconds = time.perf_counter() - started
        if any(pull.future.result().status.value != "done" for pull in pulls) or set(self.holder.outcomes()) != {
            "done"
        }:
            raise RuntimeError("a benchmark transfer failed")
        return count * part * self.storage.region().page_bytes / seconds

    def pick(self, shape: Shape) -> tuple[Pages, Pages]:
        """Pages here and there for one transfer."""
        return shape.pages(self.pages, self.rng), shape.pages(self.pages, self.rng)

    def measure(self, shape: Shape, rounds: int, peers: dict[str, Peer] | None = None) -> Measured:
        """`rounds` rounds after one that only warms up; the order inside a round turns round every time."""
        result = Measured(shape.count * self.storage.region().page_bytes)
        for index in range(rounds + 1):
            mine, theirs = self.pick(shape)
            times: dict[str, float | None] = {}

            def transfer(mine: Pages = mine, theirs: Pages = theirs) -> TransferOutcome:
                return self.pull(mine, theirs)

            def copy(mine: Pages = mine, theirs: Pages = theirs, times: dict[str, float | None] = times) -> None:
                started = time.perf_counter()
                copy_pages(self.storage, self.source, mine, theirs, shape.run)
                times["copy"] = time.perf_counter() - started

            if index % 2:
                copy()
                outcome = transfer()
            else:
                outcome = transfer()
                copy()
            for name, peer in (peers or {}).items():
                times[name] = peer(mine, theirs)
            if index:
                self._add(result, outcome, times)
        return result

    @staticmethod
    def _add(result: Measured, outcome: TransferOutcome, times: dict[str, float | None]) -> None:
        result.transport, result.nbytes = outcome.transport, outcome.bytes
        result.data.append(outcome.seconds["prepare"] + outcome.seconds["transfer"])
        result.total.append(outcome.seconds["total"])
        for name, seconds in times.items():
            if seconds is not None:
                (result.copy if name == "copy" else result.peers.setdefault(name, [])).append(seconds)
