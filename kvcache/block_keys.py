"""SHA-256 chained block keys: for what leaves the process (events, lower tiers), never for matching.

The key of a block hashes its parent's key and its tokens as 4-byte little-endian integers; the first parent is the
reuse scope's digest. Equal keys mean equal prefixes in equal scopes, in every process.
"""

from __future__ import annotations

import hashlib

from kvcache.radix_node import Tokens

__all__ = ["chain_keys"]


def chain_keys(parent: bytes, tokens: Tokens, block: int) -> list[bytes]:
    """Keys (32 bytes) of the whole blocks of `tokens` that follow the block with key `parent`."""
    raw = tokens.astype("<i4", copy=False).tobytes()
    step, keys = 4 * block, []
    for start in range(0, len(raw) - step + 1, step):
        parent = hashlib.sha256(parent + raw[start : start + step]).digest()
        keys.append(parent)
    return keys
