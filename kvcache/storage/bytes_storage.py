"""Host pages as plain bytes: the storage of tests, of the hash model, and the base of the torch one.

Used by the manager and the transceiver through the `PageStorage` protocol. It knows nothing of sequences or reuse.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvcache.errors import InvalidSizeError, UnknownLifeCycleError
from kvcache.layout import KvLayout
from kvcache.storage.host_memory import MappedMemory
from kvcache.storage.page_storage import MemoryRegion

__all__ = ["BytesPageStorage"]


class BytesPageStorage:
    """`num_pages[g]` pages for every layer group g, in page-aligned host memory that never moves.

    `shared`: in shared memory, which a transceiver of the same host may map and copy from (see `MappedMemory`).
    """

    device = "cpu"

    def __init__(self, layout: KvLayout, num_pages: Sequence[int], *, shared: bool = False) -> None:
        if len(num_pages) != len(layout.groups):
            raise InvalidSizeError(f"give one page count a layer group: {len(layout.groups)}, not {len(num_pages)}")
        if any(count < 1 for count in num_pages):
            raise InvalidSizeError(f"every pool needs at least one page, not {list(num_pages)}")
        self._layout = layout
        self._counts = tuple(int(count) for count in num_pages)
        self._page_bytes = tuple(layout.page_bytes(group) for group in range(len(layout.groups)))
        self._memory = [
            MappedMemory(count * size, shared=shared)
            for count, size in zip(self._counts, self._page_bytes, strict=True)
        ]
        self._views = [memory.view() for memory in self._memory]
        self._generation_memory = [MappedMemory(8 * count, shared=shared) for count in self._counts]
        self._generations = [np.frombuffer(memory.view(), dtype=np.uint64) for memory in self._generation_memory]

    @property
    def layout(self) -> KvLayout:
        """The layout given at construction."""
        return self._layout

    def num_pages(self, group: int = 0) -> int:
        """Pages in the pool of `group`."""
        return self._counts[self._check_group(group)]

    def page(self, page: int, group: int = 0) -> memoryview:
        """Writable bytes of a page. Raises InvalidSizeError for a page that the pool does not have."""
        size = self._page_bytes[self._check_group(group)]
        if not 0 <= page < self._counts[group]:
            raise InvalidSizeError(f"page {page} is not in 0..{self._counts[group] - 1} of group {group}")
        return self._views[group][page * size : (page + 1) * size]

    def read_page(self, page: int, group: int = 0) -> NDArray[np.uint8]:
        """The page as [layer][bytes of the layer]: a writable view. Raises InvalidSizeError like `page`."""
        return np.frombuffer(self.page(page, group), np.uint8).reshape(len(self._layout.groups[group].layers), -1)

    def copy_page(self, source: int, destination: int, group: int = 0) -> None:
        """Copy all bytes of one page onto another one of the same group."""
        self.page(destination, group)[:] = self.page(source, group)

    def region(self, group: int = 0) -> MemoryRegion:
        """Where the pool lies."""
        memory = self._memory[self._check_group(group)]
        return MemoryRegion(memory.address, memory.nbytes, self._page_bytes[group], self.device, shared_fd=memory.fd)

    def generations(self, group: int = 0) -> NDArray[np.uint64]:
        """Generation number of every page; only the block pool writes it."""
        return self._generations[self._check_group(group)]

    def generations_region(self, group: int = 0) -> MemoryRegion:
        """Where `generations` lies."""
        memory = self._generation_memory[self._check_group(group)]
        return MemoryRegion(memory.address, memory.nbytes, 8, "cpu", shared_fd=memory.fd)

    def close(self) -> None:
        """Release the memory. Idempotent."""
        self._views = []
        self._generations = []
        for memory in (*self._memory, *self._generation_memory):
            memory.close()

    def _check_group(self, group: int) -> int:
        if not 0 <= group < len(self._counts):
            raise UnknownLifeCycleError(f"no layer group {group}: the layout has {len(self._counts)}")
        return group
