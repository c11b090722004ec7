"""Page-aligned anonymous host memory, the base of every storage of this package.

`MappedMemory` owns one private anonymous mapping, advises huge pages where the kernel offers them, and knows its
address. It must never be closed while somebody holds a view.
"""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress

__all__ = ["MappedMemory"]

_HUGE_PAGE = 2 << 20


class MappedMemory:
    """`nbytes` zeroed bytes on a page boundary. `close` is idempotent and keeps the mapping while views are alive."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        size = max(mmap.PAGESIZE, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
        self._map: mmap.mmap | None = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if size >= _HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # best effort: a kernel without transparent huge pages says EINVAL
                self._map.madvise(mmap.MADV_HUGEPAGE)
        anchor = ctypes.c_char.from_buffer(self._map)
        self.address = ctypes.addressof(anchor)
        del anchor

    def view(self) -> memoryview:
        """Writable bytes of the whole span. Raises ValueError after `close`."""
        if self._map is None:
            raise ValueError("the memory was closed")
        return memoryview(self._map)[: self.nbytes]

    def close(self) -> None:
        """Unmap. Views still held keep the memory alive until they are gone."""
        mapping, self._map = self._map, None
        if mapping is None:
            return
        try:
            mapping.close()
        except BufferError:  # a view outlives us; the mapping goes with the last view
            del mapping
