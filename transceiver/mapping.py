"""Who holds what a rank needs, and which bytes of a page that is: transfers between unlike parallel layouts.

Pure functions, seen from the receiver, who pulls. Candidate holders follow the consecutive-ranks rule; what each gives
follows from global head and layer intervals; of several holders of the same heads exactly one is elected, so every head
arrives once. Nothing here knows pages' owners or the network.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from transceiver.parallel_layout import Interval, ParallelLayout, head_interval, layer_interval

__all__ = ["Fragment", "PoolForm", "Source", "cell_offset", "page_fragments", "sources_of", "state_fragments"]


@dataclass(frozen=True, slots=True)
class Source:
    """A rank of the holding server that a receiver asks; without data it is only told that it is not needed."""

    rank: int
    layers: Interval
    heads: Interval
    has_data: bool


def sources_of(
    num_layers: int,
    num_heads: int,
    holder: ParallelLayout,
    receiver: ParallelLayout,
    rank: int,
    holder_dp_rank: int = 0,
) -> tuple[Source, ...]:
    """Every holder rank that overlaps receiver `rank`, in rank order.

    `holder_dp_rank` names the holder's data-parallel group that computed the request. MLA and replicated pools are
    `num_heads` 1. Raises ValueError when the sizes do not divide.
    """
    theirs, mine = holder.ranks_per_dp, receiver.ranks_per_dp
    if max(theirs, mine) % min(theirs, mine):
        raise ValueError(f"{theirs} holding and {mine} receiving tensor ranks: one must divide the other")
    if not 0 <= holder_dp_rank < holder.dp:
        raise ValueError(f"the holder has {holder.dp} data-parallel groups, not one of number {holder_dp_rank}")
    layers = layer_interval(num_layers, receiver.pp, receiver.stage(rank))
    heads = head_interval(num_heads, mine, receiver.rank_in_dp(rank))
    if mine <= theirs:
        ratio = theirs // mine
        first = receiver.rank_in_dp(rank) * ratio
        candidates = list(range(first, first + ratio))
    else:
        candidates = [receiver.rank_in_dp(rank) // (mine // theirs)]
    owned = {candidate: head_interval(num_heads, theirs, candidate) for candidate in candidates}
    groups: dict[Interval, list[int]] = {}
    for candidate, interval in owned.items():
        groups.setdefault(interval, []).append(candidate)
    elected = {ranks[receiver.dp_rank(rank) % len(ranks)] for ranks in groups.values()}
    sources = []
    for stage in range(holder.pp):
        shared = layer_interval(num_layers, holder.pp, stage) & layers
        if not shared:
            continue
        for candidate in candidates:
            part = owned[candidate] & heads
            tensor_rank = candidate + holder_dp_rank * theirs
            sources.append(
                Source(stage * holder.tp + tensor_rank, shared, part, candidate in elected and len(part) > 0)
            )
    return tuple(sources)


class PoolForm(StrEnum):
    """Order of a pool's bytes."""

    BLOCK_MAJOR = "block_major"  # [page][layer][k/v][head][token][dim]
    LAYER_MAJOR = "layer_major"  # [layer][page][k/v][head][token][dim]


@dataclass(frozen=True, slots=True)
class Fragment:
    """`nbytes` at `source` of the holder's region go to `target` of the receiver's."""

    source: int
    target: int
    nbytes: int


def cell_offset(
    form: PoolForm, num_pages: int, num_layers: int, kv_factor: int, heads: int, cell_bytes: int, page: int, layer: int,
    kv: int, head: int,
) -> int:  # fmt: skip
    """Byte offset of one (page, layer slot, k/v, local head) cell of `cell_bytes` = tokens x dim x item size."""
    block = page * num_layers + layer if form is PoolForm.BLOCK_MAJOR else layer * num_pages + page
    return ((block * kv_factor + kv) * heads + head) * cell_bytes


def page_fragments(
    source_layers: Sequence[int], source_heads: Interval, target_layers: Sequence[int], target_heads: Interval,
    kv_factor: int, cell_bytes: int, *, source_page: int = 0, target_page: int = 0,
    source_form: PoolForm = PoolForm.BLOCK_MAJOR, target_form: PoolForm = PoolForm.BLOCK_MAJOR,
    source_pages: int = 1, target_pages: int = 1,
) -> tuple[Fragment, ...]:  # fmt: skip
    """The copies that bring the shared layers and heads of one block over, adjacent ones joined.

    Layers are global ids in slot order on either side. Returns nothing when the sides share nothing.
    """
    heads = source_heads & target_heads
    where = {layer: slot for slot, layer in enumerate(target_layers)}
    fragments: list[Fragment] = []
    for slot, layer in enumerate(source_layers):
        if layer not in where or not heads:
            continue
        for kv in range(kv_factor):
            piece = Fragment(
                cell_offset(
                    source_form, source_pages, len(source_layers), kv_factor, len(source_heads), cell_bytes,
                    source_page, slot, kv, heads.start - source_heads.start,
                ),
                cell_offset(
                    target_form, target_pages, len(target_layers), kv_factor, len(target_heads), cell_bytes,
                    target_page, where[layer], kv, heads.start - target_heads.start,
                ),
                len(heads) * cell_bytes,
            )  # fmt: skip
            last = fragments[-1] if fragments else None
            if last and last.source + last.nbytes == piece.source and last.target + last.nbytes == piece.target:
                fragments[-1] = Fragment(last.source, last.target, last.nbytes + piece.nbytes)
            else:
                fragments.append(piece)
    return tuple(fragments)


def state_fragments(
    section_bytes: Sequence[int], holder_ranks: int, holder_rank: int, receiver_ranks: int, receiver_rank: int
) -> tuple[Fragment, ...]:
    """Copies of one layer's recurrent state between unlike tensor layouts.

    `section_bytes` are the sizes over all ranks of the sections that are cut one by one (the SSM state by heads is one
    section; a convolution state is x, B, C or Q, K, V). A rank's state is the row of its parts of every section;
    cutting the row as one run would mix the sections. Raises ValueError when a section does not divide.
    """
    fragments = []
    source_base = target_base = 0
    for size in section_bytes:
        if size % holder_ranks or size % receiver_ranks:
            raise ValueError(
                f"a state section of {size} bytes does not divide over {holder_ranks}/{receiver_ranks} ranks"
            )
        theirs, mine = size // holder_ranks, size // receiver_ranks
        source = Interval(holder_rank * theirs, (holder_rank + 1) * theirs)
        target = Interval(receiver_rank * mine, (receiver_rank + 1) * mine)
        shared = source & target
        if shared:
            fragments.append(
                Fragment(
                    source_base + shared.start - source.start, target_base + shared.start - target.start, len(shared)
                )
            )
        source_base += theirs
        target_base += mine
    return tuple(fragments)
