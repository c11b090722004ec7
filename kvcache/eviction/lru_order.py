"""Least recently used leaf runs first, superseded ones before all others: a lazily corrected heap."""

from __future__ import annotations

import heapq

from kvcache.radix_node import RadixNode

__all__ = ["LruOrder"]

_COMPACT_FROM = 1024


class LruOrder:
    """One valid heap entry a run; an entry that has become stale is corrected when it surfaces."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], int, RadixNode]] = []
        self._serial = 0
        self._compact_at = _COMPACT_FROM

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
        if len(self._heap) > self._compact_at:
            self._heap = [entry for entry in self._heap if entry[2].alive and entry[2].queued == entry[0]]
            heapq.heapify(self._heap)
            self._compact_at = max(_COMPACT_FROM, 2 * len(self._heap))

    def removed(self, node: RadixNode) -> None:
        """Its entry goes when it surfaces, or with the next compaction."""

    def pop(self, *, superseded_only: bool = False) -> RadixNode | None:
        """The next run, or None."""
        while self._heap:
            key, _, node = self._heap[0]
            if superseded_only and key[0] > 0:
                return None
            heapq.heappop(self._heap)
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

    def oldest_use(self) -> int | None:
        """Last use of the run that `pop` would give, 0 for a superseded one, or None. Nothing is taken out."""
        node = self.pop()
        if node is None:
            return None
        self.offer(node)
        return 0 if node.superseded else node.last_used

    def request_began(self, owner: str) -> None:
        """Recency is all that counts here."""

    def turn_ended(self, owner: str, stop_reason: str | None, output_tokens: int | None) -> None:
        """Recency is all that counts here."""

    def request_closed(self, owner: str) -> None:
        """Recency is all that counts here."""

    def evicted(self, blocks: int) -> None:
        """Recency is all that counts here."""
