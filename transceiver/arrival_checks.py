"""What must hold before a pulled block may be used: its page was not given out anew, and its digest is right.

Bookkeeping of one pull: the digests that the holder stated and those found here, and the generation numbers read after
the data. It decides nothing about the transfer and touches no network.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from transceiver.digest import DIGEST_BYTES
from transceiver.pull_reads import Rows
from transceiver.transport import ReadBatch

__all__ = ["ArrivalChecks"]


class ArrivalChecks:
    """Row numbers are those of the pull. Used by the loop only."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._expected: dict[int, bytes] = {}
        self._actual: dict[int, bytes] = {}
        self._numbers: dict[int, tuple[int, NDArray[np.uint64]]] = {}  # group -> (first page, numbers read)

    def expect(self, rows: NDArray[np.int32], digests: bytes) -> None:
        """The holder's digests, one after the other."""
        for index, row in enumerate(rows.tolist()):
            self._expected[row] = digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]

    def found(self, rows: NDArray[np.int64], digests: Sequence[bytes]) -> None:
        """Digests of what arrived (none when digests are off)."""
        self._actual.update(zip(rows.tolist(), digests, strict=False))

    def complete(self, rows: NDArray[np.int64]) -> bool:
        """True when the holder's digests of `rows` are all here."""
        return all(row in self._expected for row in rows.tolist())

    def mismatches(self, rows: NDArray[np.int64]) -> list[int]:
        """Rows whose content is not what the holder had."""
        return [row for row in rows.tolist() if self._expected[row] != self._actual.get(row)]

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

    def stale(self) -> NDArray[np.int64]:
        """Rows whose page was given out anew since the grant."""
        bad = [np.empty(0, np.int64)]
        for group, rows in self._read_rows():
            low, numbers = self._numbers[group]
            bad.append(rows[numbers[self._rows.remote[rows] - low] != self._rows.generation[rows]])
        return np.concatenate(bad)
