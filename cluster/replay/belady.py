"""The offline optimum: evict the block whose next use is farthest away. No online policy can beat it.

Next use never decreases with depth, so each request's path falls into a few segments of equal next use, and a segment
is used again as a whole: a heap of segments replaces a heap of blocks.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["belady_hits", "infinite_hits"]


def belady_hits(paths: Sequence[NDArray[np.int64]], capacity_blocks: int) -> int:
    """Blocks reused over all requests by an optimal cache of `capacity_blocks`."""
    highest = max((int(path.max(initial=0)) for path in paths), default=0) + 1
    never = len(paths)
    next_seen = np.full(highest, never, dtype=np.int32)
    next_use: list[NDArray[np.int32]] = [np.zeros(0, dtype=np.int32)] * len(paths)
    for index in range(len(paths) - 1, -1, -1):
        next_use[index] = next_seen[paths[index]]
        next_seen[paths[index]] = index
    resident = np.zeros(highest, dtype=np.bool_)
    heap: list[tuple[int, int, int, int]] = []  # (-next use, -first depth, owner request, blocks left)
    used, hits = 0, 0
    for index, path in enumerate(paths):
        if len(path) == 0:
            continue
        here = resident[path]
        reused = len(path) if here.all() else int(here.argmin())
        hits += reused
        resident_already = int(np.count_nonzero(here))
        resident[path] = True
        used += len(path) - resident_already
        uses = next_use[index]
        while used > capacity_blocks and heap:
            far, depth, owner, left = heapq.heappop(heap)
            if -far <= index:
                continue  # used by now: its blocks belong to younger segments
            take = min(left, used - capacity_blocks)
            first = -depth
            resident[paths[owner][first + left - take : first + left]] = False
            used -= take
            if left > take:
                heapq.heappush(heap, (far, depth, owner, left - take))
        bounds = np.flatnonzero(np.diff(uses)) + 1
        starts = [0, *bounds.tolist()]
        for start, end in zip(starts, [*starts[1:], len(path)], strict=True):
            heapq.heappush(heap, (-int(uses[start]), -start, index, end - start))
    return hits


def infinite_hits(paths: Sequence[NDArray[np.int64]]) -> int:
    """Blocks reused over all requests by a cache that never evicts."""
    highest = max((int(path.max(initial=0)) for path in paths), default=0) + 1
    seen = np.zeros(highest, dtype=np.bool_)
    hits = 0
    for path in paths:
        if len(path):
            here = seen[path]
            hits += len(path) if here.all() else int(here.argmin())
            seen[path] = True
    return hits
