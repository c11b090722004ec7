"""Which runs lie on a retained turn's path, and which are superseded: on such a path once and on none any more.

Superseded runs are the first to be evicted. Drop handles retain and forget turns; publishers claim and revive runs.
"""

from __future__ import annotations

from kvcache.radix_node import Anchor, RadixNode
from kvcache.radix_tree import RadixTree

__all__ = ["claim_anonymous", "forget_turn", "retain", "revive"]


def retain(node: RadixNode, offset: int) -> Anchor:
    """A retained turn ends here."""
    anchor = Anchor(node, offset)
    node.endpoints.append(anchor)
    return anchor


def claim_anonymous(node: RadixNode, offset: int) -> None:
    """A publisher without a conversation ended here: no conversation's plan supersedes these blocks."""
    node.anonymous = max(node.anonymous, offset)


def revive(tree: RadixTree, node: RadixNode) -> None:
    """A live request published through here: `node` is superseded no more, nor those above up to one that was not."""
    above: RadixNode | None = node
    while above is not None and above.superseded:
        above.superseded = False
        tree.superseded_blocks -= above.num_blocks(tree.shape.block)
        above = above.parent


def forget_turn(tree: RadixTree, anchor: Anchor) -> None:
    """A turn is retained no more: what lies on no other turn's path becomes superseded."""
    node, block = anchor.node, tree.shape.block
    node.endpoints.remove(anchor)
    tree.forget_empty_root(node)
    while node.parent is not None and node.alive and not node.superseded:
        if any(not child.superseded for child in node.children.values()):
            return
        claimed = max((other.offset for other in node.endpoints), default=0)
        claimed = -(-max(claimed, node.anonymous) // block) * block
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
