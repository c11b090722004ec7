"""The contract between block bookkeeping and the memory that holds the blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvcache.layout import KvLayout

__all__ = ["MemoryRegion", "PageStorage"]


@dataclass(frozen=True, slots=True)
class MemoryRegion:
    """One span of memory that a transport may register: `address` .. `address + nbytes`.

    `device` is "cpu" or "cuda:N". Page p lies at ``address + p * page_bytes``. In a layer-major pool the pages of a
    layer follow each other: page p's part of layer slot l is at ``address + (l * pages + p) * page_bytes / layers``.
    `shared_fd` is this process's descriptor of a memory file that begins with the region's first byte, for memory that
    a process of the same host may map; None for private and for device memory.
    """

    address: int
    nbytes: int
    page_bytes: int
    device: str = "cpu"
    layer_major: bool = False
    shared_fd: int | None = None


class PageStorage(Protocol):
    """Memory for the pages of every layer group of a layout.

    It knows nothing of sequences or reuse. Pages are addressed by (group, page). Page memory is page-aligned and
    lives until `close`; an implementation never moves it.
    """

    @property
    def layout(self) -> KvLayout: ...

    def num_pages(self, group: int = 0) -> int:
        """Pages in the pool of `group`."""
        ...

    def page(self, page: int, group: int = 0) -> memoryview:
        """Writable bytes of a page (block-major host memory only; raises for other pools)."""
        ...

    def read_page(self, page: int, group: int = 0) -> NDArray[np.uint8]:
        """A page's bytes as [layer][bytes of the layer], whatever the pool is like.

        A writable view of host memory, or a copy of device memory (then it blocks for the copy).
        """
        ...

    def copy_page(self, source: int, destination: int, group: int = 0) -> None:
        """Copy all bytes of one page onto another one of the same group. Blocks until done."""
        ...

    def region(self, group: int = 0) -> MemoryRegion:
        """Where the pool lies, for registration with a transport."""
        ...

    def generations(self, group: int = 0) -> NDArray[np.uint64]:
        """Generation number of every page, in host memory that a peer may read. Only the block pool writes it."""
        ...

    def generations_region(self, group: int = 0) -> MemoryRegion:
        """Where `generations` lies (page_bytes is 8)."""
        ...

    def close(self) -> None:
        """Release the memory. Idempotent. Nobody may hold a view any more."""
        ...
