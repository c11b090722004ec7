"""The pages that peers hold, and the bound on them. Owned by the manager."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvcache.errors import PinLimitError
from kvcache.page_pin import PagePin
from kvcache.poison_guard import PoisonGuard
from kvcache.radix_node import Anchor
from kvcache.radix_tree import RadixTree
from kvcache.sequence_pages import held_pages

if TYPE_CHECKING:
    from kvcache.sequence_cache import SequenceCache

__all__ = ["PeerPins"]


class PeerPins:
    """At most `most` pins at a time; each is released by whoever got it."""

    def __init__(self, tree: RadixTree, guard: PoisonGuard, most: int) -> None:
        self._tree = tree
        self._guard = guard
        self._most = most
        self._pins: set[PagePin] = set()

    def __len__(self) -> int:
        return len(self._pins)

    def __contains__(self, pin: object) -> bool:
        return pin in self._pins

    def __iter__(self) -> Iterator[PagePin]:
        return iter(self._pins)

    def pin(self, sequence: SequenceCache) -> PagePin:
        """Hold a sequence's pages for a peer. Raises PinLimitError."""
        if len(self._pins) >= self._most:
            raise PinLimitError(f"peers hold {len(self._pins)} pins: wait, or raise kv_cache_config.max_peer_pins")
        held, pools = held_pages(sequence), self._tree.pools
        pages = tuple(held[group].copy() for group in range(len(pools)))
        for pool, group_pages in zip(pools, pages, strict=True):
            pool.hold(group_pages)
        lock = None
        if sequence.lock is not None:
            lock = self._tree.lock(sequence.lock.node, sequence.lock.offset)
        pin = PagePin(self, lock, pages, sequence.blocks)
        self._pins.add(pin)
        return pin

    def unpin(self, pin: PagePin, lock: Anchor | None) -> None:
        """A pin was released."""
        with self._guard:
            self._pins.discard(pin)
            for pool, pages in zip(self._tree.pools, pin.pages, strict=True):
                pool.release(pages)
            if lock is not None:
                self._tree.unlock(lock)
