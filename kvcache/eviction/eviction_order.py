"""The seam between the radix tree and a policy that says which run's tail goes next."""

from __future__ import annotations

from typing import Protocol

from kvcache.radix_node import RadixNode

__all__ = ["EvictionOrder"]


class EvictionOrder(Protocol):
    """Keeps the evictable leaf runs. Superseded runs always go first.

    The tree calls `offer` whenever a run may have become evictable or its place may have changed, and `pop` until it
    has enough pages. A popped run is offered again by the tree if blocks of it are left. An owner is a conversation
    id, or a name of its own for a request without one; a run's `owner` is the last conversation that used it, or the
    last request when no conversation did.
    """

    def offer(self, node: RadixNode) -> None:
        """Consider `node` from now on (again)."""
        ...

    def removed(self, node: RadixNode) -> None:
        """`node` left the tree, for whatever reason: nothing of it need be kept."""
        ...

    def pop(self) -> RadixNode | None:
        """The next run to shorten, or None when no offered run is a live leaf."""
        ...

    def oldest_use(self) -> int | None:
        """Last use (tick) of the least recently used run that could be given up, 0 when a superseded one is there, or
        None. For those who weigh life cycles against each other.
        """
        ...

    def request_began(self, owner: str) -> None:
        """A request of `owner` was opened."""
        ...

    def turn_ended(self, owner: str, stop_reason: str | None, output_tokens: int | None) -> None:
        """A turn of `owner` is over: it waits for its user or its tool from now on."""
        ...

    def request_closed(self, owner: str) -> None:
        """A request of `owner` was closed; its turn may go on in another one (a prefill, a loan, a preemption)."""
        ...

    def evicted(self, blocks: int) -> None:
        """So many blocks were given up for want of room (for measuring the turnover)."""
        ...
