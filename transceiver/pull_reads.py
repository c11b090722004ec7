"""How the rows of a pull become reads: whole pages, single fragments, or through a staging buffer.

Pages alike: runs of pages adjacent on both sides become one read. Unlike layouts with large fragments: one read per
fragment, straight into place. With small ones: the holder's bytes come in one read into a staging buffer of this side
and are copied to their places from there, in the digest thread. Pure planning; `Pull` issues what is planned here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvcache.storage.page_storage import PageStorage
from transceiver.page_part import PagePart

__all__ = ["STAGING_BYTES", "Piece", "Rows", "Segment", "plan_segments"]

_DIRECT_FRAGMENT_BYTES = 64 << 10  # at least this large: reading a fragment by itself costs less than staging
STAGING_BYTES = 1 << 20  # small enough to stay in the cache between the read and the copy to its place


@dataclass(slots=True, eq=False)
class Rows:
    """The columns of a pull, one element a wanted block."""

    group: NDArray[np.int32]
    ordinal: NDArray[np.int32]
    valid: NDArray[np.int32]
    page: NDArray[np.int32]
    remote: NDArray[np.int32]
    generation: NDArray[np.uint64]

    def __len__(self) -> int:
        return len(self.group)


@dataclass(frozen=True, slots=True)
class Piece:
    """One read: `nbytes` at `remote` of the holder's pool to local address `local` (or into the staging buffer)."""

    local: int
    nbytes: int
    remote: int


@dataclass(slots=True, eq=False)
class Segment:
    """Reads that complete `rows` together. `part` is set when the pages are unlike."""

    rows: NDArray[np.int64]
    group: int
    pieces: list[Piece]
    nbytes: int
    part: PagePart | None = None
    staged: bool = False
    buffer: NDArray[np.uint8] | None = None
    waiting: int = field(default=0)

    def place(self, rows: Rows, storage: PageStorage, remote_page_bytes: int) -> None:
        """Copy from the staging buffer into the pages; blocks. Only for staged segments."""
        assert self.part is not None and self.buffer is not None
        shape = storage.layout.groups[self.group]
        for index, row in enumerate(self.rows.tolist()):
            source = self.buffer[index * remote_page_bytes :]
            page = np.frombuffer(storage.page(int(rows.page[row]), self.group), np.uint8)
            self.part.place(source, page, shape)


def plan_segments(
    rows: Rows, which: NDArray[np.int64], storage: PageStorage, parts: tuple[PagePart | None, ...],
    remote_page_bytes: list[int], max_bytes: int,
) -> Iterator[Segment]:  # fmt: skip
    """Segments that bring `which` rows here, in order of the holder's addresses."""
    which = which[np.lexsort((rows.remote[which], rows.group[which]))]
    for group in np.unique(rows.group[which]).tolist():
        mine = which[rows.group[which] == group]
        part = parts[group]
        if part is None:
            yield from _whole_pages(rows, mine, storage, group, max_bytes)
        elif part.nbytes == 0:
            yield Segment(mine, group, [], 0, part)
        elif part.nbytes // len(part.fragments) >= _DIRECT_FRAGMENT_BYTES:
            yield from _fragments(rows, mine, storage, group, part, remote_page_bytes[group])
        else:
            yield from _staged(rows, mine, group, part, remote_page_bytes[group])


def _runs(rows: Rows, which: NDArray[np.int64], *, local: bool, step: int) -> Iterator[NDArray[np.int64]]:
    """Rows whose pages are adjacent at the holder (and here, if `local`), at most `step` at a time."""
    breaks = np.diff(rows.remote[which]) != 1
    if local:
        breaks |= np.diff(rows.page[which]) != 1
    for run in np.split(which, np.flatnonzero(breaks) + 1):
        for start in range(0, len(run), step):
            yield run[start : start + step]


def _whole_pages(
    rows: Rows, which: NDArray[np.int64], storage: PageStorage, group: int, max_bytes: int
) -> Iterator[Segment]:
    region = storage.region(group)
    size = region.page_bytes
    for run in _runs(rows, which, local=True, step=max(1, max_bytes // size)):
        local, remote = region.address + int(rows.page[run[0]]) * size, int(rows.remote[run[0]]) * size
        yield Segment(run, group, [Piece(local, len(run) * size, remote)], len(run) * size)


def _fragments(
    rows: Rows, which: NDArray[np.int64], storage: PageStorage, group: int, part: PagePart, remote_size: int
) -> Iterator[Segment]:
    region = storage.region(group)
    for index in range(len(which)):
        row = which[index : index + 1]
        local = region.address + int(rows.page[row[0]]) * region.page_bytes
        remote = int(rows.remote[row[0]]) * remote_size
        pieces = [Piece(local + f.target, f.nbytes, remote + f.source) for f in part.fragments]
        yield Segment(row, group, pieces, part.nbytes, part)


def _staged(rows: Rows, which: NDArray[np.int64], group: int, part: PagePart, remote_size: int) -> Iterator[Segment]:
    for run in _runs(rows, which, local=False, step=max(1, STAGING_BYTES // remote_size)):
        remote = int(rows.remote[run[0]]) * remote_size
        piece = Piece(0, len(run) * remote_size, remote)
        yield Segment(run, group, [piece], len(run) * part.nbytes, part, staged=True)
