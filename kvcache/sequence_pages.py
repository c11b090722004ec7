"""Which pages a sequence holds: those of its match, those of its own, and how each is given back.

Called by `SequenceCache` and its helpers under the manager's guard. Blocks before `owned_from` lie in the tree under
the sequence's lock; those from there on it holds page by page. Windows and states are always held page by page.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvcache.block_pool import Pages
from kvcache.live_range import first_live_block
from kvcache.radix_match import Match
from kvcache.radix_node import RadixNode
from kvcache.radix_path import block_provenance, copy_path_rows

if TYPE_CHECKING:
    from kvcache.sequence_cache import SequenceCache

__all__ = [
    "adopt",
    "boundary",
    "give_back",
    "held_pages",
    "let_sources_go",
    "own_everything",
    "release_stale",
    "source_pages",
    "stay",
]


def adopt(sequence: SequenceCache, match: Match) -> None:
    """Hold what was matched. The rows get columns for the whole prompt."""
    shape, tree, reused = sequence._shape, sequence._tree, match.num_tokens
    block, pools = shape.block, tree.pools
    blocks = reused // block
    sequence.rows = np.empty((len(shape.attention), 1 + sequence.prompt_tokens // block), dtype=np.int32)
    copy_path_rows(match.node, match.offset, block, sequence.rows)
    sequence.lock = tree.lock(match.node, match.offset)
    if not shape.plain:
        tree.touch(match.node, sequence.owner)  # the lock protects no states: what is matched must not look old
    sequence.blocks = sequence.owned_from = blocks
    if reused % block:
        sequence.sources = sequence.rows[:, blocks].tolist()
        for group, page in zip(shape.attention, sequence.sources, strict=True):
            if page >= 0:  # another publisher may replace a partial block meanwhile
                pools[group].hold(_page(page))
    for row, group, window in shape.window_rows:
        pages = sequence.rows[row, :blocks]
        pages[: first_live_block(reused, block, window)] = -1
        pools[group].hold(pages[pages >= 0])
    for group in shape.recurrent:
        page = match.node.states[group, reused]
        pools[group].hold(_page(page))
        sequence.state_sources[group] = page
    sequence.num_reused_tokens = sequence.num_computed_tokens = reused
    sequence.num_committed_tokens = sequence.capacity_tokens = reused


def held_pages(sequence: SequenceCache) -> dict[int, Pages]:
    """Pages that the sequence holds one by one, a group each (matched tree blocks are not among them)."""
    held: dict[int, Pages] = {}
    for row, group in enumerate(sequence._shape.attention):
        full = row in sequence._shape.full_rows
        pages = sequence.rows[row, sequence.owned_from if full else 0 : sequence.blocks]
        held[group] = pages if full and sequence.suspended is None else pages[pages >= 0]
    for group in sequence._shape.recurrent:
        held[group] = np.array([sequence.state_pages[group]] if group in sequence.state_pages else [], dtype=np.int32)
    return held


def source_pages(sequence: SequenceCache, group: int) -> Pages:
    """Shared pages and snapshots held until they are copied."""
    pages = [sequence.state_sources[group]] if group in sequence.state_sources else []
    for row, owner in enumerate(sequence._shape.attention):
        if owner == group and sequence.sources and sequence.sources[row] >= 0:
            pages.append(sequence.sources[row])
    return np.array(pages, dtype=np.int32)


def let_sources_go(sequence: SequenceCache) -> None:
    """Stop holding shared pages and snapshots that were to be copied."""
    pools = sequence._tree.pools
    for group, page in zip(sequence._shape.attention, sequence.sources, strict=False):
        if page >= 0:
            pools[group].release(_page(page))
    for group, page in sequence.state_sources.items():
        pools[group].release(_page(page))
    sequence.state_sources = {}
    if sequence.sources:
        sequence.sources = []
        if sequence.lock is not None:
            sequence._tree.move_lock(sequence.lock, *boundary(sequence))


def boundary(sequence: SequenceCache) -> tuple[RadixNode, int]:
    """The last block boundary of what is published: where the lock stands, less a partial block."""
    lock, block = sequence.lock, sequence._shape.block
    assert lock is not None
    node = lock.node
    at = node.start + lock.offset
    if not at % block:
        return node, lock.offset
    at -= at % block
    while node.parent is not None and at <= node.start:
        node = node.parent
    return node, at - node.start


def release_stale(sequence: SequenceCache) -> None:
    """Give back window pages that no later token can attend to."""
    block = sequence._shape.block
    for row, group, window in sequence._shape.window_rows:
        first = min(first_live_block(sequence.num_computed_tokens, block, window), sequence.blocks)
        pages = sequence.rows[row, :first]
        held = pages >= 0
        if held.any():
            sequence._tree.pools[group].release(pages[held])
            pages[held] = -1


def own_everything(sequence: SequenceCache) -> tuple[RadixNode, int] | None:
    """Hold matched tree blocks page by page, so that the tree may go (`KvCacheManager.clear`). Returns where the
    sequence stood in the tree if it stands there no more.
    """
    if sequence.lock is None:
        return None
    if sequence.sources:
        return None  # not copied yet: the lock stays, and with it the matched path
    place = sequence.lock.node, sequence.lock.offset
    mine = sequence._origins[0][0] if sequence._origins else sequence.blocks
    matched = block_provenance(sequence.lock.node, sequence.lock.offset, sequence._shape.block)
    sequence._origins[:0] = [(one.first, one.provenance) for one in matched if one.first < mine]
    shape = sequence._shape
    for row in shape.full_rows:
        sequence._tree.pools[shape.attention[row]].hold(sequence.rows[row, : sequence.owned_from])
    sequence.owned_from = 0
    sequence._tree.unlock(sequence.lock)
    sequence.lock = None
    sequence.num_committed_tokens = 0
    return place


def stay(sequence: SequenceCache, node: RadixNode, offset: int) -> None:
    """Stand at `offset` of `node`, or as far up as there are still blocks, and hold what lies before it by a lock
    instead of page by page: a page that is held and not locked would be evicted in vain.
    """
    while node.parent is not None and not node.alive:
        node = node.parent
        offset = node.length
    offset = min(offset, node.length)
    if node.parent is None:
        return
    shape, tree, end = sequence._shape, sequence._tree, node.start + offset
    if sequence.lock is None:
        sequence.lock = tree.lock(node, offset)
    else:
        tree.move_lock(sequence.lock, node, offset)
    owned, sequence.owned_from = sequence.owned_from, end // shape.block
    sequence.num_committed_tokens = end
    for row in shape.full_rows:
        tree.pools[shape.attention[row]].hand_over(sequence.rows[row, owned : sequence.owned_from])


def give_back(sequence: SequenceCache) -> None:
    """Release every page and the place in the tree."""
    if sequence.blocks > sequence.owned_from or not sequence._shape.plain:
        for group, pages in held_pages(sequence).items():
            sequence._tree.pools[group].release(pages)
    sequence.state_pages = {}
    sequence.blocks = sequence.owned_from = 0
    sequence.rows = sequence.rows[:, :0]
    if sequence.lock is not None:
        sequence._tree.touch(sequence.lock.node, sequence.owner)
        sequence._tree.unlock(sequence.lock)
        sequence.lock = None


def _page(page: int) -> Pages:
    return np.array([page], dtype=np.int32)
