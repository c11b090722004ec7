"""Storages, block tables and shapes of the benchmark: the same kind of pool on both sides and for the copies."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvcache.block_table import BlockTable
from kvcache.layout import KvLayout, LayerGroup, LifeCycleKind
from kvcache.storage.bytes_storage import BytesPageStorage

__all__ = ["PAGE_LAYOUTS", "Shape", "block_table", "copy_pages", "filled_storage"]

_TOKENS = 16
#: Layouts by name: pages of 64 KiB and 1 MiB, and the halves of the latter's heads that a rank of two holds.
PAGE_LAYOUTS: dict[str, KvLayout] = {
    "64K": KvLayout("bench", _TOKENS, (LayerGroup(LifeCycleKind.FULL, (0,), 8, 64),)),
    "1M": KvLayout("bench", _TOKENS, (LayerGroup(LifeCycleKind.FULL, tuple(range(16)), 8, 64),)),
    "1M/2": KvLayout("bench", _TOKENS, (LayerGroup(LifeCycleKind.FULL, tuple(range(16)), 4, 64),)),
    "1M/4": KvLayout("bench", _TOKENS, (LayerGroup(LifeCycleKind.FULL, tuple(range(16)), 2, 64),)),
}


@dataclass(frozen=True, slots=True)
class Shape:
    """`count` pages in runs of `run` adjacent ones, at random places of a pool."""

    count: int
    run: int

    def pages(self, total: int, rng: np.random.Generator) -> NDArray[np.int32]:
        """Page numbers of one transfer."""
        starts = rng.permutation(total // self.run)[: -(-self.count // self.run)] * self.run
        return (starts[:, None] + np.arange(self.run)).reshape(-1)[: self.count].astype(np.int32)


def filled_storage(layout: KvLayout, pages: int, fill: int, *, shared: bool) -> BytesPageStorage:
    """A pool whose every byte is `fill`, all of it touched; in shared memory if told so."""
    storage = BytesPageStorage(layout, [pages], shared=shared)
    region = storage.region()
    ctypes.memset(region.address, fill, region.nbytes)
    storage.generations()[:] = 1
    return storage


def block_table(pages: NDArray[np.int32]) -> BlockTable:
    """Full blocks 0.. on `pages`."""
    count = len(pages)
    return BlockTable(
        0, np.arange(count, dtype=np.int32), pages, np.full(count, 1, np.uint64), np.full(count, _TOKENS, np.int32)
    )


def copy_pages(
    target: BytesPageStorage, source: BytesPageStorage, to: NDArray[np.int32], pages: NDArray[np.int32], run: int
) -> None:
    """The yardstick: the same pages by memmove inside this process, a run at a time."""
    mine, theirs = target.region(), source.region()
    size = mine.page_bytes
    for start in range(0, len(pages), run):
        count = min(run, len(pages) - start)
        ctypes.memmove(mine.address + int(to[start]) * size, theirs.address + int(pages[start]) * size, count * size)
