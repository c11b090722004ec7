"""What must hold before a pulled block may be used: its page was not given out anew, and its digest is right.

Bookkeeping of one pull: the digests that the holder stated and those found here, the generation numbers read after the
data, and which blocks must not be used. It decides nothing about the transfer and touches no network.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from transceiver.digest import DIGEST_BYTES
from transceiver.pull_reads import MISSING_PAGE, Rows
from transceiver.transport import ReadBatch

__all__ = ["ArrivalChecks"]


class ArrivalChecks:
    """Row numbers are those of the pull. Used by the loop only."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._expected: dict[int, bytes] = {}
        self._actual: dict[int, bytes] = {}
        self._numbers: dict[int, tuple[int, NDArray[np.uint64]]] = {}  # group -> (first page, numbers read)
        self._bad = np.zeros(len(rows), np.bool_)
        self.num_mismatches = 0  # blocks that arrived with another content than the holder's

    def expect(self, rows: NDArray[np.int32], digests: bytes) -> None:
        """The holder's digests, one after the other."""
        for index, row in enumerate(rows.tolist()):
            self._expected[row] = digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]

    def found(self, rows: NDArray[np.int64], digests: Sequence[bytes]) -> None:
        """Digests of what arrived (none when digests are off)."""
        self._actual.update(zip(rows.tolist(), digests, strict=False))

    @property
    def complete(self) -> bool:
        """True when the holder's digests of all blocks that may be good are here."""
        return all(row in self._expected for row in self._good_rows())

    def compare(self) -> int:
        """Mark the blocks whose content is not what the holder had. Returns how many were compared."""
        rows = self._good_rows()
        wrong = [row for row in rows if self._expected[row] != self._actual.get(row)]
        self.num_mismatches = len(wrong)
        self._bad[wrong] = True
        return len(rows)

    def _good_rows(self) -> list[int]:
        rows: list[int] = np.flatnonzero(~self._bad).tolist()
        return rows

    def miss(self, rows: NDArray[np.int32]) -> None:
        """The holder does not have these blocks."""
        self._bad[rows] = True

    def give_up(self) -> None:
        """The transfer failed: no block may be used."""
        self._bad[:] = True

    @property
    def num_good(self) -> int:
        """Blocks that are not known to be bad."""
        return int((~self._bad).sum())

    def bad_ordinals(self) -> tuple[tuple[int, int], ...]:
        """(group, ordinal) of the blocks that must not be used."""
        bad = self._bad
        return tuple(zip(self._rows.group[bad].tolist(), self._rows.ordinal[bad].tolist(), strict=True))

    def complaint(self) -> str:
        """What is wrong with what arrived, in words; empty when every block is good."""
        if not self._bad.any():
            return ""
        missing = int((self._rows.remote == MISSING_PAGE).sum())
        reason = f"{int(self._bad.sum())} of {len(self._bad)} blocks did not arrive whole"
        return f"{reason} ({missing} not held by the holder)" if missing else reason

    def generation_reads(self) -> list[tuple[int, ReadBatch]]:
        """Per group the read that brings the generation numbers of all pages that were read."""
        reads = []
        for group, rows in self._read_rows():
            pages = self._rows.remote[rows]
            low, high = int(pages.min()), int(pages.max()) + 1
            numbers = np.zeros(high - low, np.uint64)
            self._numbers[group] = (low, numbers)
            reads.append((group, ReadBatch.single(numbers.ctypes.data, low * 8, numbers.nbytes)))
        return reads

    def _read_rows(self) -> list[tuple[int, NDArray[np.int64]]]:
        """Per group the rows that the holder has."""
        held, only = np.flatnonzero(self._rows.remote >= 0), self._rows.only_group
        if only is not None:
            return [(only, held)] if len(held) else []
        groups = self._rows.group[held]
        return [(group, held[groups == group]) for group in np.unique(groups).tolist()]

    def find_stale(self) -> int:
        """Mark the blocks whose page was given out anew since the grant; returns how many."""
        count = 0
        for group, rows in self._read_rows():
            low, numbers = self._numbers[group]
            stale = rows[numbers[self._rows.remote[rows] - low] != self._rows.generation[rows]]
            self._bad[stale] = True
            count += len(stale)
        return count
