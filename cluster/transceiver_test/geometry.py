"""From a layout of the configuration to what one rank holds, and to whom it turns for what it lacks. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.transceiver_test.config import LayoutConfig, LayoutKind, ParallelConfig, TransceiverTestConfig
from kvcache.layout import KvLayout, LayerGroup, LifeCycleKind
from transceiver.mapping import sources_of
from transceiver.parallel_layout import ParallelLayout, RankShare, head_interval, layer_interval

__all__ = ["RankGeometry", "holders_of", "rank_geometry", "ranks_of", "side_ranks", "wanted_ordinals"]


@dataclass(frozen=True, slots=True)
class RankGeometry:
    """One rank's KV: its layout with global layer ids, and the global heads behind its local ones, by group."""

    layout: KvLayout
    shares: tuple[RankShare, ...] | None
    first_heads: tuple[int, ...]


def _parallel(side: ParallelConfig) -> ParallelLayout:
    return ParallelLayout(side.tp, side.pp, side.attention_dp)


def side_ranks(side: ParallelConfig, dp_rank: int = 0) -> list[int]:
    """Ranks of a side that take part in one request: of attention-dp ranks only its own group."""
    parallel = _parallel(side)
    ranks = range(parallel.world)
    return [rank for rank in ranks if not side.attention_dp or parallel.dp_rank(rank) == dp_rank]


def rank_geometry(spec: LayoutConfig, side: ParallelConfig, rank: int) -> RankGeometry:
    """What `rank` of `side` holds of the model."""
    if spec.kind in (LayoutKind.SLIDING, LayoutKind.HYBRID):
        return RankGeometry(KvLayout(_fingerprint(spec), spec.tokens_per_block, _mixed_groups(spec)), None, (0, 0))
    parallel = _parallel(side)
    mla = spec.kind is LayoutKind.MLA
    heads_in_all = 1 if mla else spec.num_kv_heads
    layers = layer_interval(spec.num_layers, parallel.pp, parallel.stage(rank))
    heads = head_interval(heads_in_all, parallel.ranks_per_dp, parallel.rank_in_dp(rank))
    group = LayerGroup(
        LifeCycleKind.MLA if mla else LifeCycleKind.FULL,
        tuple(range(layers.start, layers.stop)),
        num_kv_heads=len(heads),
        head_dim=spec.head_dim,
        dtype=spec.dtype,
        kv_factor=1 if mla else 2,
    )
    layout = KvLayout(_fingerprint(spec), spec.tokens_per_block, (group,))
    return RankGeometry(layout, (RankShare(heads_in_all, heads),), (heads.start,))


def holders_of(spec: LayoutConfig, holder: ParallelConfig, receiver: ParallelConfig, rank: int) -> list[int]:
    """Ranks of the holding side that receiver `rank` pulls from (group 0 of the data-parallel ones)."""
    if spec.kind in (LayoutKind.SLIDING, LayoutKind.HYBRID):
        return [0]
    heads = 1 if spec.kind is LayoutKind.MLA else spec.num_kv_heads
    sources = sources_of(spec.num_layers, heads, _parallel(holder), _parallel(receiver), rank)
    return [source.rank for source in sources if source.has_data]


def wanted_ordinals(group: LayerGroup, tokens_per_block: int, length: int) -> list[tuple[int, int]]:
    """(ordinal, valid tokens) of the blocks that a sequence of `length` tokens needs in a group."""
    blocks = -(-length // tokens_per_block)
    rows = [(ordinal, min(tokens_per_block, length - ordinal * tokens_per_block)) for ordinal in range(blocks)]
    if group.kind is LifeCycleKind.RECURRENT:
        return rows[-1:]
    if group.kind is LifeCycleKind.SLIDING and group.window is not None:
        first = max(0, length - group.window) // tokens_per_block
        return rows[first:]
    return rows


def _fingerprint(spec: LayoutConfig) -> str:
    return f"transceiver-test/{spec.name}"


def _mixed_groups(spec: LayoutConfig) -> tuple[LayerGroup, ...]:
    half = max(1, spec.num_layers // 2)
    first, second = tuple(range(half)), tuple(range(half, max(spec.num_layers, half + 1)))
    full = LayerGroup(
        LifeCycleKind.FULL, first, num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim, dtype=spec.dtype
    )
    if spec.kind is LayoutKind.SLIDING:
        other = LayerGroup(
            LifeCycleKind.SLIDING,
            second,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            dtype=spec.dtype,
            window=spec.window,
        )
    else:
        other = LayerGroup(LifeCycleKind.RECURRENT, second, state_bytes_per_layer=spec.state_bytes_per_layer)
    return (full, other)


def ranks_of(config: TransceiverTestConfig) -> list[tuple[str, int]]:
    """(role, rank) of every rank process that a sweep needs."""
    if "ucx" not in config.backends:
        return [("ctx", 0)]
    count = {"ctx": 1, "gen": 1}
    for layout in config.layouts:
        for role, side in (("ctx", layout.context), ("gen", layout.generation)):
            count[role] = max(count[role], side.tp * side.pp)
    return [(role, rank) for role, ranks in count.items() for rank in range(ranks)]
