"""Which runs lie on a retained turn's path, and which are superseded: on such a path once and on none any more.

Superseded runs are the first to be evicted. Drop handles retain and forget turns; publishers claim and revive runs.
"""

from __future__ import annotations

from kvcache.radix_node import Anchor, RadixNode
from kvcache.radix_tree import RadixTree

__all__ = ["claim_anonymous", "forget_turn", "retain", "revive"]


def retain(tree: RadixTree, node: RadixNode, offset: int) -> Anchor:
    """A retained turn ends here; what a dropped one superseded meanwhile counts again. The anchor may stand in
    another run than `node`.
    """
    node, offset = revive(tree, node, offset)
    anchor = Anchor(node, offset)
    node.endpoints.append(anchor)
    return anchor


def claim_anonymous(node: RadixNode, offset: int) -> None:
    """A publisher without a conversation ended here: no conversation's plan supersedes these blocks."""
    node.anonymous = max(node.anonymous, offset)


def revive(tree: RadixTree, node: RadixNode, offset: int) -> tuple[RadixNode, int]:
    """A live request published up to here: none of these blocks is superseded any more, those behind stay so. Above
    an older run that is not superseded none is, so only a new one's parent needs a look. Returns the place, which
    stands in another run where `node` had to be split.
    """
    block = tree.shape.block
    if node.superseded and (keep := -(-offset // block) * block) < node.length:
        node = tree.split(node, keep)
    above = node if node.superseded else node.parent
    while above is not None and above.superseded:
        above.superseded = False
        tree.superseded_blocks -= above.num_blocks(block)
        above = above.parent
    return node, offset


def forget_turn(tree: RadixTree, anchor: Anchor) -> None:
    """A turn is retained no more: what lies on no other turn's path becomes superseded."""
    node, block = anchor.node, tree.shape.block
    node.endpoints.remove(anchor)
    tree.forget_empty_root(node)
    while node.parent is not None and node.alive and not node.superseded:
        for child in node.children.values():
            if not child.superseded:
                return
        claimed = node.anonymous
        for other in node.endpoints:
            if other.offset > claimed:
                claimed = other.offset
        claimed = -(-claimed // block) * block
        if claimed >= node.length:
            return
        if claimed:
            tree.split(node, claimed)
        node.superseded = True
        tree.superseded_blocks += node.num_blocks(block)
        tree.order.offer(node)
        if claimed:
            return
        node = node.parent
