"""Whoever holds a full-attention page of the tree has locked its block too: eviction looks at the locks only.

A page that enters the tree can have other holders than its publisher: pins made before, and sequences that shared it
when `KvCacheManager.clear` took it out. Called by the publisher.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvcache.block_pool import Pages
from kvcache.radix_node import RadixNode
from kvcache.radix_path import locate
from kvcache.sequence_pages import stay

if TYPE_CHECKING:
    from kvcache.sequence_cache import SequenceCache

__all__ = ["lock_for_others"]


def lock_for_others(sequence: SequenceCache, fresh: int, end: int) -> None:
    """`sequence` has published its blocks from `fresh` up to token `end`: whoever else holds their pages locks them."""
    manager, shape, lock = sequence._manager, sequence._shape, sequence.lock
    if lock is None or not shape.full_rows:
        return
    row, block = shape.full_rows[0], shape.block
    group = shape.attention[row]
    pool, pages = manager.pools[group], sequence.rows[row, fresh : -(-end // block)]
    holders = pool.refs[pages] - (np.arange(fresh, fresh + len(pages)) >= sequence.owned_from)
    shared = (holders > 0) & pool.in_tree[pages]
    if not shared.any():
        return

    def place(held: Pages) -> tuple[RadixNode, int] | None:
        mine = np.flatnonzero(shared & np.isin(pages, held))
        if not len(mine):
            return None
        ordinal = fresh + int(mine[-1])
        found = locate(lock, ordinal, block)
        assert found is not None
        return found[0], min(end, (ordinal + 1) * block) - found[0].start

    for pin in manager.pins:
        if (at := place(pin.pages[group])) is not None:
            pin.lock_at(manager.tree, *at)
    for other in manager.cleared:
        if other is not sequence and (at := place(other.rows[row, : other.blocks])) is not None:
            stay(other, *at)
