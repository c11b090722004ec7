"""Numbers that a cache manager publishes: totals since its start and the state of the moment."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CacheCounters", "CacheStats", "PoolStats"]


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
