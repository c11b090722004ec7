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
from transceiver.mapping import Fragment, PoolForm, page_fragments, state_fragments
from transceiver.parallel_layout import Interval, RankShare

__all__ = ["PagePart", "PartView", "PoolShape", "default_shares", "part_between"]


@dataclass(frozen=True, slots=True)
class PoolShape:
    """How one side's pool of a group lies in memory: its form, its pages, and the device that holds it."""

    layer_major: bool = False
    num_pages: int = 1
    device: str = "cpu"

    @property
    def form(self) -> PoolForm:
        return PoolForm.LAYER_MAJOR if self.layer_major else PoolForm.BLOCK_MAJOR

    def page_stride(self, group: LayerGroup, page_bytes: int) -> int:
        """Bytes from a piece of one page to the same piece of the next page."""
        return page_bytes // len(group.layers) if self.layer_major else page_bytes


def default_shares(layout: KvLayout) -> tuple[RankShare, ...]:
    """Shares of a rank that holds every head."""
    return tuple(
        RankShare(1, Interval(0, 1), (g.state_bytes_per_layer,))
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
        """The part's bytes (first `valid` tokens) of a page [layer][bytes] in logical order, compact."""
        if self.spans:
            flat = page.reshape(-1)
            return np.concatenate([flat[start : start + size] for start, size in self.spans])
        if not self.slots:  # nothing is shared; a recurrent page has no cells to choose from
            return np.empty(0, np.uint8)
        cells = page.reshape(len(group.layers), group.kv_factor, group.num_kv_heads, tokens, -1)
        return np.ascontiguousarray(cells[list(self.slots), :, self.heads.start : self.heads.stop, :valid])

    def digest(self, page: NDArray[np.uint8], group: LayerGroup, tokens: int, valid: int) -> bytes:
        """XXH3-128 of `select`."""
        return xxhash.xxh3_128_digest(self.select(page, group, tokens, valid).data)


@dataclass(frozen=True, slots=True)
class PagePart:
    """Shared bytes of a holder's page and a receiver's page of one group. `nbytes` is 0 when they share nothing.

    `fragments` are offsets in page 0 of either pool; page p of a side lies p strides further. `holder_layer_stride` is
    set for a layer-major holder: bytes from one layer's pages to the next layer's.
    """

    fragments: tuple[Fragment, ...]
    holder: PartView
    receiver: PartView
    source_shape: tuple[int, int] | None = None  # layers and heads of the holder's page; None: bytes only
    holder_stride: int = 0
    receiver_stride: int = 0
    holder_layer_stride: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that one block moves."""
        return sum(piece.nbytes for piece in self.fragments)

    def place(self, source: NDArray[np.uint8], page: NDArray[np.uint8], group: LayerGroup) -> None:
        """Copy the part from a holder's page, whole and block-major at the start of `source`, into the receiver's page.

        `page` is [layer][bytes of the layer] and is written in place.
        """
        if self.source_shape is None:
            for (start, size), (target, _) in zip(self.holder.spans, self.receiver.spans, strict=True):
                layer, at = divmod(target, group.state_bytes_per_layer)
                page[layer, at : at + size] = source[start : start + size]
            return
        layers, heads = self.source_shape
        cell = page.size // (len(group.layers) * group.kv_factor * group.num_kv_heads)
        theirs = source[: layers * group.kv_factor * heads * cell].reshape(layers, group.kv_factor, heads, cell)
        mine = page.reshape(len(group.layers), group.kv_factor, group.num_kv_heads, cell)  # a view: layers are whole
        mine[_index(self.receiver.slots), :, self.receiver.heads.start : self.receiver.heads.stop] = theirs[
            _index(self.holder.slots), :, self.holder.heads.start : self.holder.heads.stop
        ]


def _index(slots: tuple[int, ...]) -> slice | list[int]:
    """A slice when the slots are consecutive (a plain strided copy), else the list."""
    if slots == tuple(range(slots[0], slots[0] + len(slots))):
        return slice(slots[0], slots[0] + len(slots))
    return list(slots)


def part_between(
    tokens: int, holder: LayerGroup, holder_share: RankShare, receiver: LayerGroup, receiver_share: RankShare,
    holder_pool: PoolShape = PoolShape(), receiver_pool: PoolShape = PoolShape(),
) -> PagePart | None:  # fmt: skip
    """The shared part, or None when whole pages are alike. Raises ValueError for shares that do not divide."""
    block_major = not (holder_pool.layer_major or receiver_pool.layer_major)
    if block_major and holder == receiver and holder_share == receiver_share:
        return None
    holder_page, receiver_page = holder.page_bytes(tokens), receiver.page_bytes(tokens)
    strides = (
        holder_pool.page_stride(holder, holder_page),
        receiver_pool.page_stride(receiver, receiver_page),
        holder_pool.num_pages * holder_page // len(holder.layers) if holder_pool.layer_major else None,
    )
    if holder.kind is LifeCycleKind.RECURRENT:
        return _state_part(holder, holder_share, receiver, receiver_share, holder_pool, receiver_pool, strides)
    cell = tokens * holder.head_dim * DTYPE_BYTES[holder.dtype]
    fragments = page_fragments(
        holder.layers, holder_share.heads, receiver.layers, receiver_share.heads, holder.kv_factor, cell,
        source_form=holder_pool.form, target_form=receiver_pool.form,
        source_pages=holder_pool.num_pages, target_pages=receiver_pool.num_pages,
    )  # fmt: skip
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
    return PagePart(fragments, view(holder, holder_share), view(receiver, receiver_share), shape, *strides)


def _state_part(
    holder: LayerGroup, holder_share: RankShare, receiver: LayerGroup, receiver_share: RankShare,
    holder_pool: PoolShape, receiver_pool: PoolShape, strides: tuple[int, int, int | None],
) -> PagePart:  # fmt: skip
    for group, share in ((holder, holder_share), (receiver, receiver_share)):
        own = sum(size // share.num_heads for size in share.state_sections)
        if len(share.heads) != 1 or own != group.state_bytes_per_layer:
            raise ValueError(
                f"a share of {len(share.heads)}/{share.num_heads} of the state sections {share.state_sections} is not "
                f"the {group.state_bytes_per_layer} bytes a layer of the layout"
            )
    pieces = state_fragments(
        holder_share.state_sections, holder_share.num_heads, holder_share.heads.start, receiver_share.num_heads,
        receiver_share.heads.start,
    )  # fmt: skip
    theirs, mine = holder.state_bytes_per_layer, receiver.state_bytes_per_layer
    fragments, here, there = [], [], []
    for layer in sorted(set(holder.layers) & set(receiver.layers)):
        source, target = holder.layers.index(layer), receiver.layers.index(layer)
        apart = [pool.num_pages if pool.layer_major else 1 for pool in (holder_pool, receiver_pool)]
        for piece in pieces:
            fragments.append(
                Fragment(
                    source * apart[0] * theirs + piece.source, target * apart[1] * mine + piece.target, piece.nbytes
                )
            )
            there.append((source * theirs + piece.source, piece.nbytes))
            here.append((target * mine + piece.target, piece.nbytes))
    empty = Interval(0, 0)
    return PagePart(
        tuple(fragments), PartView((), empty, tuple(there)), PartView((), empty, tuple(here)), None, *strides
    )
