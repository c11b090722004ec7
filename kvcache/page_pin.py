"""Pages that a peer may read: held until released, whatever becomes of the sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcache.block_pool import Pages
from kvcache.radix_node import Anchor, RadixNode
from kvcache.radix_tree import RadixTree

if TYPE_CHECKING:
    from kvcache.peer_pins import PeerPins

__all__ = ["PagePin"]


class PagePin:
    """Made by `SequenceCache.pin_for_peer`. Call `release` when the peer has acknowledged or its lease is over."""

    __slots__ = ("_lock", "_owner", "_pages", "num_pages")

    def __init__(self, owner: PeerPins, lock: Anchor | None, pages: tuple[Pages, ...], num_pages: int) -> None:
        self._owner: PeerPins | None = owner
        self._lock = lock
        self._pages = pages
        self.num_pages = num_pages

    @property
    def released(self) -> bool:
        """True once `release` was called."""
        return self._owner is None

    @property
    def pages(self) -> tuple[Pages, ...]:
        """Pages held one by one, a group each (tree blocks are protected by position instead)."""
        return self._pages

    def lock_at(self, tree: RadixTree, node: RadixNode, offset: int) -> None:
        """Protect the first `offset` tokens of `node`, and all above, until the release."""
        if self._lock is None:
            self._lock = tree.lock(node, offset)
        else:
            tree.move_lock(self._lock, node, offset)

    def release(self) -> None:
        """Stop holding the pages. Idempotent."""
        owner, self._owner = self._owner, None
        if owner is not None:
            owner.unpin(self, self._lock)
