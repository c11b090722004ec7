"""A stand-in for a model: fills pages with a pattern that depends on every token before, and reads it back.

Any page that holds another prefix's KV, a stale snapshot or half a copy shows. Used by tests and by `kvferry replay
--verify`; never by the serving path. No torch.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from kvcache.layout import KvLayout, LayerGroup, LifeCycleKind
from kvcache.sequence_cache import SequenceCache
from kvcache.storage.page_storage import PageStorage

__all__ = ["PatternModel", "pattern_layout"]

Tokens = NDArray[np.int32]

_MOST_KNOWN = 20_000


def pattern_layout(
    tokens_per_block: int, *, windows: Sequence[int] = (), recurrent: int = 0, full: bool = True, mla: bool = False
) -> KvLayout:
    """A layout of four bytes a token and life cycle: full attention, MLA latent, the given windows, `recurrent` state
    groups, in this order.
    """
    groups: list[LayerGroup] = []
    if full:
        groups.append(LayerGroup(LifeCycleKind.FULL, (0,), 1, 4, "uint8", 1))
    if mla:
        groups.append(LayerGroup(LifeCycleKind.MLA, (len(groups),), 1, 4, "uint8", 1))
    for window in windows:
        groups.append(LayerGroup(LifeCycleKind.SLIDING, (len(groups),), 1, 4, "uint8", 1, window=window))
    for _ in range(recurrent):
        groups.append(LayerGroup(LifeCycleKind.RECURRENT, (len(groups),), state_bytes_per_layer=4, dtype="uint8"))
    return KvLayout("pattern", tokens_per_block, tuple(groups))


class PatternModel:
    """Writes and checks the pattern of one storage with a `pattern_layout`."""

    def __init__(self, storage: PageStorage) -> None:
        self._storage = storage
        self._layout = storage.layout
        self._known: dict[bytes, NDArray[np.uint32]] = {}

    def prefix_values(self, scope: bytes, tokens: Tokens) -> NDArray[np.uint32]:
        """One value a token that depends on the scope and on every token up to it (a view: do not change it)."""
        key = scope + tokens.tobytes()
        known = self._known.get(key)
        if known is None:
            value = zlib.crc32(scope)
            known = np.empty(len(tokens), dtype=np.uint32)
            for index, token in enumerate(tokens.tolist()):
                value = zlib.crc32(int(token).to_bytes(4, "little"), value)
                known[index] = value
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[key] = known
        return known

    def compute(self, sequence: SequenceCache, tokens: Tokens) -> None:
        """Do what a model does for `tokens` at the sequence's next positions: write their KV (not append them)."""
        start = sequence.num_computed_tokens
        history = np.concatenate([sequence.tokens(0, start), tokens])
        values = self.prefix_values(sequence.scope, history)
        block = self._layout.tokens_per_block
        for group, spec in enumerate(self._layout.groups):
            pages = sequence.pages(group)
            if spec.kind is LifeCycleKind.RECURRENT:
                self._storage.page(int(pages[0]), group)[:] = values[-1:].tobytes()
                continue
            for at, end in _spans(start, len(history), block):
                page = int(pages[at // block])
                if page >= 0:
                    first = at % block * 4
                    self._storage.page(page, group)[first : first + (end - at) * 4] = values[at:end].tobytes()

    def find_wrong(self, sequence: SequenceCache, *, copied: bool = True) -> str | None:
        """Read back everything that the sequence may attend to; the first wrong place in words, or None.

        copied   the sequence was resized since it was created, so partial blocks and states are private copies
        """
        end = sequence.num_computed_tokens
        block = self._layout.tokens_per_block
        values = self.prefix_values(sequence.scope, sequence.tokens(0, end))
        for group, spec in enumerate(self._layout.groups):
            pages = sequence.pages(group)
            if spec.kind is LifeCycleKind.RECURRENT:
                if copied and end and bytes(self._storage.page(int(pages[0]), group)) != values[end - 1 :].tobytes():
                    return f"the state of life cycle {group} at {end} is wrong"
                continue
            first = 0 if spec.window is None else max(0, end + 1 - spec.window)
            for at, stop in _spans(first, end if copied else end - end % block, block):
                page = int(pages[at // block])
                if page < 0:
                    return f"life cycle {group} has no page for token {at} of {end}"
                held = np.frombuffer(self._storage.page(page, group), dtype=np.uint32)[at % block :][: stop - at]
                wrong = np.flatnonzero(held != values[at:stop])
                if len(wrong):
                    return f"life cycle {group}: token {at + int(wrong[0])} of {end} is wrong in page {page}"
        return None


def _spans(start: int, end: int, block: int) -> Iterator[tuple[int, int]]:
    """The parts of start .. end - 1 within one block each."""
    while start < end:
        stop = min(end, start - start % block + block)
        yield start, stop
        start = stop
