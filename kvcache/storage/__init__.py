"""Memory for pages. Importing this package imports no torch: a `TorchPageStorage` does when one is made."""

from __future__ import annotations

from kvcache.storage.bytes_storage import BytesPageStorage
from kvcache.storage.layer_major_storage import LayerMajorStorage
from kvcache.storage.page_storage import MemoryRegion, PageStorage
from kvcache.storage.torch_storage import TorchPageStorage

__all__ = ["BytesPageStorage", "LayerMajorStorage", "MemoryRegion", "PageStorage", "TorchPageStorage"]
