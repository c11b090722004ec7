"""Digest of a block's content: XXH3-128 over the KV of its valid tokens, in the layout's logical order.

It finds corruption on the way, not forgery (peers are authenticated by the handshake). The bytes hashed are
``[layer][k/v][head][valid token][dim]``: a full page is hashed where it lies, a partial one through a compact copy, so
stale bytes behind the last valid token never count. Called from the digest thread and, for small blocks, from the loop.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np
import xxhash

from kvcache.layout import LifeCycleKind
from kvcache.storage.page_storage import PageStorage
from transceiver.page_part import PartView

__all__ = ["DIGEST_BYTES", "DIGEST_NAME", "DigestCache", "block_digest"]

_Key: TypeAlias = tuple[int, int, int, int, PartView | None]
DIGEST_NAME = "xxh3-128"
DIGEST_BYTES = 16


def block_digest(storage: PageStorage, group: int, page: int, valid_tokens: int, part: PartView | None = None) -> bytes:
    """Digest (16 bytes) of the first `valid_tokens` tokens of a page, or of a part of it; blocks for the hash.

    A page in device memory is copied to the host first.
    """
    layout = storage.layout
    view = storage.read_page(page, group)
    shape = layout.groups[group]
    if part is not None:
        return part.digest(view, shape, layout.tokens_per_block, valid_tokens)
    if shape.kind is LifeCycleKind.RECURRENT or valid_tokens >= layout.tokens_per_block:
        return xxhash.xxh3_128_digest(np.ascontiguousarray(view).data)
    tokens = view.reshape(len(shape.layers), shape.kv_factor * shape.num_kv_heads, layout.tokens_per_block, -1)
    return xxhash.xxh3_128_digest(np.ascontiguousarray(tokens[:, :, :valid_tokens]).data)


class DigestCache:
    """Digests already computed, by (group, page, generation, valid tokens). Bounded, least recently used out first.

    Thread-safe. A page's generation changes whenever it is given out anew, so an entry can become useless but
    never wrong.
    """

    def __init__(self, storage: PageStorage, capacity: int = 1 << 16) -> None:
        self._storage = storage
        self._capacity = capacity
        self._lock = threading.Lock()
        self._entries: OrderedDict[_Key, bytes] = OrderedDict()

    def find(
        self, group: int, page: int, generation: int, valid_tokens: int, part: PartView | None = None
    ) -> bytes | None:
        """The digest, or None when it has not been computed (or was forgotten)."""
        key = (group, page, generation, valid_tokens, part)
        with self._lock:
            digest = self._entries.get(key)
            if digest is not None:
                self._entries.move_to_end(key)
            return digest

    def compute(self, rows: Iterable[tuple[int, int, int, int]], parts: Sequence[PartView | None] = ()) -> list[bytes]:
        """Digests of (group, page, generation, valid tokens) rows; blocks for those not known yet.

        `parts` says per group which part of the page is meant (nothing given: whole pages).

        A page that was given out anew meanwhile gets a digest that is returned but not kept: the generation check
        after the copy rejects that block anyway.
        """
        digests = []
        for group, page, generation, valid in rows:
            part = parts[group] if parts else None
            digest = self.find(group, page, generation, valid, part)
            if digest is None:
                digest = block_digest(self._storage, group, page, valid, part)
                if int(self._storage.generations(group)[page]) == generation:
                    self._keep((group, page, generation, valid, part), digest)
            digests.append(digest)
        return digests

    def _keep(self, key: _Key, digest: bytes) -> None:
        with self._lock:
            self._entries[key] = digest
            while len(self._entries) > self._capacity:
                self._entries.popitem(last=False)
