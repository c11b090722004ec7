"""The cells of a transceiver test: which there are, in which order, and how one ended."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from cluster.transceiver_test.config import Direction, LayoutConfig, LayoutKind, TransceiverTestConfig
from kvcache.config import ReusePolicy

__all__ = ["Cell", "CellResult", "CellStatus", "TransferCell", "TurnCell", "cells_of_sweep"]


class CellStatus(StrEnum):
    """How a cell ended, from good to bad. NO_DATA: nothing was reported although nothing failed."""

    PASS = "PASS"
    NO_DATA = "NO_DATA"
    TRANSFER_ERROR = "TRANSFER_ERROR"
    TIMEOUT = "TIMEOUT"
    MISMATCH = "MISMATCH"


@dataclass(frozen=True, slots=True)
class TransferCell:
    """Requests of one length, in one direction, between two layouts."""

    sweep: str
    backend: str
    layout: LayoutConfig
    direction: Direction
    length: int
    case: int
    length_index: int

    @property
    def combination(self) -> str:
        return f"{self.backend}/{self.layout.name}/{self.direction}"

    @property
    def name(self) -> str:
        return f"{self.sweep}/{self.combination}/{self.length}"

    def request_id(self, request: int) -> int:
        """A number that no other request of the sweep has."""
        return self.case * 1_000_000 + self.length_index * 10_000 + request


@dataclass(frozen=True, slots=True)
class TurnCell:
    """A conversation with a rewind through both cache managers."""

    sweep: str
    backend: str
    layout: LayoutConfig
    policy: ReusePolicy
    max_num_turns: int

    @property
    def combination(self) -> str:
        return f"{self.backend}/{self.layout.name}/turns/{self.policy}/{self.max_num_turns}"

    @property
    def name(self) -> str:
        return f"{self.sweep}/{self.combination}"


Cell = TransferCell | TurnCell


@dataclass(slots=True)
class CellResult:
    """What a cell found. Bandwidths are GB/s (10^9 bytes) of one receiving rank; `samples` those of all ranks.

    `bytes_moved` counts warm-up requests too, `timed_bytes` those of `samples` only.
    """

    cell: Cell
    status: CellStatus = CellStatus.NO_DATA
    detail: str = ""
    transport: str = ""
    samples: list[float] = field(default_factory=list)
    receivers: int = 0
    bytes_moved: int = 0
    timed_bytes: int = 0
    blocks_moved: int = 0
    seconds: float = 0.0

    @property
    def per_rank(self) -> float | None:
        """Median over ranks and timed requests."""
        ordered = sorted(self.samples)
        if not ordered:
            return None
        middle = len(ordered) // 2
        return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2

    @property
    def transfer_bytes(self) -> float | None:
        """Bytes that a rank pulled for one timed request, on average over ranks and requests."""
        return self.timed_bytes / len(self.samples) if self.samples else None

    @property
    def p90(self) -> float | None:
        """Nearest-rank 90th percentile of the samples."""
        ordered = sorted(self.samples)
        return ordered[max(0, -(-len(ordered) * 9 // 10) - 1)] if ordered else None

    @property
    def aggregate(self) -> float | None:
        """Median times receiving ranks."""
        return self.per_rank * self.receivers if self.per_rank is not None else None


def cells_of_sweep(config: TransceiverTestConfig, sweep: str) -> Iterator[list[Cell]]:
    """Cells that share processes' memory, case by case: one backend, layout and direction (or one turn cell)."""
    case = 0
    for backend in config.backends:
        for layout in config.layouts:
            for direction in config.directions:
                case += 1
                yield [
                    TransferCell(sweep, backend, layout, direction, length, case, index)
                    for index, length in enumerate(config.request_lengths)
                ]
        if not config.turn_cells.enabled:
            continue
        for layout in config.layouts:
            if layout.kind not in (LayoutKind.FULL, LayoutKind.MLA) or _ranks(layout) != 1:
                continue  # a conversation needs one rank a side: the managers of a server's ranks act alike
            for policy in config.policies:
                counts = config.max_num_turns if policy is ReusePolicy.PER_CONVERSATION else config.max_num_turns[:1]
                for count in counts:
                    yield [TurnCell(sweep, backend, layout, policy, count)]


def _ranks(layout: LayoutConfig) -> int:
    sides = (layout.context, layout.generation)
    return max(side.tp * side.pp for side in sides)
