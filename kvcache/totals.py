"""What happened in a cache manager, in numbers: since its start, or since the previous look.

Nothing is gathered before somebody asks; counting costs integers (see `counters`).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

from kvcache.counters import BlockCounts
from kvcache.events import Tier
from kvcache.tiers import LowerTiers

if TYPE_CHECKING:
    from kvcache.manager import KvCacheManager

__all__ = ["CacheTotals", "LifeCycleTotals", "TierTotals", "collect_totals"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LifeCycleTotals:
    """One life cycle's blocks (a recurrent one: requests) that were found, missed and given up.

    allocated    pages whose content a request computed, received or copied: missed + answers + reused_partial (a
                 recurrent life cycle: one state a request); pages given back unused are not among them
    copied       pages copied within the device: partial blocks and snapshots
    evictions    pages given up, by reason (see `CacheStats`)
    """

    group: int
    kind: str
    reused_full: int
    reused_partial: int
    missed: int
    answers: int
    allocated: int
    copied: int
    copied_bytes: int
    evictions: dict[str, int]


@dataclass(frozen=True, slots=True)
class TierTotals:
    """A lower tier's traffic, in blocks and bytes of content.

    stored      came into the tier (from the device, or from the tier above)
    onboarded   went back to the device from here; lifted: went to host memory ahead of their request (disk only)
    dropped     given up for want of room with no tier below, or because they could not be written
    corrupt     came back changed and were refused; errors: failed file operations (disk only)
    """

    tier: Tier
    stored_blocks: int
    stored_bytes: int
    onboarded_blocks: int
    onboarded_bytes: int
    lifted_blocks: int
    dropped_blocks: int
    corrupt_blocks: int
    errors: int


@dataclass(frozen=True, slots=True)
class CacheTotals:
    """What happened since the manager's start, or (from `KvCacheManager.iteration_stats`) since the previous look.

    requests          requests that computed something; prompt_tokens, reused_tokens: of these
    shortened_tokens  tokens that agreed with the tree and could not be reused, for want of a window or a snapshot
    received_blocks   of the missed and the answers' blocks, those that came from another worker or a tier
    lost_events       events that left a full buffer before anybody polled them
    evictions         pages given up, by reason: capacity and superseded (blocks), pruned (blocks whose window or
                      snapshot was gone), window (window pages and snapshots for want of room), dropped_turn (windows
                      and snapshots of turns that are retained no more)
    """

    requests: int
    prompt_tokens: int
    reused_tokens: int
    shortened_tokens: int
    reused_full_blocks: int
    reused_partial_blocks: int
    missed_blocks: int
    answer_blocks: int
    received_blocks: int
    snapshots_skipped: int
    suspended: int
    resumed: int
    lost_events: int
    evictions: dict[str, int]
    life_cycles: tuple[LifeCycleTotals, ...]
    tiers: tuple[TierTotals, ...]

    @property
    def hit_rate(self) -> float:
        """Reused share of the blocks that prompts asked for, 0 when nothing was asked."""
        reused = self.reused_full_blocks + self.reused_partial_blocks
        asked = reused + self.missed_blocks
        return reused / asked if asked else 0.0

    def since(self, earlier: CacheTotals) -> CacheTotals:
        """What was added after `earlier`, taken from the same manager."""
        return _minus(self, earlier)


def collect_totals(manager: KvCacheManager) -> CacheTotals:
    """What a manager counted since its start."""
    counters, evictions, tiers, shape = manager.counters, manager.tree.evictions, manager.tiers, manager.tree.shape
    full = {shape.attention[row] for row in shape.full_rows}
    life_cycles = []
    for group, spec in enumerate(manager.layout.groups):
        blocks = counters.blocks if group in full else counters.own.get(group, BlockCounts())
        allocated = blocks.missed + blocks.answers + blocks.reused_partial
        copied = counters.copied_pages[group]
        life_cycles.append(
            LifeCycleTotals(
                group=group,
                kind=spec.kind.value,
                reused_full=blocks.reused_full,
                reused_partial=blocks.reused_partial,
                missed=blocks.missed,
                answers=blocks.answers,
                allocated=counters.requests if group in shape.recurrent else allocated,
                copied=copied,
                copied_bytes=copied * manager.layout.page_bytes(group),
                evictions=evictions.of_group(group, group in full),
            )
        )
    return CacheTotals(
        requests=counters.requests,
        prompt_tokens=counters.prompt_tokens,
        reused_tokens=counters.reused_tokens,
        shortened_tokens=counters.shortened_tokens,
        reused_full_blocks=counters.blocks.reused_full,
        reused_partial_blocks=counters.blocks.reused_partial,
        missed_blocks=counters.blocks.missed,
        answer_blocks=counters.blocks.answers,
        received_blocks=counters.received,
        snapshots_skipped=counters.snapshots_skipped,
        suspended=counters.suspended,
        resumed=counters.resumed,
        lost_events=0 if manager.events is None else manager.events.lost,
        evictions=evictions.by_reason(),
        life_cycles=tuple(life_cycles),
        tiers=() if tiers is None else tuple(_tier_totals(tiers, tier) for tier in tiers.traffic),
    )


def _tier_totals(tiers: LowerTiers, tier: Tier) -> TierTotals:
    disk = tiers.disk if tier is Tier.DISK else None
    counted = asdict(tiers.traffic[tier])
    if disk is not None:
        counted["corrupt_blocks"] += disk.corrupt
    return TierTotals(tier=tier, errors=0 if disk is None else disk.errors, **counted)


def _minus(now: T, earlier: T) -> T:
    """Every integer of `now` less that of `earlier`, through tuples, dictionaries and nested totals; names stay."""
    if isinstance(now, CacheTotals | LifeCycleTotals | TierTotals):
        names = [field.name for field in fields(now) if field.name not in ("group", "kind", "tier")]
        return replace(now, **{name: _minus(getattr(now, name), getattr(earlier, name)) for name in names})
    value: Any = now
    before: Any = earlier
    if isinstance(value, dict):
        value = {key: _minus(one, before[key]) for key, one in value.items()}
    elif isinstance(value, tuple):
        value = tuple(_minus(one, two) for one, two in zip(value, before, strict=True))
    else:
        value -= before
    return value  # type: ignore[no-any-return]
