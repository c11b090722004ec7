"""The seam between the radix tree and a policy that says which run's tail goes next."""

from __future__ import annotations

from typing import Protocol

from kvcache.radix_node import RadixNode

__all__ = ["EvictionOrder"]


class EvictionOrder(Protocol):
    """Keeps the evictable leaf runs. Superseded runs always go first.

    The tree calls `offer` whenever a run may have become evictable or its place may have changed, and `pop` until it
    has enough pages. A popped run is offered again by the tree if blocks of it are left.
    """

    def offer(self, node: RadixNode) -> None:
        """Consider `node` from now on (again)."""
        ...

    def pop(self) -> RadixNode | None:
        """The next run to shorten, or None when no offered run is a live leaf."""
        ...
