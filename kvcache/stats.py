"""Numbers that a cache manager publishes: totals since its start (see `totals`) and the state of the moment.

Nothing is gathered before somebody asks: reading walks the tree once.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np

from kvcache.events import Tier
from kvcache.radix_evict import evictable_pages
from kvcache.totals import CacheTotals, collect_totals

if TYPE_CHECKING:
    from kvcache.manager import KvCacheManager
    from kvcache.page_pin import PagePin

__all__ = ["CacheStats", "PoolStats", "TierStats", "collect_stats", "sum_pools"]


@dataclass(frozen=True, slots=True)
class PoolStats:
    """One life cycle's pool, in pages: free + held + cached == total (a page both held and cached is in `cached`).

    evictable    cached pages that nobody relies on; peak_used: most pages in use at a time, in the totals since the
                 start
    """

    group: int
    kind: str
    total: int
    free: int
    held: int
    cached: int
    evictable: int
    peak_used: int
    page_bytes: int

    @property
    def used(self) -> int:
        """Pages that are not free."""
        return self.total - self.free


@dataclass(frozen=True, slots=True)
class TierStats:
    """A lower tier's content now."""

    tier: Tier
    capacity_bytes: int
    used_bytes: int
    blocks: int


@dataclass(frozen=True, slots=True)
class CacheStats(CacheTotals):
    """Totals since the start and the state of the moment.

    index_bytes    bytes of the tree's token and page buffers
    pinned_pages   blocks that peers' pins hold (a block that two pins hold counts twice)
    """

    pools: tuple[PoolStats, ...]
    lower_tiers: tuple[TierStats, ...]
    open_sequences: int
    index_bytes: int
    superseded_blocks: int
    tracked_conversations: int
    retained_turns: int
    peer_pins: int
    pinned_pages: int
    poison_reason: str | None

    @property
    def evicted_blocks(self) -> int:
        """Blocks that left the device for want of room."""
        return self.evictions["capacity"] + self.evictions["superseded"]

    @property
    def host_blocks(self) -> int:
        """Blocks in host memory."""
        return sum(tier.blocks for tier in self.lower_tiers if tier.tier is Tier.HOST)

    @property
    def disk_blocks(self) -> int:
        """Blocks on disk."""
        return sum(tier.blocks for tier in self.lower_tiers if tier.tier is Tier.DISK)

    @property
    def offloaded_blocks(self) -> int:
        """Blocks that were copied out of the device."""
        return sum(tier.stored_blocks for tier in self.tiers if tier.tier is Tier.HOST)

    @property
    def onboarded_blocks(self) -> int:
        """Blocks that came back to the device."""
        return sum(tier.onboarded_blocks for tier in self.tiers)

    @property
    def corrupt_blocks(self) -> int:
        """Blocks that came back changed and were refused."""
        return sum(tier.corrupt_blocks for tier in self.tiers)

    @property
    def all_pools(self) -> PoolStats:
        """See `sum_pools`."""
        return sum_pools(self.pools)


def sum_pools(pools: Collection[PoolStats]) -> PoolStats:
    """Sum of pools, in pages: group -1, kind "all"; `peak_used` is an upper bound, `page_bytes` the mean."""
    total = sum(pool.total for pool in pools)
    return PoolStats(
        group=-1,
        kind="all",
        total=total,
        free=sum(pool.free for pool in pools),
        held=sum(pool.held for pool in pools),
        cached=sum(pool.cached for pool in pools),
        evictable=sum(pool.evictable for pool in pools),
        peak_used=sum(pool.peak_used for pool in pools),
        page_bytes=sum(pool.total * pool.page_bytes for pool in pools) // max(1, total),
    )


def collect_stats(manager: KvCacheManager, open_sequences: int, pins: Collection[PagePin]) -> CacheStats:
    """The numbers of a manager, now."""
    totals, ledger, tree, tiers = collect_totals(manager), manager.ledger, manager.tree, manager.tiers
    pools = tuple(
        PoolStats(
            group=group,
            kind=manager.layout.groups[group].kind.value,
            total=pool.num_pages,
            free=pool.free_pages,
            held=int(np.count_nonzero((pool.refs > 0) & ~pool.in_tree)),
            cached=pool.tree_pages,
            evictable=evictable_pages(tree, group),
            peak_used=pool.num_pages - pool.least_unused,
            page_bytes=manager.layout.page_bytes(group),
        )
        for group, pool in enumerate(manager.pools)
    )
    return CacheStats(
        **{field.name: getattr(totals, field.name) for field in fields(totals)},
        pools=pools,
        lower_tiers=() if tiers is None else tuple(TierStats(*one) for one in tiers.contents()),
        open_sequences=open_sequences,
        index_bytes=sum(node.nbytes for node in tree.nodes()),
        superseded_blocks=tree.superseded_blocks,
        tracked_conversations=0 if ledger is None else len(ledger),
        retained_turns=0 if ledger is None else ledger.retained_turns,
        peer_pins=len(pins),
        pinned_pages=sum(pin.num_pages for pin in pins),
        poison_reason=manager.poison_reason,
    )
