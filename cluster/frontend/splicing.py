"""Keeps the ids of generated answers, so that a history which comes back as text becomes the very ids that have KV.

Re-encoding an answer does not always give the ids that were generated, and reuse would then silently shrink. After a
turn the store remembers, under a digest of the reuse scope (`cache_salt`) and of the text up to the answer's end, the
ids of that text. A later prompt whose text begins with exactly that text, and goes on with the end-of-turn token, takes
the ids and encodes only the rest. The key is a digest of the text itself: an altered history finds nothing. Bounded by
total ids, least recently used first. Called by PromptEncoder on the event loop; never holds text, never crosses a salt.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Splice", "SplicingStore"]


@dataclass(frozen=True, slots=True, eq=False)
class Splice:
    """The longest remembered beginning of a text: its ids (int32) and its length in characters."""

    token_ids: NDArray[np.int32]
    num_chars: int


class SplicingStore:
    """Text beginnings with the ids that were generated for them."""

    def __init__(self, max_ids: int) -> None:
        """`max_ids` bounds the ids held, 4 bytes each; 0 remembers nothing."""
        self._max_ids = max_ids
        self._num_ids = 0
        self._entries: OrderedDict[bytes, NDArray[np.int32]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_ids(self) -> int:
        """Ids held now."""
        return self._num_ids

    def remember(self, text: str, token_ids: Sequence[int] | NDArray[np.int32], *, cache_salt: str | None) -> None:
        """Keep `token_ids` as the ids of `text`; an earlier memory of the same text is replaced."""
        ids = np.asarray(token_ids, dtype=np.int32)
        if not text or len(ids) > self._max_ids:
            return
        digest = _scope_digest(cache_salt)
        digest.update(text.encode())
        key = digest.digest()
        replaced = self._entries.pop(key, None)
        if replaced is not None:
            self._num_ids -= len(replaced)
        self._entries[key] = ids
        self._num_ids += len(ids)
        while self._num_ids > self._max_ids:
            _, oldest = self._entries.popitem(last=False)
            self._num_ids -= len(oldest)

    def find(self, text: str, turn_end: str, *, cache_salt: str | None) -> Splice | None:
        """The longest remembered beginning of `text` that ends before a `turn_end`, or with the text."""
        if not self._entries:
            return None
        digest = _scope_digest(cache_salt)
        found: tuple[bytes, int] | None = None
        start = 0
        for cut in _cuts(text, turn_end):
            digest.update(text[start:cut].encode())
            start = cut
            key = digest.digest()
            if key in self._entries:
                found = (key, cut)
        if found is None:
            return None
        key, cut = found
        self._entries.move_to_end(key)
        return Splice(self._entries[key], cut)

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()
        self._num_ids = 0


def _cuts(text: str, turn_end: str) -> list[int]:
    cuts: list[int] = []
    at = text.find(turn_end)
    while at >= 0:
        cuts.append(at)
        at = text.find(turn_end, at + len(turn_end))
    if not cuts or cuts[-1] != len(text):
        cuts.append(len(text))
    return cuts


def _scope_digest(cache_salt: str | None) -> hashlib._Hash:
    """A digest that begins with the scope, so that no text of one scope has a key of another."""
    digest = hashlib.sha256()
    if cache_salt is None:
        digest.update(b"\x00")
    else:
        digest.update(b"\x01" + hashlib.sha256(cache_salt.encode()).digest())
    return digest
