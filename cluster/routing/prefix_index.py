"""Which worker was sent which token prefix: an approximate, bounded view of what their caches hold.

Built from routing decisions alone, so it works with no event feed and costs no call to a worker. It may be wrong
about evicted blocks; that costs a transfer or a recomputation, never a wrong answer.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

__all__ = ["PrefixIndex"]


class PrefixIndex:
    """Block-key chains of routed prompts, and the workers that got them.

    Keys are a SHA-256 chain over (reuse scope, int32 tokens) per block, so equal keys mean equal prefixes in one scope.
    Bounded to `max_blocks` keys, least recently used first out.
    """

    def __init__(self, tokens_per_block: int, max_blocks: int = 200_000) -> None:
        self._tokens_per_block = tokens_per_block
        self._max_blocks = max_blocks
        self._workers: OrderedDict[bytes, set[str]] = OrderedDict()

    def keys(self, token_ids: NDArray[np.int32], cache_salt: str | None) -> list[bytes]:
        """Key of every full block of a prompt."""
        raw, size = token_ids.tobytes(), self._tokens_per_block * token_ids.itemsize
        digest = hashlib.sha256(b"" if cache_salt is None else b"salt:" + cache_salt.encode()).digest()
        keys = []
        for start in range(0, len(raw) - size + 1, size):
            digest = hashlib.sha256(digest + raw[start : start + size]).digest()
            keys.append(digest)
        return keys

    def matched_blocks(self, keys: list[bytes]) -> dict[str, int]:
        """Leading blocks of `keys` that each worker was sent before. Workers without any are left out."""
        depth: dict[str, int] = {}
        alive: set[str] | None = None
        for position, key in enumerate(keys, 1):
            workers = self._workers.get(key)
            if workers is None:
                break
            alive = set(workers) if alive is None else alive & workers
            if not alive:
                break
            for worker in alive:
                depth[worker] = position
        self._touch(keys[: max(depth.values(), default=0)])
        return depth

    def add(self, keys: list[bytes], worker_id: str) -> None:
        """Remember that a worker was sent this prefix."""
        for key in keys:
            self._workers.setdefault(key, set()).add(worker_id)
        self._touch(keys)
        while len(self._workers) > self._max_blocks:
            self._workers.popitem(last=False)

    def discard(self, keys: list[bytes], worker_id: str) -> None:
        """A worker turned out not to hold these blocks."""
        for key in keys:
            workers = self._workers.get(key, set())
            workers.discard(worker_id)
            if not workers:
                self._workers.pop(key, None)

    def _touch(self, keys: list[bytes]) -> None:
        """Used now. The root last: a chain is forgotten from its leaf, for a leaf without its root matches nothing."""
        for key in reversed(keys):
            self._workers.move_to_end(key)

    def remove_worker(self, worker_id: str) -> None:
        """A worker lost its cache."""
        for key in [key for key, workers in self._workers.items() if worker_id in workers]:
            workers = self._workers[key]
            workers.discard(worker_id)
            if not workers:
                del self._workers[key]
