"""Several pulls that together fill the same pages, seen as one: the ranks of a server whose layout is unlike ours.

The outcome comes when every part is settled: all done is done; cancelled beats failed beats timed out. The first part
that fails ends the others, so that no holder waits for a transfer that cannot succeed.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np
from numpy.typing import NDArray

from transceiver.awaits_outcome import AwaitsOutcome, unshakable_future
from transceiver.receiver import Pull
from transceiver.transfer_types import TransferOutcome, TransferStatus

__all__ = ["FoldedPull", "fold_outcomes"]

_SEVERITY = (TransferStatus.DONE, TransferStatus.TIMED_OUT, TransferStatus.FAILED, TransferStatus.CANCELLED)


def fold_outcomes(
    outcomes: Sequence[TransferOutcome], wanted: int, first: TransferOutcome | None = None
) -> TransferOutcome:
    """One outcome for all parts, which together want `wanted` different blocks.

    `first`, the one that ended the others, gives status and reason. A block is whole when no part of it is bad.
    """
    worst = first or max(outcomes, key=lambda outcome: _SEVERITY.index(outcome.status))
    bad = sorted({pair for outcome in outcomes for pair in outcome.bad_ordinals})
    seconds: dict[str, float] = {}
    for outcome in outcomes:
        for name, value in outcome.seconds.items():
            seconds[name] = max(seconds.get(name, 0.0), value)
    return TransferOutcome(
        worst.status,
        worst.reason,
        wanted - len(bad),
        sum(outcome.bytes for outcome in outcomes),
        sum(outcome.segments for outcome in outcomes),
        "+".join(sorted({outcome.transport for outcome in outcomes if outcome.transport})),
        tuple(bad),
        seconds,
        sum(outcome.retries for outcome in outcomes),
        sum(outcome.digest_mismatches for outcome in outcomes),
    )


class FoldedPull(AwaitsOutcome):
    """`future` and `settled` as of one `Pull`. Made from pulls that were started; thread-safe."""

    def __init__(self, pulls: Sequence[Pull]) -> None:
        if not pulls:
            raise ValueError("folding needs at least one pull")
        super().__init__()
        self.settled: Future[None] = unshakable_future()
        self._pulls = tuple(pulls)
        self._lock = threading.Lock()
        self._open = len(pulls)
        self._first: TransferOutcome | None = None
        for pull in pulls:
            pull.future.add_done_callback(self._ended)
            pull.settled.add_done_callback(self._one_settled)

    def cancel(self) -> bool:
        """Cancel every part. True when nothing touches the pages any more."""
        answers = [pull.cancel() for pull in self._pulls]  # every one must be asked
        return all(answers)

    def _ended(self, future: Future[TransferOutcome]) -> None:
        outcome = future.result()
        with self._lock:
            if outcome.status is TransferStatus.DONE or self._first is not None:
                return
            self._first = outcome
        for pull in self._pulls:
            pull.cancel()

    def _one_settled(self, _: Future[None]) -> None:
        with self._lock:
            self._open -= 1
            if self._open:
                return
            first = self._first
        outcomes = [pull.future.result() for pull in self._pulls]
        self.future.set_result(fold_outcomes(outcomes, _distinct_blocks(self._pulls), first))
        self.settled.set_result(None)


def _distinct_blocks(pulls: Sequence[Pull]) -> int:
    """Blocks that at least one of the pulls asks for; not every holder has something of every layer group."""
    ordinals: dict[int, list[NDArray[np.int32]]] = {}
    for pull in pulls:
        for table in pull.wanted:
            ordinals.setdefault(table.group, []).append(table.ordinals)
    return sum(len(np.unique(np.concatenate(columns))) for columns in ordinals.values())
