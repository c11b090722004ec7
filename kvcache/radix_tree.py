"""The cached blocks of all reuse scopes: one radix tree of runs a scope, over the pools of all life cycles.

The manager and its sequences are the only callers. Matching compares tokens (`radix_match`); a block is never hashed
here. The tree owns the pages marked `in_tree`; it must never give up a block that an anchor in `locks` relies on.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np

from kvcache.block_keys import chain_keys
from kvcache.block_pool import BlockPool
from kvcache.events import EventKind, EventLog, StoredBlock
from kvcache.eviction.eviction_order import EvictionOrder
from kvcache.provenance import BlockProvenance, Provenance
from kvcache.radix_match import Match, TreeShape, path_rows, walk
from kvcache.radix_node import Anchor, RadixNode, Rows, Tokens, common_prefix
from kvcache.tiers import LowerTiers

__all__ = ["RadixTree"]

_NONE: frozenset[bytes] = frozenset()

Origins: TypeAlias = Sequence[tuple[int, Provenance]]


class RadixTree:
    """Roots by scope digest. `tick` counts uses and orders runs by recency."""

    def __init__(self, shape: TreeShape, pools: Sequence[BlockPool], order: EvictionOrder) -> None:
        self.shape = shape
        self.pools = pools
        self.order = order
        self.roots: dict[bytes, RadixNode] = {}
        self.tick = 0
        self._origins: Origins = ()
        self._inserting = 0
        self.superseded_blocks = 0
        self.evicted_blocks = 0
        self.evicted_superseded = 0
        self.evicted_window_pages = 0
        self.dropped_pages = 0
        self.locks: set[Anchor] = set()
        windowed = [group for _, group, _ in shape.window_rows] + list(shape.recurrent)
        self._window_queues: dict[int, list[tuple[tuple[int, int], int, RadixNode]]] = {g: [] for g in windowed}
        self._serial = 0
        self._compact_at = 4096
        self.events: EventLog | None = None
        self.keep_keys = False
        self.tiers: LowerTiers | None = None

    # reading

    def match(self, scope: bytes, tokens: Tokens, partial: bool) -> Match | None:
        """The longest reusable prefix, or None for a scope without any block."""
        root = self.roots.get(scope)
        return None if root is None else walk(root, tokens, self.shape, self.pools, partial)

    def root(self, scope: bytes) -> RadixNode:
        """The root of a scope, made when it is missing."""
        root = self.roots.get(scope)
        if root is None:
            root = self.roots[scope] = RadixNode(None, 0, len(self.shape.attention))
            root.scope = scope
        return root

    def rows(self, node: RadixNode, offset: int) -> Rows:
        """Pages from the root to `offset` tokens into `node` (a copy)."""
        return path_rows(node, offset, self.shape)

    def nodes(self) -> Iterator[RadixNode]:
        """Every run, roots included (for checks and statistics)."""
        stack = list(self.roots.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    # anchors and recency

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
            self.order.offer(old)
        anchor.offset = offset

    def unlock(self, anchor: Anchor) -> None:
        """Inverse of `lock`."""
        anchor.node.locks.remove(anchor)
        self.locks.remove(anchor)
        self.order.offer(anchor.node)
        self.forget_empty_root(anchor.node)

    def note_windows(self, node: RadixNode) -> None:
        """A run may have got window pages or snapshots: consider it, and those above, when such a pool is short."""
        for group, queue in self._window_queues.items():
            above: RadixNode | None = node
            while above is not None and above.parent is not None:
                if self._has_windows(above, group):
                    self._queue_windows(above, group)
                above = above.parent
            if len(queue) > self._compact_at:
                best = {id(entry[2]): entry for entry in sorted(queue, key=lambda one: -one[1]) if entry[2].alive}
                queue[:] = best.values()
                heapq.heapify(queue)
                self._compact_at = max(4096, 2 * len(queue))

    def touch(self, node: RadixNode, owner: str) -> None:
        """Everything from `node` up was used just now by `owner`."""
        self.tick += 1
        above: RadixNode | None = node
        while above is not None:
            above.last_used = self.tick
            above.owner = owner
            above = above.parent

    # publishing

    def insert(
        self, node: RadixNode, offset: int, tokens: Tokens, rows: Rows, origins: Origins = ()
    ) -> tuple[RadixNode, int]:
        """Publish `tokens` and their pages behind (`node`, `offset`), a block boundary.

        Blocks that are there already stay as they are, but take window pages they lack. Returns where the published
        tokens end. New pages enter the tree; the caller goes on holding what it held. `origins` says from which
        block of `tokens` on which provenance holds.
        """
        self._origins = origins
        self._inserting = len(tokens)
        block, done, count = self.shape.block, 0, len(tokens)
        while done < count:
            if offset < node.length:
                same = common_prefix(node.tokens()[offset:], tokens[done:])
                agreed = same if same == count - done else same - same % block
                self._donate(node, offset // block, rows[:, done // block :], agreed)
                if same == count - done:
                    return self._used(node), offset + same
                whole = same - same % block
                ends = offset + same == node.length
                done, offset = done + whole, offset + whole
                if ends:
                    if offset == node.length:
                        continue
                    self._extend(node, offset, tokens[done:], rows[:, done // block :])
                    return self._used(node), node.length
                child = self._grow(self._split(node, offset), tokens[done:], rows[:, done // block :])
                return self._used(child), child.length
            rest = tokens[done:]
            child_or_none = node.children.get(rest[:block].tobytes()) if len(rest) >= block else None
            if child_or_none is not None:
                node, offset = child_or_none, 0
                continue
            if node.parent is not None and not node.children:
                self._extend(node, offset, rest, rows[:, done // block :])
                return self._used(node), node.length
            return self._beside(node, rest, rows[:, done // block :])
        return self._used(node), offset

    def _beside(self, parent: RadixNode, rest: Tokens, rows: Rows) -> tuple[RadixNode, int]:
        """Hang `rest` under `parent`, whose children it may cover or be covered by."""
        block = self.shape.block
        key = rest[:block].tobytes()
        shared, ties = parent.nearest(key, 1)
        if shared and ties:
            child = ties[0]
            if shared == len(rest):
                self._donate(child, 0, rows, shared)
                return self._used(child), shared
            if shared == child.length:
                parent.drop_child(child.key(block))
                self._extend(child, 0, rest, rows)
                parent.add_child(key, child)
                return self._used(child), child.length
        child = self._grow(parent, rest, rows)
        return self._used(child), child.length

    def _used(self, node: RadixNode) -> RadixNode:
        """A live request published through here: nothing on the way is superseded."""
        above: RadixNode | None = node
        while above is not None and above.superseded:
            above.superseded = False
            self.superseded_blocks -= above.num_blocks(self.shape.block)
            above = above.parent
        return node

    def _grow(self, parent: RadixNode, tokens: Tokens, rows: Rows) -> RadixNode:
        child = RadixNode(parent, parent.end, len(self.shape.attention))
        child.last_used = self.tick
        child.append(0, tokens, self._enter(rows, len(tokens)), self.shape.block)
        parent.add_child(child.key(self.shape.block), child)
        self._stored(child, 0, len(tokens))
        return child

    def _extend(self, node: RadixNode, offset: int, tokens: Tokens, rows: Rows) -> None:
        """Append behind a boundary; a partial tail there is covered by the new block and gives its place up."""
        block = self.shape.block
        if node.superseded:
            self.superseded_blocks += -(-(offset + len(tokens)) // block) - node.num_blocks(block)
        if offset == node.length:
            node.append(offset, tokens, self._enter(rows, len(tokens)), block)
            self._stored(node, offset, len(tokens))
            return
        old = node.rows(node.num_blocks(block))[:, -1].copy()
        for row, group in enumerate(self.shape.attention):
            if old[row] >= 0 and old[row] == rows[row, 0]:  # the publisher's own page, fuller now
                self.pools[group].leave_tree(old[row : row + 1], keep=True)
                old[row] = -1
        merged = self._enter(rows, len(tokens))
        for row, group in enumerate(self.shape.attention):
            pool, page = self.pools[group], int(old[row])
            if page < 0:
                continue
            new = int(merged[row, 0])
            if new < 0:
                merged[row, 0] = page  # the shorter block's page is all there is: it keeps its recorded token count
            elif row not in self.shape.full_rows and pool.coverage[new] < pool.coverage[page]:
                merged[row, 0] = page
                self._replace(pool, new, page)
            else:
                self._replace(pool, page, new)
        node.cut_digests(offset // block)
        node.append(offset, tokens, merged, block)
        self._stored(node, offset, len(tokens))

    def _stored(self, node: RadixNode, offset: int, count: int) -> None:
        """`count` new tokens stand at `offset` of a run: note where they came from and tell the observers."""
        block = self.shape.block
        first, skipped = offset // block, (self._inserting - count) // block
        before = [origin for at, origin in self._origins if at <= skipped]
        later = [(at - skipped, origin) for at, origin in self._origins if at > skipped]
        node.add_origins(first, [(0, before[-1]), *later] if before else later)
        if not self.keep_keys:
            return
        parent = self.key_before(node, first)
        new = chain_keys(parent, node.tokens()[offset:], block)
        node.digests.extend(new)
        if self.events is not None and new:
            rows = node.tokens()[offset : offset + len(new) * block].reshape(-1, block).tolist()
            blocks = tuple(StoredBlock(key, tuple(row)) for key, row in zip(new, rows, strict=True))
            at_start = node.start + offset == 0
            self.events.add(
                EventKind.STORED,
                scope=self.scope_of(node),
                parent_key=None if at_start else parent,
                blocks=blocks,
            )

    def position(self, scope: bytes, tokens: Tokens) -> tuple[RadixNode, int]:
        """The last block boundary at which the tree agrees with `tokens`, whatever windows and states are there."""
        plain = TreeShape(self.shape.block, self.shape.attention, (), tuple(range(len(self.shape.attention))), ())
        found = walk(self.root(scope), tokens, plain, self.pools, False)
        return found.node, found.offset

    def key_before(self, node: RadixNode, block_index: int) -> bytes:
        """Chained key of the block before block `block_index` of a run (the scope's digest at the very start)."""
        if block_index:
            return node.digests[block_index - 1]
        parent = node.parent
        assert parent is not None
        return parent.digests[-1] if parent.parent is not None else parent.scope

    def scope_of(self, node: RadixNode) -> bytes:
        """Digest of the reuse scope that a run belongs to."""
        while node.parent is not None:
            node = node.parent
        return node.scope

    def _donate(self, node: RadixNode, first: int, rows: Rows, agreed: int) -> None:
        """Give existing blocks, whose first `agreed` tokens are equal, window pages they lack or hold less of."""
        block = self.shape.block
        for row, group, _ in self.shape.window_rows:
            pool = self.pools[group]
            new = rows[row, : -(-agreed // block)]
            slots = node.rows(first + len(new))[row, first:]
            covers = np.minimum(block, agreed - np.arange(len(new), dtype=np.int64) * block)
            less = (slots < 0) | (covers > pool.coverage[slots])
            for index in np.flatnonzero((new >= 0) & less):
                page, old = int(new[index]), int(slots[index])
                if page == old:
                    pool.coverage[page] = covers[index]
                elif not pool.in_tree[page]:
                    pool.coverage[page] = covers[index]
                    pool.enter_tree(new[index : index + 1])
                    slots[index] = page
                    if old >= 0:
                        self._replace(pool, old, page)

    def _replace(self, pool: BlockPool, old: int, new: int) -> None:
        """`new` takes the tree place of `old` and inherits the plans that count on it."""
        pool.move_plans(old, new)
        pool.leave_tree(np.array([old], dtype=np.int32))

    def _enter(self, rows: Rows, tokens: int) -> Rows:
        """Take the pages over for blocks that hold `tokens` tokens. Returns the rows as the tree keeps them: a window
        page that already stands for another block of the tree is left out.
        """
        for row, group in enumerate(self.shape.attention):
            pool = self.pools[group]
            if row in self.shape.full_rows:
                pool.enter_tree(rows[row])
                continue
            here = (rows[row] >= 0) & ~pool.in_tree[rows[row]]
            if not here.all():
                rows = rows.copy()
                rows[row, ~here] = -1
            pages = rows[row, here]
            pool.coverage[pages] = np.minimum(self.shape.block, tokens - np.flatnonzero(here) * self.shape.block)
            pool.enter_tree(pages)
        return rows

    def _split(self, node: RadixNode, offset: int) -> RadixNode:
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
        self.note_windows(front)
        for mine, theirs in ((node.locks, front.locks), (node.endpoints, front.endpoints)):
            kept = [anchor for anchor in mine if anchor.offset > offset]
            theirs.extend(anchor for anchor in mine if anchor.offset <= offset)
            mine[:] = kept
            for anchor in kept:
                anchor.offset -= offset
            for anchor in theirs:
                anchor.node = front
        return front

    # giving up

    def evict(self, group: int, wanted: int) -> int:
        """Give up blocks, least worthy runs first and from their tails, until `wanted` pages of `group` are free.

        Takes exactly what is needed. Returns how many pages became free (fewer when nothing evictable is left).
        """
        freed = 0
        if group not in self.shape.attention or self.shape.attention.index(group) not in self.shape.full_rows:
            return self._evict_windows(group, wanted)
        while freed < wanted:
            node = self.order.pop()
            if node is None:
                break
            spare = self.spare_blocks(node)
            if spare == 0:
                continue  # offered again when its lock goes
            take = min(spare, wanted - freed)
            before = self.pools[group].unused_pages
            self.evicted_blocks += take
            self.order.evicted(take)
            self.evicted_superseded += take if node.superseded else 0
            first = node.num_blocks(self.shape.block) - take
            kept = frozenset(self.tiers.offload(node, first, self.scope_of(node))) if self.tiers is not None else _NONE
            self.truncate(node, first, kept)
            freed += self.pools[group].unused_pages - before
            if node.alive:
                self.order.offer(node)
        return freed

    def _evict_windows(self, group: int, wanted: int) -> int:
        """Window pages and snapshots of the least recently used runs go first, the oldest positions before the end."""
        pool, freed = self.pools[group], 0
        queue = self._window_queues[group]
        held_back: list[RadixNode] = []
        while freed < wanted and queue:
            (_, last_used), _, node = heapq.heappop(queue)
            if not node.alive:
                continue
            if last_used != node.last_used:
                self._queue_windows(node, group)
                continue
            before = pool.unused_pages
            if not self._give_up_windows(node, group, wanted - freed):
                held_back.append(node)
                continue
            freed += pool.unused_pages - before
            self.evicted_window_pages += pool.unused_pages - before
            self._queue_windows(node, group)
            self.prune(node, group)
        for node in held_back:
            if node.alive and self._has_windows(node, group):
                self._queue_windows(node, group)
        return freed

    def _queue_windows(self, node: RadixNode, group: int) -> None:
        self._serial += 1
        heapq.heappush(self._window_queues[group], ((0, node.last_used), self._serial, node))

    def _has_windows(self, node: RadixNode, group: int) -> bool:
        if group in self.shape.recurrent:
            return any(owner == group for owner, _ in node.states)
        row = node.rows(node.num_blocks(self.shape.block))[self.shape.attention.index(group)]
        return bool((row >= 0).any())

    def _give_up_windows(self, node: RadixNode, group: int, most: int) -> int:
        """Take at most `most` pages of `group` that nobody holds out of a run. Returns how many."""
        pool = self.pools[group]
        if group in self.shape.recurrent:
            places = sorted(at for at, page in node.states.items() if at[0] == group and pool.refs[page] == 0)[:most]
            for at in places:
                self.drop_state(node, at)
            return len(places)
        row = node.rows(node.num_blocks(self.shape.block))[self.shape.attention.index(group)]
        held = np.flatnonzero(row >= 0)
        held = held[pool.refs[row[held]] == 0][:most]
        pages = row[held].copy()
        row[held] = -1
        pool.leave_tree(pages)
        return len(held)

    def locked_blocks(self) -> int:
        """Blocks that some lock protects (each counted once)."""
        block, total = self.shape.block, 0
        seen: dict[RadixNode, int] = {}
        for anchor in self.locks:
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

    def provenance(self, node: RadixNode, offset: int) -> list[BlockProvenance]:
        """Provenance of every block from the root to `offset` tokens into `node`."""
        block, found, last = self.shape.block, [], -(-(node.start + offset) // self.shape.block)
        above: RadixNode | None = node
        while above is not None and above.parent is not None:
            first = above.start // block
            for at, origin in reversed(above.origins):
                if first + at < last:
                    found.append(BlockProvenance(first + at, last, origin))
                    last = first + at
            last = min(last, first)
            above = above.parent
        found.reverse()
        return found

    def evictable_pages(self, group: int) -> int:
        """Pages of `group` that `evict` could free now."""
        pool = self.pools[group]
        if group in self.shape.attention and self.shape.attention.index(group) in self.shape.full_rows:
            return pool.tree_pages - self.locked_blocks()
        return int(np.count_nonzero(pool.in_tree & (pool.refs == 0)))

    def locate(self, anchor: Anchor, ordinal: int) -> tuple[RadixNode, int] | None:
        """The run on an anchor's path that holds block `ordinal`, and the block's index in it."""
        block, node = self.shape.block, anchor.node
        if ordinal * block >= node.start + anchor.offset:
            return None
        while node.start > ordinal * block:
            assert node.parent is not None
            node = node.parent
        return node, ordinal - node.start // block

    def drop_state(self, node: RadixNode, at: tuple[int, int]) -> None:
        """Forget one snapshot."""
        page = node.states.pop(at)
        self.pools[at[0]].leave_tree(np.array([page], dtype=np.int32))

    def spare_blocks(self, node: RadixNode) -> int:
        """Blocks at the end of a run that nobody relies on (0 for a run with children)."""
        if node.children:
            return 0
        block = self.shape.block
        needed = max((anchor.offset for anchor in node.locks), default=0)
        return node.num_blocks(block) - -(-needed // block)

    def prune(self, node: RadixNode, group: int) -> None:
        """A childless, unlocked block without the page of `group` can serve no match any more: give it up, upward."""
        block = self.shape.block
        while node.parent is not None and node.alive and not node.children:
            if group in self.shape.recurrent:
                last = max((at for owner, at in node.states if owner == group), default=node.start)
                useful = -(-(last - node.start) // block)
            else:
                row = node.rows(node.num_blocks(block))[self.shape.attention.index(group)]
                held = np.flatnonzero(row >= 0)
                useful = int(held[-1]) + 1 if len(held) else 0
            keep = max(useful, node.num_blocks(block) - self.spare_blocks(node))
            parent = node.parent
            self.truncate(node, keep)
            if keep:
                self.order.offer(node)
                return
            node = parent

    def truncate(self, node: RadixNode, blocks: int, kept: frozenset[bytes] = _NONE) -> None:
        """Keep the first `blocks` blocks of a leaf run; remove it when none is left. `kept`: keys that live on in a
        lower tier.
        """
        block, had = self.shape.block, node.num_blocks(self.shape.block)
        if blocks >= had:
            return
        parent = node.parent
        assert parent is not None and not node.children
        if node.superseded:
            self.superseded_blocks -= had - blocks
        tail = node.rows(had)[:, blocks:]
        for row, group in enumerate(self.shape.attention):
            pages = tail[row]
            if row not in self.shape.full_rows:
                pages = pages[pages >= 0]
            self.pools[group].leave_tree(pages)
        length = blocks * block
        gone = node.cut_digests(blocks)
        gone = [key for key in gone if key not in kept]
        if gone and self.events is not None:
            self.events.add(EventKind.REMOVED, keys=tuple(gone))
        for at in [at for at in node.states if at[1] > node.start + length]:
            self.drop_state(node, at)
        claimed_anonymously = node.anonymous > 0
        key = node.key(block)
        node.cut_back(length, block)
        node.anonymous = min(node.anonymous, length)
        for anchor in node.endpoints:
            anchor.offset = min(anchor.offset, length)
        if blocks:
            return
        node.alive = False
        parent.drop_child(key)
        if node.endpoints:
            for anchor in node.endpoints:
                anchor.node, anchor.offset = parent, parent.length
            parent.endpoints.extend(node.endpoints)
            node.endpoints = []
        if claimed_anonymously:
            parent.anonymous = parent.length
        self.order.offer(parent)
        self.forget_empty_root(parent)

    def forget_empty_root(self, node: RadixNode) -> None:
        """Let a root go that has nothing below it and nobody on it."""
        unused = node.parent is None and not node.children and not node.locks and not node.endpoints
        if unused and self.roots.get(node.scope) is node:
            del self.roots[node.scope]

    # retained turns

    def retain(self, node: RadixNode, offset: int) -> Anchor:
        """A retained turn ends here."""
        anchor = Anchor(node, offset)
        node.endpoints.append(anchor)
        return anchor

    def claim_anonymous(self, node: RadixNode, offset: int) -> None:
        """A publisher without a conversation ended here: no conversation's plan supersedes these blocks."""
        node.anonymous = max(node.anonymous, offset)

    def forget_turn(self, anchor: Anchor) -> None:
        """A turn is retained no more: what lies on no other turn's path becomes superseded."""
        node, block = anchor.node, self.shape.block
        node.endpoints.remove(anchor)
        self.forget_empty_root(node)
        while node.parent is not None and node.alive and not node.superseded:
            if any(not child.superseded for child in node.children.values()):
                return
            claimed = max((other.offset for other in node.endpoints), default=0)
            claimed = -(-max(claimed, node.anonymous) // block) * block
            if claimed >= node.length:
                return
            if claimed:
                self._split(node, claimed)
            node.superseded = True
            self.superseded_blocks += node.num_blocks(block)
            self.order.offer(node)
            if claimed:
                return
            node = node.parent
