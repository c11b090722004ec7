"""The part of a page that two ranks share: where it lies on either side, its digest, and how it is copied.

Computed once per peer and layer group from both sides' layouts and shares. `None` in place of a part means that the
pages are alike: the whole page moves as it lies. Pure apart from reading and writing the pages it is given.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvcache.layout import DTYPE_BYTES, KvLayout, LayerGroup, LifeCycleKind
from transceiver.mapping import Fragment, page_fragments, state_fragments
from transceiver.parallel_layout import Interval, RankShare

__all__ = ["PagePart", "PartView", "default_shares", "part_between"]


def default_shares(layout: KvLayout) -> tuple[RankShare, ...]:
    """Shares of a rank that holds every head."""
    return tuple(
        RankShare(max(1, g.num_kv_heads), Interval(0, max(1, g.num_kv_heads)), (g.state_bytes_per_layer,))
        if g.kind is LifeCycleKind.RECURRENT
        else RankShare(g.num_kv_heads, Interval(0, g.num_kv_heads))
        for g in layout.groups
    )


@dataclass(frozen=True, slots=True)
class PartView:
    """One side's view of the shared part: layer slots in order of global layer id, local heads; or byte spans."""

    slots: tuple[int, ...]
    heads: Interval
    spans: tuple[tuple[int, int], ...] = ()

    def select(self, page: NDArray[np.uint8], group: LayerGroup, tokens: int, valid: int) -> NDArray[np.uint8]:
        """The part's bytes (first `valid` tokens) in logical order, compact."""
        if self.spans:
            return np.concatenate([page[start : start + size] for start, size in self.spans])
        cells = page.reshape(len(group.layers), group.kv_factor, group.num_kv_heads, tokens, -1)
        return np.ascontiguousarray(cells[list(self.slots), :, self.heads.start : self.heads.stop, :valid])

    def digest(self, page: NDArray[np.uint8], group: LayerGroup, tokens: int, valid: int) -> bytes:
        """XXH3-128 of `select`."""
        return xxhash.xxh3_128_digest(self.select(page, group, tokens, valid).data)


@dataclass(frozen=True, slots=True)
class PagePart:
    """Shared bytes of a holder's page and a receiver's page of one group. `nbytes` is 0 when they share nothing."""

    fragments: tuple[Fragment, ...]
    holder: PartView
    receiver: PartView
    source_shape: tuple[int, int] | None = None  # layers and heads of the holder's page; None: bytes only

    @property
    def nbytes(self) -> int:
        """Bytes that one block moves."""
        return sum(piece.nbytes for piece in self.fragments)

    def place(self, source: NDArray[np.uint8], page: NDArray[np.uint8], group: LayerGroup) -> None:
        """Copy the part from a holder's page, at the start of `source`, into the receiver's `page`."""
        if self.source_shape is None:
            for piece in self.fragments:
                page[piece.target : piece.target + piece.nbytes] = source[piece.source : piece.source + piece.nbytes]
            return
        layers, heads = self.source_shape
        cell = page.nbytes // (len(group.layers) * group.kv_factor * group.num_kv_heads)
        theirs = source[: layers * group.kv_factor * heads * cell].reshape(layers, group.kv_factor, heads, cell)
        mine = page.reshape(len(group.layers), group.kv_factor, group.num_kv_heads, cell)
        mine[_index(self.receiver.slots), :, self.receiver.heads.start : self.receiver.heads.stop] = theirs[
            _index(self.holder.slots), :, self.holder.heads.start : self.holder.heads.stop
        ]


def _index(slots: tuple[int, ...]) -> slice | list[int]:
    """A slice when the slots are consecutive (a plain strided copy), else the list."""
    if slots == tuple(range(slots[0], slots[0] + len(slots))):
        return slice(slots[0], slots[0] + len(slots))
    return list(slots)


def part_between(
    tokens: int, holder: LayerGroup, holder_share: RankShare, receiver: LayerGroup, receiver_share: RankShare
) -> PagePart | None:
    """The shared part, or None when whole pages are alike. Raises ValueError for shares that do not divide."""
    if holder == receiver and holder_share == receiver_share:
        return None
    if holder.kind is LifeCycleKind.RECURRENT:
        return _state_part(holder, holder_share, receiver, receiver_share)
    cell = tokens * holder.head_dim * DTYPE_BYTES[holder.dtype]
    fragments = page_fragments(
        holder.layers, holder_share.heads, receiver.layers, receiver_share.heads, holder.kv_factor, cell
    )
    shared = sorted(set(holder.layers) & set(receiver.layers))
    heads = holder_share.heads & receiver_share.heads

    def view(group: LayerGroup, share: RankShare) -> PartView:
        start = share.heads.start
        return PartView(
            tuple(group.layers.index(layer) for layer in shared), Interval(heads.start - start, heads.stop - start)
        )

    if not shared or not heads:
        nothing = PartView((), Interval(0, 0))
        return PagePart((), nothing, nothing)
    shape = (len(holder.layers), holder.num_kv_heads)
    return PagePart(fragments, view(holder, holder_share), view(receiver, receiver_share), shape)


def _state_part(
    holder: LayerGroup, holder_share: RankShare, receiver: LayerGroup, receiver_share: RankShare
) -> PagePart:
    pieces = state_fragments(
        holder_share.state_sections, holder_share.num_heads, holder_share.heads.start, receiver_share.num_heads,
        receiver_share.heads.start,
    )  # fmt: skip
    fragments = tuple(
        Fragment(
            holder.layers.index(layer) * holder.state_bytes_per_layer + piece.source,
            receiver.layers.index(layer) * receiver.state_bytes_per_layer + piece.target,
            piece.nbytes,
        )
        for layer in sorted(set(holder.layers) & set(receiver.layers))
        for piece in pieces
    )
    empty = Interval(0, 0)
    return PagePart(
        fragments,
        PartView((), empty, tuple((f.source, f.nbytes) for f in fragments)),
        PartView((), empty, tuple((f.target, f.nbytes) for f in fragments)),
    )
