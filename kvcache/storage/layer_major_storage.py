"""Host pools that keep every layer's pages together, ``[layer][page][k/v][head][token][dim]``.

For users of the transceiver whose attention kernels want one pool a layer; kvferry's own engine keeps blocks together
(`BytesPageStorage`), because a block is then one piece to move. Knows nothing of sequences or reuse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from kvcache.errors import InvalidSizeError, KvCacheError
from kvcache.layout import KvLayout
from kvcache.storage.bytes_storage import BytesPageStorage
from kvcache.storage.page_storage import MemoryRegion

__all__ = ["LayerMajorStorage"]


class LayerMajorStorage(BytesPageStorage):
    """`num_pages[g]` pages for every layer group g; the pages of one layer follow each other."""

    def __init__(self, layout: KvLayout, num_pages: Sequence[int], *, shared: bool = False) -> None:
        super().__init__(layout, num_pages, shared=shared)
        self._pools = [
            np.frombuffer(view, np.uint8).reshape(len(group.layers), count, -1)
            for view, group, count in zip(self._views, layout.groups, self._counts, strict=True)
        ]

    def pool(self, group: int = 0) -> NDArray[np.uint8]:
        """All bytes of a group as [layer slot][page][bytes of the layer], writable."""
        return self._pools[self._check_group(group)]

    def page(self, page: int, group: int = 0) -> memoryview:
        """Raises KvCacheError: a page is in pieces here."""
        raise KvCacheError("the pages of a layer-major pool are not one piece of memory: use read_page() or pool()")

    def read_page(self, page: int, group: int = 0) -> NDArray[np.uint8]:
        """The page as [layer][bytes of the layer]: a writable view with gaps between the layers."""
        if not 0 <= page < self._counts[self._check_group(group)]:
            raise InvalidSizeError(f"page {page} is not in 0..{self._counts[group] - 1} of group {group}")
        return self._pools[group][:, page]

    def copy_page(self, source: int, destination: int, group: int = 0) -> None:
        """Copy all bytes of one page onto another one of the same group."""
        self.read_page(destination, group)[:] = self.read_page(source, group)

    def region(self, group: int = 0) -> MemoryRegion:
        """Where the pool lies."""
        return replace(super().region(group), layer_major=True)

    def close(self) -> None:
        """Release the memory. Idempotent."""
        self._pools = []
        super().close()
