"""How a sequence gets pages for more tokens: what it needs, taking it all or nothing, private copies of what it shares.

Called by `SequenceCache` under the manager's guard. Reserving, and with it evicting, is the manager's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvcache.errors import OutOfPagesError
from kvcache.live_range import first_live_block
from kvcache.sequence_pages import give_back, let_sources_go

if TYPE_CHECKING:
    from kvcache.sequence_cache import SequenceCache

__all__ = ["forfeit_match", "resize"]


def resize(sequence: SequenceCache, num_tokens: int, history: int | None) -> None:
    """Provide pages for `num_tokens` tokens, or give those beyond them back (see `SequenceCache.resize`)."""
    try:
        _provide(sequence, num_tokens, history)
    except OutOfPagesError:
        if not sequence.sources and not sequence.state_sources:
            raise
        forfeit_match(sequence)  # the copy source itself is in the way: reuse less rather than wait for ever
        _provide(sequence, num_tokens, history)


def forfeit_match(sequence: SequenceCache) -> None:
    """Give up the part of the match that is not copied yet."""
    let_sources_go(sequence)
    if sequence._shape.plain:
        reused = sequence.num_reused_tokens - sequence.num_reused_tokens % sequence._shape.block
    else:
        reused = 0
        give_back(sequence)
    sequence.num_reused_tokens = sequence.num_computed_tokens = sequence.num_committed_tokens = reused
    sequence.capacity_tokens = min(sequence.capacity_tokens, reused)


def _provide(sequence: SequenceCache, num_tokens: int, history: int | None) -> None:
    manager, shape, blocks = sequence._manager, sequence._shape, -(-num_tokens // sequence._shape.block)
    if blocks < sequence.blocks:
        _shrink(sequence, blocks)
    had = sequence.blocks
    firsts = [had] * len(shape.attention)
    need = dict.fromkeys(shape.attention, blocks - had)  # of new pages
    total = dict.fromkeys(shape.attention, blocks)
    for row, group, window in shape.window_rows:
        live = first_live_block(sequence.num_computed_tokens if history is None else history, shape.block, window)
        firsts[row] = max(had, live)
        need[group] = total[group] = max(0, blocks - firsts[row])
    for group in shape.recurrent:
        need[group] = 0 if group in sequence.state_pages else 1
    manager.room.check_fits(num_tokens, total)
    if blocks > had or any(need.values()):
        manager.room.reserve(need)
        _take(sequence, blocks, firsts, need)
    if sequence.sources or sequence.state_sources:
        _copy_sources(sequence)
    sequence.capacity_tokens = num_tokens


def _take(sequence: SequenceCache, blocks: int, firsts: list[int], need: dict[int, int]) -> None:
    """Allocate what was reserved, from block `firsts[row]` on; the rows grow by a quarter at least."""
    shape, pools, had = sequence._shape, sequence._manager.pools, sequence.blocks
    columns = sequence.rows.shape[1]
    if blocks > columns:
        rows = np.empty((len(firsts), max(blocks, columns * 5 // 4)), dtype=np.int32)
        rows[:, :had] = sequence.rows[:, :had]
        sequence.rows = rows
    for row, group in enumerate(shape.attention):
        if firsts[row] > had:
            sequence.rows[row, had : firsts[row]] = -1
        if need[group]:
            sequence.rows[row, firsts[row] : blocks] = pools[group].allocate(need[group])
    for group in shape.recurrent:
        if need[group]:
            sequence.state_pages[group] = int(pools[group].allocate(1)[0])
    sequence.blocks = blocks


def _copy_sources(sequence: SequenceCache) -> None:
    """Private copies of the partially matched block and of the snapshots; the shared ones are let go."""
    manager, shape = sequence._manager, sequence._shape
    if sequence.sources:
        index = sequence.num_reused_tokens // shape.block
        for row, group in enumerate(shape.attention):
            target = int(sequence.rows[row, index])
            if sequence.sources[row] >= 0 and target >= 0:  # a window's block may be out of its range by the history
                manager.copy_page(sequence.sources[row], target, group)
    for group, page in sequence.state_sources.items():
        manager.copy_page(page, sequence.state_pages[group], group)
    let_sources_go(sequence)


def _shrink(sequence: SequenceCache, blocks: int) -> None:
    """Release the pages behind the first `blocks` blocks."""
    shape = sequence._shape
    for row, group in enumerate(shape.attention):
        pages = sequence.rows[row, blocks : sequence.blocks]
        sequence._manager.pools[group].release(pages if row in shape.full_rows else pages[pages >= 0])
    sequence.blocks = blocks
