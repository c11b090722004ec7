"""Gives cached blocks up for want of room: tails of runs for full attention, single pages for windows and snapshots.

The manager asks for pages of one life cycle; `prune` is also for those who took a run's window pages out themselves.
Never gives up a block that a lock protects, nor a page that somebody holds.
"""

from __future__ import annotations

import numpy as np

from kvcache.radix_node import RadixNode
from kvcache.radix_path import scope_of
from kvcache.radix_tree import RadixTree

__all__ = ["evict", "evict_all", "evictable_pages", "prune"]


def evict(tree: RadixTree, group: int, wanted: int) -> int:
    """Give up blocks until `wanted` more pages of `group` are free; takes exactly what is needed. Returns how many
    pages became free (fewer when nothing evictable is left).
    """
    return _evict_runs(tree, group, wanted) if _keeps_all(tree, group) else _evict_windows(tree, group, wanted)


def evictable_pages(tree: RadixTree, group: int) -> int:
    """Pages of `group` that `evict` could free now."""
    pool = tree.pools[group]
    if _keeps_all(tree, group):
        return pool.tree_pages - _locked_blocks(tree)
    return int(np.count_nonzero(pool.in_tree & (pool.refs == 0)))


def evict_all(tree: RadixTree) -> None:
    """Give up every block that no lock protects. Uncounted, and nothing goes to a lower tier."""
    while True:
        leaves = [node for node in tree.nodes() if node.parent is not None and not node.children]
        spare = [(node, blocks) for node in leaves if (blocks := _spare_blocks(tree, node))]
        if not spare:
            return
        for node, blocks in spare:
            tree.truncate(node, node.num_blocks(tree.shape.block) - blocks)
            if node.alive:
                tree.order.offer(node)


def prune(tree: RadixTree, node: RadixNode, group: int) -> None:
    """A childless, unlocked block without the page of `group` can serve no match any more: give it up, upward."""
    block = tree.shape.block
    while node.parent is not None and node.alive and not node.children:
        keep = max(_useful_blocks(tree, node, group), node.num_blocks(block) - _spare_blocks(tree, node))
        parent = node.parent
        tree.evictions.pruned += node.num_blocks(block) - keep
        tree.truncate(node, keep)
        if keep:
            tree.order.offer(node)
            return
        node = parent


# full attention


def _keeps_all(tree: RadixTree, group: int) -> bool:
    """Whether every cached block has a page of `group` (a full-attention life cycle)."""
    return group in tree.shape.attention and tree.shape.attention.index(group) in tree.shape.full_rows


def _evict_runs(tree: RadixTree, group: int, wanted: int) -> int:
    """Least worthy runs first, from their tails."""
    pool, freed = tree.pools[group], 0
    while freed < wanted:
        node = tree.order.pop()
        if node is None:
            break
        spare = _spare_blocks(tree, node)
        if spare == 0:
            continue  # offered again when its lock goes
        take = min(spare, wanted - freed)
        before = pool.unused_pages
        tree.evictions.blocks += take
        tree.evictions.superseded += take if node.superseded else 0
        tree.order.evicted(take)
        first = node.num_blocks(tree.shape.block) - take
        if tree.tiers is None:
            tree.truncate(node, first)
        else:
            tree.truncate(node, first, frozenset(tree.tiers.offload(node, first, scope_of(node))))
        freed += pool.unused_pages - before
        if node.alive:
            tree.order.offer(node)
    return freed


def _spare_blocks(tree: RadixTree, node: RadixNode) -> int:
    """Blocks at the end of a run that nobody relies on (0 for a run with children)."""
    if node.children:
        return 0
    block = tree.shape.block
    needed = max((anchor.offset for anchor in node.locks), default=0)
    return node.num_blocks(block) - -(-needed // block)


def _locked_blocks(tree: RadixTree) -> int:
    """Blocks that some lock protects (each counted once)."""
    block, total = tree.shape.block, 0
    seen: dict[RadixNode, int] = {}
    for anchor in tree.locks:
        node: RadixNode | None = anchor.node
        wanted = -(-anchor.offset // block)
        while node is not None and node.parent is not None:
            had = seen.get(node, 0)
            if wanted > had:
                seen[node] = wanted
                total += wanted - had
            if had == node.num_blocks(block):
                break  # everything above was counted with it
            node = node.parent
            wanted = node.num_blocks(block)
    return total


# windows and snapshots


def _evict_windows(tree: RadixTree, group: int, wanted: int) -> int:
    """Least recently used runs first, in each the oldest positions."""
    pool, freed = tree.pools[group], 0
    held_back: list[RadixNode] = []
    while freed < wanted and (node := tree.windows.pop(group)) is not None:
        before = pool.unused_pages
        if not _give_up_windows(tree, node, group, wanted - freed):
            held_back.append(node)
            continue
        freed += pool.unused_pages - before
        tree.evictions.window_pages[group] += pool.unused_pages - before
        tree.windows.push(node, group)
        prune(tree, node, group)
    for node in held_back:
        if node.alive and tree.windows.holds(node, group):
            tree.windows.push(node, group)
    return freed


def _give_up_windows(tree: RadixTree, node: RadixNode, group: int, most: int) -> int:
    """Take at most `most` pages of `group` that nobody holds out of a run. Returns how many."""
    pool = tree.pools[group]
    if group in tree.shape.recurrent:
        places = sorted(at for at, page in node.states.items() if at[0] == group and pool.refs[page] == 0)[:most]
        for at in places:
            tree.drop_state(node, at)
        return len(places)
    row = node.rows(node.num_blocks(tree.shape.block))[tree.shape.attention.index(group)]
    held = np.flatnonzero(row >= 0)
    held = held[pool.refs[row[held]] == 0][:most]
    pages = row[held].copy()
    row[held] = -1
    pool.leave_tree(pages)
    return len(held)


def _useful_blocks(tree: RadixTree, node: RadixNode, group: int) -> int:
    """Leading blocks of a leaf run, up to the last that a match may end in for the sake of `group`."""
    block = tree.shape.block
    if group in tree.shape.recurrent:
        last = max((at for owner, at in node.states if owner == group), default=node.start)
        return -(-(last - node.start) // block)
    held = np.flatnonzero(node.rows(node.num_blocks(block))[tree.shape.attention.index(group)] >= 0)
    return int(held[-1]) + 1 if len(held) else 0
