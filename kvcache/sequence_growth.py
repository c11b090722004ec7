"""How a sequence gets pages for more tokens: what it needs, taking it all or nothing, private copies of what it shares.

Called by `SequenceCache` under the manager's guard. Reserving, and with it evicting, is the manager's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvcache.errors import OutOfPagesError
from kvcache.live_range import first_live_block

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
    sequence.let_sources_go()
    if sequence._shape.plain:
        reused = sequence.num_reused_tokens - sequence.num_reused_tokens % sequence._shape.block
    else:
        reused = 0
        sequence.give_back()
    sequence.num_reused_tokens = sequence.num_computed_tokens = sequence.num_committed_tokens = reused
    sequence.capacity_tokens = min(sequence.capacity_tokens, reused)


def _provide(sequence: SequenceCache, num_tokens: int, history: int | None) -> None:
    manager, blocks = sequence._manager, -(-num_tokens // sequence._shape.block)
    if blocks < sequence.blocks:
        _shrink(sequence, blocks)
    firsts = _first_new_blocks(sequence, sequence.num_computed_tokens if history is None else history)
    need = _need(sequence, blocks, firsts)
    manager.check_fits(num_tokens, blocks, [blocks - first for first in firsts])
    if blocks > sequence.blocks or any(need.values()):
        manager.reserve(need)
        _take(sequence, blocks, firsts, need)
    _copy_sources(sequence)
    sequence.capacity_tokens = num_tokens


def _first_new_blocks(sequence: SequenceCache, history: int) -> list[int]:
    """For each row the first block that gets a new page."""
    shape = sequence._shape
    firsts = [sequence.blocks] * len(shape.attention)
    for row, _, window in shape.window_rows:
        firsts[row] = max(sequence.blocks, first_live_block(history, shape.block, window))
    return firsts


def _need(sequence: SequenceCache, blocks: int, firsts: list[int]) -> dict[int, int]:
    """New pages by group."""
    shape = sequence._shape
    need = {group: max(0, blocks - first) for group, first in zip(shape.attention, firsts, strict=True)}
    need.update({group: 0 if group in sequence.state_pages else 1 for group in shape.recurrent})
    return need


def _take(sequence: SequenceCache, blocks: int, firsts: list[int], need: dict[int, int]) -> None:
    """Allocate what was reserved; the rows grow by a quarter at least."""
    shape, pools, had = sequence._shape, sequence._manager.pools, sequence.blocks
    columns = sequence.rows.shape[1]
    if blocks > columns:
        capacity = max(blocks, columns * 5 // 4) if columns else blocks
        rows = np.full((len(firsts), capacity), -1, dtype=np.int32)
        rows[:, :had] = sequence.rows[:, :had]
        owned = np.zeros(capacity, dtype=np.bool_)
        owned[:had] = sequence.owned[:had]
        sequence.rows, sequence.owned = rows, owned
    elif blocks > had:
        sequence.rows[:, had:blocks] = -1
    for row, group in enumerate(shape.attention):
        if need[group]:
            sequence.rows[row, firsts[row] : blocks] = pools[group].allocate(need[group])
    for group in shape.recurrent:
        if need[group]:
            sequence.state_pages[group] = int(pools[group].allocate(1)[0])
    sequence.owned[had:blocks] = True
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
    sequence.let_sources_go()


def _shrink(sequence: SequenceCache, blocks: int) -> None:
    """Release the pages behind the first `blocks` blocks."""
    shape = sequence._shape
    for row, group in enumerate(shape.attention):
        pages = sequence.rows[row, blocks : sequence.blocks]
        held = pages >= 0 if row not in shape.full_rows else sequence.owned[blocks : sequence.blocks]
        sequence._manager.pools[group].release(pages[held])
    sequence.blocks = blocks
