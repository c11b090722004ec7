"""One byte budget for full-attention pages and states (window pages or snapshots), given up least recently used first.

A manager has a pool with a size of its own for each life cycle. To compare policies that keep few states with ones
that keep many, `kvferry replay` makes both pools as large as the whole budget and sees to the common bound itself,
before each request. What a request only works with, and gives back at its end, is not charged.
"""

from __future__ import annotations

from kvcache import KvCacheManager
from kvcache.radix_evict import evict

__all__ = ["ByteBudget"]

_FULL, _STATE = 0, 1
_AT_A_TIME = 64


class ByteBudget:
    """`capacity_pages` full-attention pages' worth of bytes; a state costs as much as `state_pages` of them."""

    def __init__(self, manager: KvCacheManager, capacity_pages: int, state_pages: int) -> None:
        self._manager = manager
        self.capacity_pages = capacity_pages
        self.state_pages = state_pages

    @property
    def used_pages(self) -> int:
        """What is in use now, in full-attention pages."""
        full, states = (pool.num_pages - pool.unused_pages for pool in self._manager.pools)
        return full + self.state_pages * states

    def make_room(self, new_blocks: int, new_states: int) -> None:
        """Give cached pages up until an open sequence's new blocks and states fit; as far as possible."""
        tree = self._manager.tree
        while (lack := self.used_pages + new_blocks + self.state_pages * new_states - self.capacity_pages) > 0:
            run, state = tree.order.oldest_use(), tree.windows.oldest_use(_STATE)
            state_first = state is not None and (run is None or state < run)
            freed = 0
            for group in (_STATE, _FULL) if state_first else (_FULL, _STATE):
                most = lack if group == _FULL else -(-lack // self.state_pages)
                freed = evict(tree, group, min(most, _AT_A_TIME))
                if freed:
                    break
            if not freed:
                return
