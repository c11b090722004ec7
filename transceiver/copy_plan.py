"""Many reads cut into pieces, each of which one thread copies in one go. Pure; used by `transceiver.host_copies`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["FEW_READS", "CopyPlan", "HostReader"]

FEW_READS = 128  # up to here numpy's fixed cost would be most of the work on a column
_MAX_READS = 1024  # in one piece: what the kernel takes in one call


class CopyPlan:
    """Reads cut into pieces of about `piece_bytes`: piece i has the reads ``cuts[i]`` to ``cuts[i + 1]``. Immutable.

    `piece_bytes` 0: as few pieces as possible. `cut` False: no read is cut, so that pieces are whole elements.
    """

    __slots__ = ("_columns", "cuts")

    def __init__(
        self, local: NDArray[np.uint64], remote: NDArray[np.uint64], nbytes: NDArray[np.uint64], piece_bytes: int = 0,
        *, cut: bool = True,
    ) -> None:  # fmt: skip
        columns: tuple[list[int], list[int], list[int]] = local.tolist(), remote.tolist(), nbytes.tolist()
        if len(nbytes) <= FEW_READS and piece_bytes and cut:
            columns = _cut_large(*columns, piece_bytes)
        self._columns = columns
        self.cuts = _cuts(self._columns[2], piece_bytes)

    @property
    def pieces(self) -> int:
        """Number of pieces."""
        return len(self.cuts) - 1

    def columns(self, piece: int) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
        """Local address, remote address and size of the reads in a piece."""
        part = slice(self.cuts[piece], self.cuts[piece + 1])
        local, remote, nbytes = self._columns
        return local[part], remote[part], nbytes[part]


class HostReader(Protocol):
    """What copies from a peer's host memory; any thread."""

    def plan(
        self, local: NDArray[np.uint64], remote: NDArray[np.uint64], nbytes: NDArray[np.uint64], piece_bytes: int,
        *, cut: bool,
    ) -> CopyPlan:  # fmt: skip
        """A plan that `copy` takes; `remote` holds addresses in the peer as this reader sees it."""
        ...

    def copy(self, plan: CopyPlan, piece: int) -> None:
        """Copy one piece. Blocks for it. Raises OSError."""
        ...


def _cuts(sizes: Sequence[int], piece_bytes: int) -> list[int]:
    """Indices between the pieces, first 0 and last ``len(sizes)``."""
    cuts, start, gathered = [0], 0, 0
    for index, size in enumerate(sizes, 1):
        gathered += size
        if (piece_bytes and gathered >= piece_bytes) or index - start == _MAX_READS or index == len(sizes):
            cuts.append(index)
            start, gathered = index, 0
    return cuts


def _cut_large(
    local: list[int], remote: list[int], nbytes: list[int], limit: int
) -> tuple[list[int], list[int], list[int]]:
    """The same reads, none larger than `limit`."""
    if not nbytes or max(nbytes) <= limit:
        return local, remote, nbytes
    pieces = [
        (mine + skip, theirs + skip, min(limit, size - skip))
        for mine, theirs, size in zip(local, remote, nbytes, strict=True)
        for skip in range(0, size, limit)
    ]
    return [piece[0] for piece in pieces], [piece[1] for piece in pieces], [piece[2] for piece in pieces]
