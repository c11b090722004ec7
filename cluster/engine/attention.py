"""Attention over pages by gathering them: the reference path, which every device and element type has.

One call serves one sequence of one layer. Only the tokens that exist are read, so whatever stands in the rest of a page
cannot reach a result, and the outcome does not depend on the batch.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

__all__ = ["GatherAttention"]


class GatherAttention:
    """Attention of the queries of one sequence over its pages.

    pages   int64 (blocks,) on the pool's device, covering `end` tokens
    start   position of the first query; `end` of the one after the last
    """

    def __init__(self, pages: torch.Tensor, start: int, end: int) -> None:
        self._pages = pages
        self._start = start
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
            rows = query.view(1, kv_heads, heads // kv_heads, dim)
            return scaled_dot_product_attention(rows, keys[None], values[None]).view(1, heads, dim)
        rows = query.transpose(0, 1)[None]
        result = scaled_dot_product_attention(
            rows, keys[None], values[None], attn_mask=self._mask, is_causal=self._mask is None, enable_gqa=True
        )
        return result[0].transpose(0, 1)
