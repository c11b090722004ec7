"""Least recently used leaf runs first, superseded ones before all others: a lazily corrected heap."""

from __future__ import annotations

import heapq

from kvcache.radix_node import RadixNode

__all__ = ["LruOrder"]


class LruOrder:
    """One heap entry a run; an entry that has become stale is corrected when it surfaces."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], int, RadixNode]] = []
        self._serial = 0

    def offer(self, node: RadixNode) -> None:
        """Consider `node` from now on."""
        if node.children or node.parent is None or not node.alive:
            return
        key = (0 if node.superseded else 1, node.last_used)
        if node.queued is not None and node.queued <= key:
            return  # corrected when it surfaces
        node.queued = key
        self._serial += 1
        heapq.heappush(self._heap, (key, self._serial, node))

    def pop(self) -> RadixNode | None:
        """The next run, or None."""
        while self._heap:
            key, _, node = heapq.heappop(self._heap)
            if node.queued != key:
                continue  # another entry stands for this run
            node.queued = None
            if node.children or not node.alive:
                continue
            if key != (0 if node.superseded else 1, node.last_used):
                self.offer(node)
                continue
            return node
        return None
