"""Recount everything from the sequences, the pins and the tree, and compare it with what the pools say."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvcache.block_keys import chain_keys
from kvcache.radix_node import RadixNode
from kvcache.radix_path import key_before, path
from kvcache.sequence_pages import held_pages, source_pages

if TYPE_CHECKING:
    from kvcache.manager import KvCacheManager

__all__ = ["find_fault"]


def find_fault(manager: KvCacheManager) -> str | None:
    """The first broken invariant in words, or None."""
    return _tree_fault(manager) or _pool_fault(manager) or _lock_fault(manager) or _plan_fault(manager)


def _tree_fault(manager: KvCacheManager) -> str | None:
    tree, block, superseded = manager.tree, manager.tree.shape.block, 0
    locks = 0
    for node in tree.nodes():
        locks += len(node.locks)
        if not node.alive:
            return "a removed run is still in the tree"
        if node.parent is not None:
            if node.length < 1:
                return "an empty run is in the tree"
            if node.start != node.parent.end or node.start % block:
                return f"a run starts at {node.start}, its parent ends at {node.parent.end}"
            if node.parent.children.get(node.key(block)) is not node:
                return "a run is filed under another key than its tokens"
            superseded += node.num_blocks(block) if node.superseded else 0
            if node.parent.superseded and not node.superseded:
                return "a superseded run has one below that is not"
        if node.children and node.length % block:
            return "a run with a partial last block has children"
        if sorted(node.children) != node.keys:
            return "the sorted keys of a run's children are stale"
        fault = _anchor_fault(node, block)
        if fault:
            return fault
        keyed = tree.keep_keys and node.parent is not None
        if keyed and node.digests != chain_keys(key_before(node, 0), node.tokens(), block):
            return "the block keys of a run are stale"
        keys = node.keys
        for first, second in pairwise(keys):
            if second.startswith(first):
                return "a block is covered by its sibling"
    if tree.keys != {key for node in tree.nodes() for key in node.digests}:
        return "the keys of the blocks on the device are stale"
    if superseded != tree.superseded_blocks:
        return f"{superseded} superseded blocks, {tree.superseded_blocks} counted"
    if locks != len(tree.locks):
        return f"{locks} locks in the tree, {len(tree.locks)} counted"
    return None


def _anchor_fault(node: RadixNode, block: int) -> str | None:
    for anchor in (*node.locks, *node.endpoints):
        if anchor.node is not node:
            return "an anchor stands in another run than the one that lists it"
        if not (0 < anchor.offset <= node.length or (anchor.offset == 0 and node.parent is None)):
            return f"an anchor stands at {anchor.offset} of a run of {node.length} tokens"
    if node.origins and node.origins[-1][0] * block >= max(1, node.length):
        return "a run has an origin behind its blocks"
    if any(second[0] <= first[0] for first, second in pairwise(node.origins)):
        return "the origins of a run are out of order"
    for _, position in node.states:
        if not node.start < position <= node.end:
            return f"a snapshot at {position} lies outside its run {node.start}..{node.end}"
    if not 0 <= node.anonymous <= node.length:
        return "the anonymous part of a run is longer than the run"
    return None


def _pool_fault(manager: KvCacheManager) -> str | None:
    shape = manager.tree.shape
    in_tree: dict[int, list[NDArray[np.int32]]] = {group: [] for group in range(len(manager.pools))}
    for node in manager.tree.nodes():
        rows = node.rows(node.num_blocks(shape.block))
        for row, group in enumerate(shape.attention):
            if row in shape.full_rows and (rows[row] < 0).any():
                return f"a block lacks its page of life cycle {group}"
            in_tree[group].append(rows[row][rows[row] >= 0])
        for (group, _), page in node.states.items():
            in_tree[group].append(np.array([page], dtype=np.int32))
    for group, pool in enumerate(manager.pools):
        cached = np.concatenate([np.zeros(0, dtype=np.int32), *in_tree[group]])
        counted = np.bincount(cached, minlength=pool.num_pages)
        if counted.max(initial=0) > 1:
            return f"page {int(counted.argmax())} of life cycle {group} stands in the tree twice"
        if not np.array_equal(counted > 0, pool.in_tree) or pool.tree_pages != len(cached):
            return f"life cycle {group}: the tree holds {len(cached)} pages, the pool says {pool.tree_pages}"
        refs = np.zeros(pool.num_pages, dtype=np.int64)
        for pages in _holders(manager, group):
            np.add.at(refs, pages, 1)
        if not np.array_equal(refs, pool.refs):
            wrong = int(np.flatnonzero(refs != pool.refs)[0])
            return (
                f"page {wrong} of life cycle {group} has {int(refs[wrong])} holders, the pool says {pool.refs[wrong]}"
            )
        free = np.bincount(pool.free_list(), minlength=pool.num_pages)
        if not np.array_equal(free == 1, ~(pool.in_tree | (refs > 0))) or free.max(initial=0) > 1:
            return f"life cycle {group}: free + held + cached pages are not all pages"
    return None


def _lock_fault(manager: KvCacheManager) -> str | None:
    """Whoever holds a full-attention page of the tree has locked it too: eviction looks at the locks only."""
    tree, shape = manager.tree, manager.tree.shape
    above = {node for anchor in tree.locks for node in path(anchor.node) if node is not anchor.node}
    for node in tree.nodes():
        if node in above:
            continue
        locked = -(-max((anchor.offset for anchor in node.locks), default=0) // shape.block)
        for row in shape.full_rows:
            pages = node.rows(node.num_blocks(shape.block))[row, locked:]
            if manager.pools[shape.attention[row]].refs[pages].any():
                return f"an evictable block of life cycle {shape.attention[row]} has a page that somebody holds"
    return None


def _holders(manager: KvCacheManager, group: int) -> Iterator[NDArray[np.int32]]:
    """Page lists of everyone who holds pages of `group` one by one."""
    for sequence in manager._sequences.values():
        yield held_pages(sequence)[group]
        yield source_pages(sequence, group)
    for pin in manager.pins:
        yield pin.pages[group]


def _plan_fault(manager: KvCacheManager) -> str | None:
    if manager.ledger is None:
        return None
    counts = [np.zeros(pool.num_pages, dtype=np.int64) for pool in manager.pools]
    for conversation in manager.ledger.conversations():
        for handle in conversation.turns:
            if handle.used:
                return "a used drop handle is in the ledger"
            if handle.endpoint not in handle.endpoint.node.endpoints:
                return "a retained turn's endpoint is not in the tree"
            if any(node.superseded for node in path(handle.endpoint.node)):
                return "a run on a retained turn's path is marked superseded"
            for planned in handle.pages:
                page = manager.pools[planned.group].planned_page_now(planned.page, planned.generation)
                if page >= 0:
                    counts[planned.group][page] += 1
        if len(conversation.turns) > manager.ledger.max_num_turns:
            return "a conversation retains more turns than max_num_turns"
    for group, pool in enumerate(manager.pools):
        if not np.array_equal(counts[group], pool.plan_count):
            return f"life cycle {group}: plan counts differ from the ledger's plans"
    return None
