"""Which pages hold which blocks: the value that the cache manager and the transceiver exchange."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["BlockTable"]


@dataclass(frozen=True, slots=True, eq=False)
class BlockTable:
    """A selection of one sequence's blocks of one layer group, as parallel columns (one row a block).

    ordinals      int32   block positions in the sequence, strictly increasing
    pages         int32   page of each block in the group's pool
    generations   uint64  the page's generation when this table was made; a reader checks it after its copy
    valid_tokens  int32   leading tokens of the page that count (tokens_per_block, less for a partial last block)
    """

    group: int
    ordinals: NDArray[np.int32]
    pages: NDArray[np.int32]
    generations: NDArray[np.uint64]
    valid_tokens: NDArray[np.int32]

    def __post_init__(self) -> None:
        rows = len(self.ordinals)
        if not rows == len(self.pages) == len(self.generations) == len(self.valid_tokens):
            raise ValueError("the columns of a block table have one length")
        if rows > 1 and not bool((np.diff(self.ordinals) > 0).all()):
            raise ValueError("the ordinals of a block table increase strictly")

    def __len__(self) -> int:
        return len(self.ordinals)

    def select(self, rows: NDArray[np.bool_] | NDArray[np.int64]) -> BlockTable:
        """The same table with only `rows` (a mask or row indices in increasing order)."""
        return BlockTable(
            self.group, self.ordinals[rows], self.pages[rows], self.generations[rows], self.valid_tokens[rows]
        )
