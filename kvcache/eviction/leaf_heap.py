"""The evictable leaf runs of one conversation, least recently used first: a lazily corrected heap."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from kvcache.radix_node import RadixNode

__all__ = ["LeafHeap"]

_COMPACT_FROM = 16


class LeafHeap:
    """One valid entry a run. A run that was used since it was added is put right when it surfaces; of runs last used
    at the same tick the one added first surfaces first. `len` counts the runs, outdated ones included.
    """

    __slots__ = ("_heap", "_serial", "_valid")

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, RadixNode]] = []
        self._serial = 0
        self._valid: dict[RadixNode, int] = {}

    def __len__(self) -> int:
        return len(self._valid)

    def __iter__(self) -> Iterator[RadixNode]:
        return iter(self._valid)

    def add(self, node: RadixNode) -> None:
        """Take a run in; nothing happens when it is in."""
        if node not in self._valid:
            self._push(node)

    def discard(self, node: RadixNode) -> None:
        """Let a run go (in constant time, amortised); nothing happens when it is not in."""
        if self._valid.pop(node, None) is None:
            return
        if len(self._heap) > max(_COMPACT_FROM, 2 * len(self._valid)) or not self._valid:
            self._heap = [entry for entry in self._heap if self._valid.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)

    def oldest(self) -> RadixNode | None:
        """The least recently used run, which stays in; None when there is none."""
        while self._heap:
            used, serial, node = self._heap[0]
            if self._valid.get(node) == serial:
                if used == node.last_used:
                    return node
                self._push(node)
            heapq.heappop(self._heap)
        return None

    def _push(self, node: RadixNode) -> None:
        self._serial += 1
        self._valid[node] = self._serial
        heapq.heappush(self._heap, (node.last_used, self._serial, node))
