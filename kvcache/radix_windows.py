"""Which runs hold window pages or snapshots, least recently used first, a heap for each such life cycle.

The tree notes runs here whenever they may have got such pages; `radix_evict` pops them when a pool is short. Entries
are never searched for: a dead run's entry is skipped, a run that was used meanwhile is filed again.
"""

from __future__ import annotations

import heapq

from kvcache.radix_match import TreeShape
from kvcache.radix_node import RadixNode

__all__ = ["WindowQueues"]

_COMPACT_AT = 4096


class WindowQueues:
    """Heaps of (last use, serial, run). A run may stand in a heap several times."""

    def __init__(self, shape: TreeShape) -> None:
        self._shape = shape
        groups = [group for _, group, _ in shape.window_rows] + list(shape.recurrent)
        self._queues: dict[int, list[tuple[int, int, RadixNode]]] = {group: [] for group in groups}
        self._serial = 0
        self._compact_at = _COMPACT_AT

    def note(self, node: RadixNode) -> None:
        """A run may have got window pages or snapshots: consider it, and those above, when such a pool is short."""
        for group, queue in self._queues.items():
            above: RadixNode | None = node
            while above is not None and above.parent is not None:
                if self.holds(above, group):
                    self.push(above, group)
                above = above.parent
            if len(queue) > self._compact_at:
                self._compact(queue)

    def push(self, node: RadixNode, group: int) -> None:
        """File a run under its last use."""
        self._serial += 1
        heapq.heappush(self._queues[group], (node.last_used, self._serial, node))

    def pop(self, group: int) -> RadixNode | None:
        """Take the least recently used live run out, or None when no run is left."""
        queue = self._queues[group]
        while queue:
            last_used, _, node = heapq.heappop(queue)
            if not node.alive:
                continue
            if last_used == node.last_used:
                return node
            self.push(node, group)
        return None

    def oldest_use(self, group: int) -> int | None:
        """Last use (tick) of the run that `pop` would take, or None. Nothing is taken out."""
        node = self.pop(group)
        if node is None:
            return None
        self.push(node, group)
        return node.last_used

    def holds(self, node: RadixNode, group: int) -> bool:
        """Whether a run has a window page or snapshot of `group`."""
        if group in self._shape.recurrent:
            return any(owner == group for owner, _ in node.states)
        row = node.rows(node.num_blocks(self._shape.block))[self._shape.attention.index(group)]
        return bool((row >= 0).any())

    def _compact(self, queue: list[tuple[int, int, RadixNode]]) -> None:
        """Keep one entry, the oldest, of each live run."""
        best = {id(entry[2]): entry for entry in sorted(queue, key=lambda one: -one[1]) if entry[2].alive}
        queue[:] = best.values()
        heapq.heapify(queue)
        self._compact_at = max(_COMPACT_AT, 2 * len(queue))
