"""Pages that a torch model reads and writes in place.

On the CPU the tensors are views of the same page-aligned mapping that transports register; on a GPU the pool is one
allocation a group. `torch` is imported when a storage is made, never by importing this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvcache.errors import InvalidSizeError, KvCacheError
from kvcache.layout import KvLayout, LifeCycleKind
from kvcache.storage.bytes_storage import BytesPageStorage
from kvcache.storage.host_memory import MappedMemory
from kvcache.storage.page_storage import MemoryRegion

if TYPE_CHECKING:
    import torch

__all__ = ["TorchPageStorage"]


class TorchPageStorage:
    """`num_pages[g]` pages for every layer group g on `device`; `tensor(g)` is the pool as a tensor.

    `shared`: what lies in host memory lies in shared memory (see `BytesPageStorage`).
    """

    def __init__(
        self, layout: KvLayout, num_pages: Sequence[int], device: str = "cpu", *, shared: bool = False
    ) -> None:
        import torch

        self._torch = torch
        self._device = torch.device(device)
        self._host: BytesPageStorage | None = None
        self._layout = layout
        self._counts = tuple(int(count) for count in num_pages)
        self._generation_memory: list[MappedMemory] = []
        self._generations: list[NDArray[np.uint64]] = []
        if self._device.type == "cpu":
            self._host = BytesPageStorage(layout, num_pages, shared=shared)
            raw = [
                torch.frombuffer(
                    np.frombuffer(
                        self._host._memory[group].view(), dtype=np.uint8
                    ),  # the mapping itself: one memory for model and transport
                    dtype=torch.uint8,
                )
                for group in range(len(layout.groups))
            ]
        else:
            if len(num_pages) != len(layout.groups) or any(count < 1 for count in num_pages):
                raise InvalidSizeError(f"give one positive page count a layer group, not {list(num_pages)}")
            raw = [
                torch.zeros(count * layout.page_bytes(group), dtype=torch.uint8, device=self._device)
                for group, count in enumerate(self._counts)
            ]
            self._generation_memory = [MappedMemory(8 * count, shared=shared) for count in self._counts]
            self._generations = [np.frombuffer(m.view(), dtype=np.uint64) for m in self._generation_memory]
        self._raw = raw
        self._tensors = [self._shaped(group, flat) for group, flat in enumerate(raw)]

    @property
    def layout(self) -> KvLayout:
        """The layout given at construction."""
        return self._layout

    def tensor(self, group: int = 0) -> torch.Tensor:
        """The pool as [pages, layers, kv, heads, tokens, dim] (a recurrent group: [pages, layers, state bytes])."""
        return self._tensors[group]

    def num_pages(self, group: int = 0) -> int:
        """Pages in the pool of `group`."""
        return self._counts[group]

    def page(self, page: int, group: int = 0) -> memoryview:
        """Writable bytes of a page. Raises KvCacheError when the pool lies on a device."""
        if self._host is None:
            raise KvCacheError(f"pages on {self._device} have no host view: copy them through the tensor")
        return self._host.page(page, group)

    def read_page(self, page: int, group: int = 0) -> NDArray[np.uint8]:
        """The page as [layer][bytes of the layer]: a view of host memory, or a copy of device memory (blocks)."""
        if self._host is not None:
            return self._host.read_page(page, group)
        size = self._layout.page_bytes(group)
        copied: NDArray[np.uint8] = self._raw[group][page * size : (page + 1) * size].cpu().numpy()
        return copied.reshape(len(self._layout.groups[group].layers), -1)

    def copy_page(self, source: int, destination: int, group: int = 0) -> None:
        """Copy all bytes of one page onto another one; blocks until done."""
        if self._host is not None:
            self._host.copy_page(source, destination, group)
            return
        pool = self._tensors[group]
        pool[destination].copy_(pool[source])
        self._torch.cuda.synchronize(self._device)

    def region(self, group: int = 0) -> MemoryRegion:
        """Where the pool lies."""
        if self._host is not None:
            return self._host.region(group)
        flat = self._raw[group]
        index = self._device.index if self._device.index is not None else self._torch.cuda.current_device()
        return MemoryRegion(flat.data_ptr(), flat.numel(), self._layout.page_bytes(group), f"cuda:{index}")

    def generations(self, group: int = 0) -> NDArray[np.uint64]:
        """Generation number of every page, in host memory."""
        return self._host.generations(group) if self._host is not None else self._generations[group]

    def generations_region(self, group: int = 0) -> MemoryRegion:
        """Where `generations` lies."""
        if self._host is not None:
            return self._host.generations_region(group)
        memory = self._generation_memory[group]
        return MemoryRegion(memory.address, memory.nbytes, 8, "cpu", shared_fd=memory.fd)

    def close(self) -> None:
        """Release the memory. Idempotent."""
        self._tensors = []
        self._raw = []
        self._generations = []
        if self._host is not None:
            self._host.close()
        for memory in self._generation_memory:
            memory.close()

    def _shaped(self, group: int, flat: torch.Tensor) -> torch.Tensor:
        spec = self._layout.groups[group]
        pages = self._counts[group]
        if spec.kind is LifeCycleKind.RECURRENT:
            return flat.view(pages, len(spec.layers), spec.state_bytes_per_layer)
        dtype = getattr(self._torch, spec.dtype)
        shape = (
            pages,
            len(spec.layers),
            spec.kv_factor,
            spec.num_kv_heads,
            self._layout.tokens_per_block,
            spec.head_dim,
        )
        return flat.view(dtype).view(shape)
