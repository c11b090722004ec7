"""Publishes tokens and their pages into the radix tree.

`insert` is for the publisher and for blocks that come back from a lower tier. Blocks that are there already stay as
they are, but take window pages that they lack.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from kvcache.block_keys import chain_keys
from kvcache.events import EventKind, StoredBlock
from kvcache.provenance import Provenance
from kvcache.radix_node import RadixNode, Rows, Tokens, common_prefix
from kvcache.radix_path import key_before, scope_of
from kvcache.radix_tree import RadixTree
from kvcache.radix_turns import revive

__all__ = ["insert"]

Origins: TypeAlias = Sequence[tuple[int, Provenance]]
Place: TypeAlias = tuple[RadixNode, int]


def insert(
    tree: RadixTree, node: RadixNode, offset: int, tokens: Tokens, rows: Rows, origins: Origins = ()
) -> tuple[RadixNode, int, int]:
    """Publish `tokens` and their pages behind (`node`, `offset`), a block boundary.

    Returns where the published tokens end, and how many of their whole blocks were there already: the pages of the
    others enter the tree, and the caller goes on holding what it held. `origins` says from which block of `tokens` on
    which provenance holds.
    """
    insertion = _Insertion(tree, len(tokens), origins)
    node, offset = revive(tree, *insertion.run(node, offset, tokens, rows))
    return node, offset, insertion.known_blocks


class _Insertion:
    """One call of `insert`. `tokens` and `rows` are, in every method, what remains to be published."""

    __slots__ = ("block", "known_blocks", "num_tokens", "origins", "tree")

    def __init__(self, tree: RadixTree, num_tokens: int, origins: Origins) -> None:
        self.tree = tree
        self.block = tree.shape.block
        self.num_tokens = num_tokens
        self.known_blocks = num_tokens // self.block
        self.origins = origins

    def run(self, node: RadixNode, offset: int, tokens: Tokens, rows: Rows) -> Place:
        """Follow what is there, then add what is not."""
        block = self.block
        while len(tokens):
            if offset < node.length:
                same = common_prefix(node.tokens()[offset:], tokens)
                if same == len(tokens):
                    self._donate(node, offset // block, rows, same)
                    return node, offset + same
                whole = same - same % block
                self._donate(node, offset // block, rows, whole)
                inside = offset + same < node.length
                offset, tokens, rows = offset + whole, tokens[whole:], rows[:, whole // block :]
                if inside:
                    return self._grow(self.tree.split(node, offset), tokens, rows)
                if offset < node.length:  # the run's partial last block is the beginning of the next one
                    return self._extend(node, offset, tokens, rows)
                continue
            child = node.children.get(tokens[:block].tobytes()) if node.children and len(tokens) >= block else None
            if child is not None:
                node, offset = child, 0
            elif node.parent is not None and not node.children:
                return self._extend(node, offset, tokens, rows)
            else:
                return self._beside(node, tokens, rows)
        return node, offset

    def _beside(self, parent: RadixNode, tokens: Tokens, rows: Rows) -> Place:
        """Hang the tokens under `parent`, whose children they may cover or be covered by."""
        key = tokens[: self.block].tobytes()
        shared, ties = parent.nearest(key, 1)
        if shared and ties:
            child = ties[0]
            if shared == len(tokens):
                self._donate(child, 0, rows, shared)
                return child, shared
            if shared == child.length:
                parent.drop_child(child.key(self.block))
                place = self._extend(child, 0, tokens, rows)
                parent.add_child(key, child)
                return place
        return self._grow(parent, tokens, rows)

    def _grow(self, parent: RadixNode, tokens: Tokens, rows: Rows) -> Place:
        """A new run under `parent`."""
        child = RadixNode(parent, parent.end, len(self.tree.shape.attention))
        child.last_used = self.tree.tick
        child.append(0, tokens, self._enter(rows, len(tokens)), self.block)
        parent.add_child(child.key(self.block), child)
        self._stored(child, 0, len(tokens))
        return child, child.length

    def _extend(self, node: RadixNode, offset: int, tokens: Tokens, rows: Rows) -> Place:
        """Append behind a boundary; a partial tail there is covered by the new block and gives its place up."""
        block = self.block
        if node.superseded:
            self.tree.superseded_blocks += -(-(offset + len(tokens)) // block) - node.num_blocks(block)
        if offset == node.length:
            entered = self._enter(rows, len(tokens))
        else:
            entered = self._cover_tail(node, tokens, rows)
            node.cut_digests(offset // block)
        node.append(offset, tokens, entered, block)
        self._stored(node, offset, len(tokens))
        return node, node.length

    def _cover_tail(self, node: RadixNode, tokens: Tokens, rows: Rows) -> Rows:
        """`_enter` where the first block takes the place of a run's partial last one, fuller page wins."""
        shape, pools = self.tree.shape, self.tree.pools
        old = node.rows(node.num_blocks(self.block))[:, -1].copy()
        for row, group in enumerate(shape.attention):
            if old[row] >= 0 and old[row] == rows[row, 0]:  # the publisher's own page, fuller now
                pools[group].leave_tree(old[row : row + 1], keep=True)
                old[row] = -1
        entered = self._enter(rows, len(tokens))
        for row, group in enumerate(shape.attention):
            pool, page, new = pools[group], int(old[row]), int(entered[row, 0])
            if page < 0:
                continue
            if new < 0:
                entered[row, 0] = page  # the shorter block's page is all there is: it keeps its recorded token count
            elif row not in shape.full_rows and pool.coverage[new] < pool.coverage[page]:
                entered[row, 0] = page
                pool.replace_in_tree(new, page)
            else:
                pool.replace_in_tree(page, new)
        return entered

    def _enter(self, rows: Rows, tokens: int) -> Rows:
        """Take the pages over for blocks that hold `tokens` tokens. Returns the rows as the tree keeps them: a window
        page that already stands for another block of the tree is left out.
        """
        shape = self.tree.shape
        for row, group in enumerate(shape.attention):
            pool = self.tree.pools[group]
            if row in shape.full_rows:
                pool.enter_tree(rows[row])
                continue
            here = (rows[row] >= 0) & ~pool.in_tree[rows[row]]
            if not here.all():
                rows = rows.copy()
                rows[row, ~here] = -1
            pages = rows[row, here]
            pool.coverage[pages] = np.minimum(self.block, tokens - np.flatnonzero(here) * self.block)
            pool.enter_tree(pages)
        return rows

    def _donate(self, node: RadixNode, first: int, rows: Rows, agreed: int) -> None:
        """Give existing blocks, whose first `agreed` tokens are equal, window pages they lack or hold less of."""
        block = self.block
        for row, group, _ in self.tree.shape.window_rows:
            pool = self.tree.pools[group]
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
                        pool.replace_in_tree(old, page)

    def _stored(self, node: RadixNode, offset: int, count: int) -> None:
        """`count` new tokens stand at `offset` of a run: note where they came from and tell the observers."""
        tree, block = self.tree, self.block
        first, skipped = offset // block, (self.num_tokens - count) // block
        self.known_blocks = skipped
        origins = self.origins
        if skipped:
            before = [origin for at, origin in origins if at <= skipped]
            later = [(at - skipped, origin) for at, origin in origins if at > skipped]
            origins = [(0, before[-1]), *later] if before else later
        fresh = -(-count // block)
        if origins and origins[-1][0] >= fresh:  # of what the sequence computed behind and did not publish yet
            origins = [(at, origin) for at, origin in origins if at < fresh]
        node.add_origins(first, origins)
        if not tree.keep_keys:
            return
        parent = key_before(node, first)
        new = chain_keys(parent, node.tokens()[offset:], block)
        node.digests.extend(new)
        tree.keys.update(new)
        if tree.events is not None and new:
            rows = node.tokens()[offset : offset + len(new) * block].reshape(-1, block).tolist()
            blocks = tuple(StoredBlock(key, tuple(row)) for key, row in zip(new, rows, strict=True))
            parent_key = None if node.start + offset == 0 else parent
            tree.events.add(EventKind.STORED, scope=scope_of(node), parent_key=parent_key, blocks=blocks)
