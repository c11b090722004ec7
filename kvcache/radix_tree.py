"""The cached blocks of all reuse scopes: one radix tree of runs a scope, over the pools of all life cycles.

This file owns the structure: finding a place, protecting it, splitting and shortening runs. What is done with it
stands beside it: `radix_match` (token walk), `radix_insert`, `radix_evict`, `radix_turns`. Tokens are compared, a
block is never hashed to find it. The tree owns the pages marked `in_tree`; blocks below an anchor in `locks` stay.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from kvcache.block_pool import BlockPool
from kvcache.counters import EvictionCounts
from kvcache.events import EventKind, EventLog
from kvcache.eviction.eviction_order import EvictionOrder
from kvcache.eviction.idle_owner import is_anonymous
from kvcache.radix_match import Match, TreeShape, walk
from kvcache.radix_node import Anchor, RadixNode, Rows, Tokens
from kvcache.radix_path import path_rows
from kvcache.radix_windows import WindowQueues
from kvcache.tiers import LowerTiers

__all__ = ["RadixTree"]


class RadixTree:
    """Roots by scope digest. `tick` counts uses and orders runs by recency.

    superseded_blocks   blocks of the runs that are marked superseded
    keep_keys           keep the chained keys of whole blocks (somebody wants events, or there are lower tiers)
    keys                those of all blocks on the device, then
    """

    def __init__(self, shape: TreeShape, pools: Sequence[BlockPool], order: EvictionOrder) -> None:
        self.shape = shape
        self.pools = pools
        self.order = order
        self.windows = WindowQueues(shape)
        self.roots: dict[bytes, RadixNode] = {}
        self.locks: set[Anchor] = set()
        self.tick = 0
        self.superseded_blocks = 0
        self.evictions = EvictionCounts()
        self.keep_keys = False
        self.keys: set[bytes] = set()
        self.events: EventLog | None = None
        self.tiers: LowerTiers | None = None

    # reading

    def match(self, scope: bytes, tokens: Tokens, partial: bool) -> Match | None:
        """The longest reusable prefix, or None for a scope without any block."""
        root = self.roots.get(scope)
        return None if root is None else walk(root, tokens, self.shape, self.pools, partial)

    def position(self, scope: bytes, tokens: Tokens) -> tuple[RadixNode, int]:
        """The last block boundary at which the tree agrees with `tokens`, whatever windows and states are there."""
        plain = TreeShape(self.shape.block, self.shape.attention, (), tuple(range(len(self.shape.attention))), ())
        found = walk(self.root(scope), tokens, plain, self.pools, False)
        return found.node, found.offset

    def rows(self, node: RadixNode, offset: int) -> Rows:
        """Pages from the root to `offset` tokens into `node` (a copy)."""
        return path_rows(node, offset, self.shape.block)

    def nodes(self) -> Iterator[RadixNode]:
        """Every run, roots included (for checks and statistics)."""
        stack = list(self.roots.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    # roots

    def root(self, scope: bytes) -> RadixNode:
        """The root of a scope, made when it is missing."""
        root = self.roots.get(scope)
        if root is None:
            root = self.roots[scope] = RadixNode(None, 0, len(self.shape.attention))
            root.scope = scope
        return root

    def forget_empty_root(self, node: RadixNode) -> None:
        """Let a root go that has nothing below it and nobody on it."""
        unused = node.parent is None and not node.children and not node.locks and not node.endpoints
        if unused and self.roots.get(node.scope) is node:
            del self.roots[node.scope]

    # locks and recency

    def lock(self, node: RadixNode, offset: int) -> Anchor:
        """Protect the first `offset` tokens of `node`, and all above, from eviction."""
        anchor = Anchor(node, offset)
        node.locks.append(anchor)
        self.locks.add(anchor)
        return anchor

    def move_lock(self, anchor: Anchor, node: RadixNode, offset: int) -> None:
        """Let an anchor stand elsewhere."""
        if anchor.node is not node:
            old = anchor.node
            old.locks.remove(anchor)
            node.locks.append(anchor)
            anchor.node = node
            anchor.offset = offset
            self.order.offer(old)
        elif offset < anchor.offset:
            anchor.offset = offset
            self.order.offer(node)
        else:
            anchor.offset = offset

    def unlock(self, anchor: Anchor) -> None:
        """Inverse of `lock`."""
        anchor.node.locks.remove(anchor)
        self.locks.remove(anchor)
        self.order.offer(anchor.node)
        self.forget_empty_root(anchor.node)

    def touch(self, node: RadixNode, owner: str) -> None:
        """Everything from `node` up was used just now by `owner`. A request without a conversation (a loan to a
        peer, say) takes no run over from one.
        """
        self.tick += 1
        anonymous = is_anonymous(owner)
        above: RadixNode | None = node
        while above is not None:
            above.last_used = self.tick
            if not anonymous or not above.owner or is_anonymous(above.owner):
                above.owner = owner
            above = above.parent

    # changing runs

    def split(self, node: RadixNode, offset: int) -> RadixNode:
        """Make the first `offset` tokens a run of their own; `node` stays the rest. Returns the new run."""
        block, parent = self.shape.block, node.parent
        assert parent is not None and 0 < offset < node.length and offset % block == 0
        key = node.key(block)
        front = RadixNode(parent, node.start, len(self.shape.attention))
        front.append(0, node.tokens()[:offset], node.rows(offset // block), block)
        node.cut_front(offset, block)
        node.parent = front
        parent.children[key] = front
        front.add_child(node.key(block), node)
        front.last_used, front.owner, front.superseded = node.last_used, node.owner, node.superseded
        front.anonymous, node.anonymous = min(offset, node.anonymous), max(0, node.anonymous - offset)
        front.origins = node.front_origins(offset // block)
        front.digests, node.digests = node.digests[: offset // block], node.digests[offset // block :]
        front.states = {at: page for at, page in node.states.items() if at[1] <= front.end}
        node.states = {at: page for at, page in node.states.items() if at[1] > front.end}
        self.windows.note(front)
        for mine, theirs in ((node.locks, front.locks), (node.endpoints, front.endpoints)):
            kept = [anchor for anchor in mine if anchor.offset > offset]
            theirs.extend(anchor for anchor in mine if anchor.offset <= offset)
            mine[:] = kept
            for anchor in kept:
                anchor.offset -= offset
            for anchor in theirs:
                anchor.node = front
        self.order.offer(node)  # a lock that protected all of it may protect only the front now
        return front

    def truncate(self, node: RadixNode, blocks: int, kept: frozenset[bytes] = frozenset()) -> None:
        """Keep the first `blocks` blocks of a leaf run; remove it when none is left. `kept`: keys that live on in a
        lower tier.
        """
        block, had = self.shape.block, node.num_blocks(self.shape.block)
        if blocks >= had:
            return
        parent, key, was_anonymous = node.parent, node.key(block), node.anonymous > 0
        assert parent is not None and not node.children
        if node.superseded:
            self.superseded_blocks -= had - blocks
        self._leave_tail(node, blocks, had, kept)
        length = blocks * block
        node.cut_back(length, block)
        node.anonymous = min(node.anonymous, length)
        for anchor in node.endpoints:
            anchor.offset = min(anchor.offset, length)
        if not blocks:
            self._remove(node, parent, key)
            self.order.removed(node)
            if was_anonymous:
                parent.anonymous = parent.length
            self.order.offer(parent)
            self.forget_empty_root(parent)

    def drop_state(self, node: RadixNode, at: tuple[int, int]) -> None:
        """Forget one snapshot."""
        page = node.states.pop(at)
        self.pools[at[0]].leave_tree(np.array([page], dtype=np.int32))

    def _leave_tail(self, node: RadixNode, blocks: int, had: int, kept: frozenset[bytes]) -> None:
        """Pages, keys and snapshots of the blocks from `blocks` to `had` leave the tree."""
        tail = node.rows(had)[:, blocks:]
        for row, group in enumerate(self.shape.attention):
            pages = tail[row]
            if row not in self.shape.full_rows:
                pages = pages[pages >= 0]
            self.pools[group].leave_tree(pages)
        cut = node.cut_digests(blocks)
        if cut:
            self.keys.difference_update(cut)
            lower = self.tiers if self.tiers is not None else ()
            gone = tuple(key for key in cut if key not in kept and key not in lower)
            if gone and self.events is not None:
                self.events.add(EventKind.REMOVED, keys=gone)
        end = node.start + blocks * self.shape.block
        for at in [at for at in node.states if at[1] > end]:
            self.drop_state(node, at)

    @staticmethod
    def _remove(node: RadixNode, parent: RadixNode, key: bytes) -> None:
        """Take an emptied run out; turns that ended in it now end where its parent does."""
        node.alive = False
        parent.drop_child(key)
        for anchor in node.endpoints:
            anchor.node, anchor.offset = parent, parent.length
        parent.endpoints.extend(node.endpoints)
        node.endpoints = []
