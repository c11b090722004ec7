"""Brings blocks of a prompt back from the lower tiers into the tree, before the prompt is matched.

Called by the manager only. It takes no more pages than are free or evictable, verifies what comes back, and leaves
everything as it was when there is no room.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvcache.provenance import BlockOrigin, Provenance
from kvcache.radix_evict import evictable_pages
from kvcache.radix_insert import insert
from kvcache.radix_node import RadixNode, Tokens
from kvcache.radix_path import key_before
from kvcache.tiers import LowerTiers, TierBlock

if TYPE_CHECKING:
    from kvcache.manager import KvCacheManager

__all__ = ["estimate_onboarded", "onboard", "tier_keys"]


def tier_keys(manager: KvCacheManager, tiers: LowerTiers, tokens: Tokens, scope: bytes) -> tuple[int, list[bytes]]:
    """Where the tree's blocks of a prompt end (tokens), and the keys of the whole blocks that the tiers hold next."""
    tree, block = manager.tree, manager.tree.shape.block
    known = scope in tree.roots
    node, offset = tree.position(scope, tokens)
    end = node.start + offset
    parent = key_before(node, offset // block) if end else scope
    keys = tiers.available(parent, tokens[end:])
    if not known:
        tree.forget_empty_root(node)
    return end, keys


def estimate_onboarded(manager: KvCacheManager, tiers: LowerTiers, tokens: Tokens, scope: bytes) -> int:
    """How many leading tokens the device would hold after `onboard` (full attention only). No side effects."""
    end, keys = tier_keys(manager, tiers, tokens, scope)
    block = manager.tree.shape.block
    room = manager.pools[0].free_pages + evictable_pages(manager.tree, 0) - end // block
    return end + max(0, min(len(keys), room)) * block


def onboard(manager: KvCacheManager, tiers: LowerTiers, tokens: Tokens, scope: bytes) -> int:
    """Returns the blocks brought back."""
    end, keys = tier_keys(manager, tiers, tokens, scope)
    if not keys:
        return 0
    tree, block = manager.tree, manager.tree.shape.block
    node, offset = tree.position(scope, tokens[:end]) if end else (tree.root(scope), 0)
    lock = tree.lock(node, offset)
    room = min(
        (manager.pools[group].free_pages + evictable_pages(tree, group) for group in manager.tree.shape.attention),
        default=len(keys),
    )
    taken: list[TierBlock] = []
    sources = [tiers.tier_of(key) for key in keys]
    for key in keys[: max(0, room)]:
        one = tiers.take(key, scope)
        if one is None:
            break
        taken.append(one)
    need = {group: len(taken) for group in tree.shape.attention}
    for group in tree.shape.recurrent:
        need[group] = sum(part[:2] > (group, -1) and part[0] == group for one in taken for part in one.parts)
    if not taken or not manager.room.try_reserve(need):
        for one in taken:
            tiers.put_back(one)
        tree.unlock(lock)
        return 0
    rows = np.full((len(tree.shape.attention), len(taken)), -1, dtype=np.int32)
    for row, group in enumerate(tree.shape.attention):
        pages = manager.pools[group].allocate(len(taken))
        for index, one in enumerate(taken):
            whole = any(part[0] == group and part[1] == -1 and part[2] in (0, block) for part in one.parts)
            if row in tree.shape.full_rows or whole:
                tiers.write_page(one, group, -1, int(pages[index]))
                rows[row, index] = pages[index]
        manager.pools[group].release(pages[rows[row] < 0])
    came = Provenance(BlockOrigin.TIER, manager.worker_id, "")
    last, _, _ = insert(tree, node, offset, tokens[end : end + len(taken) * block], rows, [(0, came)])
    for row, group in enumerate(tree.shape.attention):
        manager.pools[group].release(rows[row][rows[row] >= 0])
    for one in taken:
        _restore_states(manager, tiers, last, one)
    for one, source in zip(taken, sources, strict=False):
        tiers.onboarded(one, source)
    tree.touch(last, last.owner)
    tree.windows.note(last)
    tree.unlock(lock)
    tree.order.offer(last)
    return len(taken)


def _restore_states(manager: KvCacheManager, tiers: LowerTiers, last: RadixNode, one: TierBlock) -> None:
    for group, position, _, _ in one.parts:
        if position < 0:
            continue
        node: RadixNode = last
        while node.parent is not None and position <= node.start:
            node = node.parent
        if (group, position) in node.states or not node.start < position <= node.end:
            continue
        pool = manager.pools[group]
        pages = pool.allocate(1)
        tiers.write_page(one, group, position, int(pages[0]))
        pool.enter_tree(pages)
        pool.release(pages)
        node.states[group, position] = int(pages[0])
