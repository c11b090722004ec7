"""The bytes that a test expects: a function of token, layer, k/v, head and element, and of nothing else.

Written by whoever computes KV in a test and recomputed by whoever checks it, so that a block that took another block's
place, another head's or another layer's, shows. Independent of how ranks share the model out.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvcache.layout import DTYPE_BYTES, LayerGroup, LifeCycleKind

__all__ = ["block_pattern", "state_pattern"]

_Words = NDArray[np.uint64]
_ODD = tuple(np.uint64(value) for value in (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9))


def _mix(words: _Words) -> _Words:
    """Spread every bit over the word, in place."""
    words ^= words >> np.uint64(30)
    words *= np.uint64(0xBF58476D1CE4E5B9)
    words ^= words >> np.uint64(27)
    words *= np.uint64(0x94D049BB133111EB)
    words ^= words >> np.uint64(31)
    return words


def block_pattern(group: LayerGroup, first_head: int, tokens: NDArray[np.uint64]) -> _Words:
    """A page as uint64 words ``[layer][k/v][head][token][dim]``; `tokens` are one seed for each of its tokens."""
    words = group.head_dim * DTYPE_BYTES[group.dtype] // 8
    shape = (len(group.layers), group.kv_factor, group.num_kv_heads, len(tokens), words)
    layers = np.array(group.layers, np.uint64).reshape(-1, 1, 1, 1, 1)
    sides = np.arange(group.kv_factor, dtype=np.uint64).reshape(1, -1, 1, 1, 1)
    heads = np.arange(first_head, first_head + group.num_kv_heads, dtype=np.uint64).reshape(1, 1, -1, 1, 1)
    elements = np.arange(words, dtype=np.uint64)
    with np.errstate(over="ignore"):
        cells = (layers * np.uint64(4096) + heads * np.uint64(2) + sides) * _ODD[0]
        seeds = tokens.reshape(1, 1, 1, -1, 1) * _ODD[1]
        return _mix((cells + seeds + elements * _ODD[2]) * np.ones(shape, np.uint64))


def state_pattern(group: LayerGroup, seed: int) -> _Words:
    """A recurrent group's page as uint64 words ``[layer][byte / 8]``."""
    assert group.kind is LifeCycleKind.RECURRENT
    layers = np.array(group.layers, np.uint64).reshape(-1, 1)
    elements = np.arange(group.state_bytes_per_layer // 8, dtype=np.uint64)
    with np.errstate(over="ignore"):
        return _mix(layers * _ODD[0] + np.uint64(seed) * _ODD[1] + elements * _ODD[2])
