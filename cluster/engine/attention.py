"""The engine's matrix products and attention over pages in plain torch: the reference that every device has.

Attention serves one sequence at a time: it gathers the sequence's pages and calls scaled_dot_product_attention. Only
tokens that exist are read, so whatever stands in the rest of a page cannot reach a result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import linear, scaled_dot_product_attention

__all__ = ["GatherAttention", "Kernels", "SequencePages", "TorchKernels"]

_FEW_ROWS = range(2, 33)  # where the transposed product is the faster one on CPUs


@dataclass(frozen=True, slots=True, eq=False)
class SequencePages:
    """One sequence of a step: positions start .. end - 1 are its rows, `pages` (int64) covers 0 .. end - 1."""

    start: int
    end: int
    pages: NDArray[np.int64]


class Kernels(Protocol):
    """What a forward pass needs beyond element-wise operations."""

    def linear(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """`rows` (n, in) times the transpose of `weight` (out, in)."""
        ...

    def plan(self, sequences: Sequence[SequencePages]) -> Any:
        """Prepare one step's attention, once for all layers."""
        ...

    def attend(self, plan: Any, pool: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        """Causal attention of all rows of the step over one layer.

        `query` (rows, heads, dim), sequence after sequence; `pool` (pages, 2, kv_heads, block, dim). Returns
        (rows, heads * dim).
        """
        ...


class GatherAttention:
    """Attention of one sequence. `pages` int64 (blocks,) on the pool's device, covering `end` tokens."""

    def __init__(self, pages: torch.Tensor, start: int, end: int) -> None:
        self.rows = end - start
        self._pages = pages
        self._end = end
        self._mask: torch.Tensor | None = None
        if end - start > 1 and start > 0:
            keys = torch.arange(end, device=pages.device)
            queries = torch.arange(start, end, device=pages.device)
            self._mask = keys[None, :] <= queries[:, None]

    def __call__(self, pool: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        """Attend from `query` (tokens, heads, dim) over `pool` (pages, 2, kv_heads, block, dim); shape of `query`."""
        tokens, heads, dim = query.shape
        kv_heads = pool.shape[2]
        gathered = pool.index_select(0, self._pages)  # blocks, 2, kv_heads, block, dim
        both = gathered.permute(1, 2, 0, 3, 4).reshape(2, kv_heads, -1, dim)[:, :, : self._end]
        if both.dtype != query.dtype:
            both = both.to(query.dtype)
        keys, values = both[0], both[1]
        if tokens == 1:  # the query heads of one KV head become its query rows
            rows = query.reshape(1, kv_heads, heads // kv_heads, dim)
            return scaled_dot_product_attention(rows, keys[None], values[None]).view(1, heads, dim)
        rows = query.transpose(0, 1)[None]
        result = scaled_dot_product_attention(
            rows, keys[None], values[None], attn_mask=self._mask, is_causal=self._mask is None, enable_gqa=True
        )
        return result[0].transpose(0, 1)


class TorchKernels:
    """Kernels in torch, on `device`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def linear(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """See Kernels."""
        if self._device.type == "cpu" and len(rows) in _FEW_ROWS:
            return torch.mm(weight, rows.t()).t()
        return linear(rows, weight)

    def plan(self, sequences: Sequence[SequencePages]) -> tuple[GatherAttention, ...]:
        """See Kernels."""
        return tuple(
            GatherAttention(torch.from_numpy(one.pages).to(self._device), one.start, one.end) for one in sequences
        )

    def attend(self, plan: tuple[GatherAttention, ...], pool: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        """See Kernels."""
        attended = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        begin = 0
        for one in plan:
            attended[begin : begin + one.rows] = one(pool, query[begin : begin + one.rows])
            begin += one.rows
        return attended.view(len(query), -1)
