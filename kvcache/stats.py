"""Numbers that a cache manager publishes: totals since its start and the state of the moment."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from kvcache.manager import KvCacheManager
    from kvcache.page_pin import PagePin

__all__ = ["CacheCounters", "CacheStats", "EvictionCounts", "PoolStats", "collect_stats"]


@dataclass(slots=True)
class CacheCounters:
    """Totals since the start; only the manager and its sequences write them."""

    requests: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    reused_full_blocks: int = 0
    reused_partial_blocks: int = 0
    missed_blocks: int = 0
    partial_copies: int = 0
    snapshots_skipped: int = 0
    peak_used_pages: int = 0


@dataclass(slots=True)
class EvictionCounts:
    """What the tree gave up since the start; only `radix_evict` and the drop handles write them.

    blocks   for want of room, `superseded` ones among them; window_pages: windows and snapshots for want of room
    """

    blocks: int = 0
    superseded: int = 0
    window_pages: int = 0
    dropped_turn_pages: int = 0

    def by_reason(self) -> dict[str, int]:
        """As `CacheStats.evictions` shows them."""
        return {
            "capacity": self.blocks - self.superseded,
            "superseded": self.superseded,
            "window": self.window_pages,
            "dropped_turn": self.dropped_turn_pages,
        }


@dataclass(frozen=True, slots=True)
class PoolStats:
    """One life cycle's pool, in pages: free + held + cached == total (`held` pages may be cached too)."""

    group: int
    kind: str
    total: int
    free: int
    held: int
    cached: int
    page_bytes: int


@dataclass(frozen=True, slots=True)
class CacheStats:
    """A snapshot; `hit_rate` is reused / (reused + missed) in blocks, 0 when nothing was asked.

    evictions     pages given up, by reason: capacity, superseded (blocks), window (window pages and snapshots for want
                  of room), dropped_turn (windows and snapshots of turns that fell out of the retained ones)
    index_bytes   bytes of the tree's token and page buffers
    """

    pools: tuple[PoolStats, ...]
    open_sequences: int
    requests: int
    prompt_tokens: int
    reused_tokens: int
    reused_full_blocks: int
    reused_partial_blocks: int
    missed_blocks: int
    evicted_blocks: int
    evictions: dict[str, int]
    index_bytes: int
    superseded_blocks: int
    tracked_conversations: int
    retained_turns: int
    host_blocks: int
    disk_blocks: int
    offloaded_blocks: int
    onboarded_blocks: int
    corrupt_blocks: int
    peer_pins: int
    pinned_pages: int
    poison_reason: str | None

    @property
    def hit_rate(self) -> float:
        """Reused share of the blocks that prompts asked for."""
        reused = self.reused_full_blocks + self.reused_partial_blocks
        asked = reused + self.missed_blocks
        return reused / asked if asked else 0.0


def collect_stats(manager: KvCacheManager, open_sequences: int, pins: Collection[PagePin]) -> CacheStats:
    """The numbers of a manager, now."""
    counters, ledger, tree, tiers = manager.counters, manager.ledger, manager.tree, manager.tiers
    pools = tuple(
        PoolStats(
            group,
            manager.layout.groups[group].kind.value,
            pool.num_pages,
            pool.free_pages,
            int(np.count_nonzero((pool.refs > 0) & ~pool.in_tree)),
            pool.tree_pages,
            manager.layout.page_bytes(group),
        )
        for group, pool in enumerate(manager.pools)
    )
    return CacheStats(
        pools=pools,
        open_sequences=open_sequences,
        requests=counters.requests,
        prompt_tokens=counters.prompt_tokens,
        reused_tokens=counters.reused_tokens,
        reused_full_blocks=counters.reused_full_blocks,
        reused_partial_blocks=counters.reused_partial_blocks,
        missed_blocks=counters.missed_blocks,
        evicted_blocks=tree.evictions.blocks,
        evictions=tree.evictions.by_reason(),
        index_bytes=sum(node.nbytes for node in tree.nodes()),
        superseded_blocks=tree.superseded_blocks,
        tracked_conversations=0 if ledger is None else len(ledger),
        retained_turns=0 if ledger is None else ledger.retained_turns,
        host_blocks=0 if tiers is None else len(tiers.host),
        disk_blocks=0 if tiers is None or tiers.disk is None else len(tiers.disk),
        offloaded_blocks=0 if tiers is None else tiers.offloaded,
        onboarded_blocks=0 if tiers is None else tiers.onboarded,
        corrupt_blocks=0 if tiers is None else tiers.corrupt,
        peer_pins=len(pins),
        pinned_pages=sum(pin.num_pages for pin in pins),
        poison_reason=manager.poison_reason,
    )
