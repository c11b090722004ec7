"""Reading upward from a place in the radix tree: pages, provenance, keys and scope of the blocks on its path.

Pure reading: nothing here changes a node. Called by the tree and by the files that insert, match, plan and check.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvcache.provenance import BlockProvenance
from kvcache.radix_node import Anchor, RadixNode, Rows

__all__ = ["block_provenance", "copy_path_rows", "key_before", "locate", "path", "path_rows", "scope_of"]


def path_rows(node: RadixNode, offset: int, block: int) -> Rows:
    """Pages of every block from the root to `offset` tokens into `node`: int32 [rows, blocks] (a copy)."""
    parts = [node.rows(-(-offset // block))]
    above = node.parent
    while above is not None and above.parent is not None:
        parts.append(above.rows(above.num_blocks(block)))
        above = above.parent
    parts.reverse()
    return np.concatenate(parts, axis=1)


def copy_path_rows(node: RadixNode, offset: int, block: int, into: Rows) -> None:
    """Write what `path_rows` returns into the leading columns of `into`."""
    stop = -(-(node.start + offset) // block)
    first = node.start // block
    into[:, first:stop] = node.rows(stop - first)
    while first:
        assert node.parent is not None
        node, stop = node.parent, first
        first = node.start // block
        into[:, first:stop] = node.rows(stop - first)


def path(node: RadixNode) -> Iterator[RadixNode]:
    """The run and those above it, the root last."""
    above: RadixNode | None = node
    while above is not None:
        yield above
        above = above.parent


def locate(anchor: Anchor, ordinal: int, block: int) -> tuple[RadixNode, int] | None:
    """The run on an anchor's path that holds block `ordinal`, and the block's index in it."""
    node = anchor.node
    if ordinal * block >= node.start + anchor.offset:
        return None
    while node.start > ordinal * block:
        assert node.parent is not None
        node = node.parent
    return node, ordinal - node.start // block


def block_provenance(node: RadixNode, offset: int, block: int) -> list[BlockProvenance]:
    """Provenance of every block from the root to `offset` tokens into `node`."""
    found, last = [], -(-(node.start + offset) // block)
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


def key_before(node: RadixNode, block_index: int) -> bytes:
    """Chained key of the block before block `block_index` of a run (the scope's digest at the very start)."""
    if block_index:
        return node.digests[block_index - 1]
    parent = node.parent
    assert parent is not None
    return parent.digests[-1] if parent.parent is not None else parent.scope


def scope_of(node: RadixNode) -> bytes:
    """Digest of the reuse scope that a run belongs to."""
    while node.parent is not None:
        node = node.parent
    return node.scope
