"""How the rows of a pull become reads: whole pages, single fragments, or through a staging buffer.

Pages alike: runs of pages adjacent on both sides become one read. Unlike layouts with large fragments: one read a
fragment, straight into place. With small ones: the holder's pages come whole into a staging buffer of this side and
are copied to their places from there, in the digest thread; a pool that is mapped here needs no buffer. Reads are put
into batches of a few MiB: the unit of progress, of cancelling and of hashing. Pure planning; `Pull` issues what is
planned here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvcache.block_table import BlockTable
from kvcache.storage.page_storage import PageStorage
from transceiver.page_part import PagePart
from transceiver.transport import ReadBatch

__all__ = ["MISSING_PAGE", "STAGING_BYTES", "UNKNOWN_PAGE", "Rows", "Segment", "plan_segments"]

UNKNOWN_PAGE = -2  # in `Rows.remote`: not granted yet
MISSING_PAGE = -1  # in `Rows.remote` and in a grant: the holder does not have it
STAGING_BYTES = 1 << 20  # small enough to stay in the cache between the read and the copy to its place
_MAPPED_BYTES = 4 << 20  # of pages that are put in place straight from the holder's mapped pool


@dataclass(slots=True, eq=False)
class Rows:
    """The columns of a pull, one element a wanted block."""

    group: NDArray[np.int32]
    ordinal: NDArray[np.int32]
    valid: NDArray[np.int32]
    page: NDArray[np.int32]
    remote: NDArray[np.int32]
    generation: NDArray[np.uint64]
    only_group: int | None = None  # when all rows are of one

    def __len__(self) -> int:
        return len(self.group)

    @staticmethod
    def wanted(tables: Sequence[BlockTable]) -> Rows:
        """The blocks of `tables`, one after the other; nothing is known of the holder's pages yet."""
        empty = np.empty(0, np.int32)
        groups = {table.group for table in tables if len(table)}
        count = sum(len(table) for table in tables)
        return Rows(
            np.concatenate([empty, *(np.full(len(table), table.group, np.int32) for table in tables)]),
            np.concatenate([empty, *(table.ordinals for table in tables)]),
            np.concatenate([empty, *(table.valid_tokens for table in tables)]),
            np.concatenate([empty, *(table.pages for table in tables)]),
            np.full(count, UNKNOWN_PAGE, np.int32),
            np.zeros(count, np.uint64),
            groups.pop() if len(groups) == 1 else None,
        )


@dataclass(slots=True, eq=False)
class Segment:
    """A batch of reads that completes `rows` together. `part` is set when the pages are unlike.

    A staged batch reads into a buffer that it is given when it starts (`batch.local` then counts from 0). A mapped one
    reads nothing: its pages are put in place from `source`, the holder's pool, which it is given when it starts.
    """

    rows: NDArray[np.int64]
    group: int
    batch: ReadBatch
    nbytes: int
    part: PagePart | None = None
    staged: bool = False
    mapped: bool = False
    source: NDArray[np.uint8] | None = None
    buffer: NDArray[np.uint8] | None = None
    by_row: bool = False  # one read a row: rows may be hashed apart
    digests: list[bytes | None] | None = None  # of `rows`, as far as they are computed

    @property
    def unlike(self) -> bool:
        """Its pages have to be put in place after the reads."""
        return self.staged or self.mapped

    @property
    def buffer_bytes(self) -> int:
        """Size of the staging buffer it needs."""
        return int(self.batch.nbytes.sum())

    def place(self, rows: Rows, storage: PageStorage, remote_page_bytes: int) -> None:
        """Copy from the staging buffer or the mapped pool into the pages; blocks. Only for such segments."""
        source = self.source if self.mapped else self.buffer
        assert self.part is not None and source is not None
        shape = storage.layout.groups[self.group]
        for index, row in enumerate(self.rows.tolist()):
            at = int(rows.remote[row]) if self.mapped else index
            page = source[at * remote_page_bytes : (at + 1) * remote_page_bytes]
            self.part.place(page, storage.read_page(int(rows.page[row]), self.group), shape)


def plan_segments(
    rows: Rows, which: NDArray[np.int64], storage: PageStorage, parts: tuple[PagePart | None, ...],
    remote_page_bytes: list[int], max_bytes: int, direct_bytes: int, *, by_row: bool = False, mapped: bool = False,
) -> Iterator[Segment]:  # fmt: skip
    """Segments that bring `which` rows here, in order of the holder's addresses.

    Fragments of at least `direct_bytes` are read straight into place, and into device memory all of them.
    `by_row`: pages alike are read one by one, not in runs, so that each can be worked on when it is there.
    `mapped`: the holder's pools are mapped in this process.
    """
    only = rows.only_group
    which = which[np.argsort(rows.remote[which]) if only is not None else _by_group(rows, which)]
    for group in [only] if only is not None and len(which) else np.unique(rows.group[which]).tolist():
        mine = which if only is not None else which[rows.group[which] == group]
        part = parts[group]
        if part is None:
            yield from _whole_pages(rows, mine, storage, group, max_bytes, by_row)
        elif part.nbytes == 0:
            nothing = np.empty(0, np.uint64)
            yield Segment(mine, group, ReadBatch(nothing, nothing, nothing), 0, part)
        elif part.nbytes // len(part.fragments) >= direct_bytes or storage.region(group).device != "cpu":
            yield from _fragments(rows, mine, storage, group, part, max_bytes)
        elif mapped and part.holder_layer_stride is None:
            nothing = np.empty(0, np.uint64)
            for some in _batches(mine, remote_page_bytes[group], _MAPPED_BYTES):
                no_reads = ReadBatch(nothing, nothing, nothing)
                yield Segment(some, group, no_reads, len(some) * part.nbytes, part, mapped=True)
        else:
            yield from _staged(rows, mine, group, part, remote_page_bytes[group])


def _by_group(rows: Rows, which: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.lexsort((rows.remote[which], rows.group[which]))


def _runs(adjacent: NDArray[np.bool_]) -> NDArray[np.int64]:
    """First index of every run; ``adjacent[i]`` says that i + 1 continues i."""
    return np.concatenate([[0], np.flatnonzero(~adjacent) + 1]).astype(np.int64)


def _batches(rows: NDArray[np.int64], page_bytes: int, max_bytes: int) -> Iterator[NDArray[np.int64]]:
    step = max(1, max_bytes // page_bytes)
    for start in range(0, len(rows), step):
        yield rows[start : start + step]


def _whole_pages(
    rows: Rows, which: NDArray[np.int64], storage: PageStorage, group: int, max_bytes: int, by_row: bool
) -> Iterator[Segment]:
    region = storage.region(group)
    size = region.page_bytes
    for part in _batches(which, size, max_bytes):
        pages, remote = rows.page[part].astype(np.int64), rows.remote[part].astype(np.int64)
        starts = np.arange(len(part)) if by_row else _runs((np.diff(pages) == 1) & (np.diff(remote) == 1))
        lengths = np.diff(np.append(starts, len(part)))
        batch = ReadBatch(
            (region.address + pages[starts] * size).astype(np.uint64),
            (remote[starts] * size).astype(np.uint64),
            (lengths * size).astype(np.uint64),
        )
        yield Segment(part, group, batch, len(part) * size, by_row=by_row)


def _fragments(
    rows: Rows, which: NDArray[np.int64], storage: PageStorage, group: int, part: PagePart, max_bytes: int
) -> Iterator[Segment]:
    region = storage.region(group)
    source, target, sizes = (
        np.asarray([getattr(f, name) for f in part.fragments], np.int64) for name in ("source", "target", "nbytes")
    )
    for some in _batches(which, part.nbytes, max_bytes):
        local = region.address + rows.page[some].astype(np.int64)[:, None] * part.receiver_stride + target
        remote = rows.remote[some].astype(np.int64)[:, None] * part.holder_stride + source
        batch = ReadBatch(
            local.reshape(-1).astype(np.uint64), remote.reshape(-1).astype(np.uint64),
            np.tile(sizes, len(some)).astype(np.uint64),
        )  # fmt: skip
        yield Segment(some, group, batch, len(some) * part.nbytes, part)


def _staged(rows: Rows, which: NDArray[np.int64], group: int, part: PagePart, remote_size: int) -> Iterator[Segment]:
    for some in _batches(which, remote_size, STAGING_BYTES):
        remote = rows.remote[some].astype(np.int64)
        if part.holder_layer_stride is not None:
            yield Segment(some, group, _by_layer(remote, part, remote_size), len(some) * part.nbytes, part, staged=True)
            continue
        starts = _runs(np.diff(remote) == 1)
        lengths = np.diff(np.append(starts, len(some)))
        batch = ReadBatch(
            (starts * remote_size).astype(np.uint64), (remote[starts] * remote_size).astype(np.uint64),
            (lengths * remote_size).astype(np.uint64),
        )  # fmt: skip
        yield Segment(some, group, batch, len(some) * part.nbytes, part, staged=True)


def _by_layer(remote: NDArray[np.int64], part: PagePart, page_bytes: int) -> ReadBatch:
    """Reads that bring whole pages of a layer-major pool, layer by layer, one after the other into a buffer."""
    assert part.holder_layer_stride is not None
    size = part.holder_stride
    layers = np.arange(page_bytes // size, dtype=np.int64)
    offset = remote[:, None] * size + layers * part.holder_layer_stride
    local = np.arange(offset.size, dtype=np.int64) * size
    return ReadBatch(
        local.astype(np.uint64), offset.reshape(-1).astype(np.uint64), np.full(offset.size, size, np.uint64)
    )
