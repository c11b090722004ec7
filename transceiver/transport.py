"""The seam between the protocol and a fabric: links, registered regions, one-sided reads, and events.

A transport is driven by one thread, the transceiver's loop: it calls `poll`, which blocks without spinning and delivers
events to the handler; only `wake` may be called from elsewhere. A read touches local memory only inside `poll`, so once
its completion was delivered nothing of it can write any more.
"""

from __future__ import annotations

from typing import Protocol

from kvcache.storage.page_storage import MemoryRegion

__all__ = ["Link", "RemoteRegion", "Transport", "TransportHandler"]


class RemoteRegion(Protocol):
    """A peer's registered memory, opened on one link."""

    @property
    def nbytes(self) -> int: ...


class Link(Protocol):
    """A connection to one peer. Equality is identity."""

    @property
    def peer(self) -> str:
        """For messages: the address, or where the peer came from."""
        ...

    @property
    def transport(self) -> str:
        """What moves the bytes, found out from the fabric: "ucx/cma", "ucx/tcp", "inproc"."""
        ...

    def send(self, payload: bytes) -> None:
        """Queue one message; order is kept. Raises LinkClosedError."""
        ...

    def open_region(self, address: int, nbytes: int, key: bytes) -> RemoteRegion:
        """Make a peer's region readable. Raises TransceiverError for a key that does not fit."""
        ...

    def get(
        self, local: int, nbytes: int, remote: RemoteRegion, offset: int, region: int | None, token: object
    ) -> None:
        """Start reading `nbytes` at `offset` of `remote` into local address `local`.

        `region` is the local registration that holds the destination (None: unregistered scratch memory, which the
        caller keeps alive). `on_get_done(link, token, error)` follows exactly once, also when the link is lost.
        Raises LinkClosedError or TransceiverError when nothing was started.
        """
        ...

    def close(self) -> None:
        """Cut the link. Reads under way complete with an error; `on_lost` is not called. Idempotent."""
        ...


class TransportHandler(Protocol):
    """What the transceiver wants to hear. Called from `poll` only."""

    def on_accept(self, link: Link) -> None: ...

    def on_message(self, link: Link, payload: bytes) -> None: ...

    def on_get_done(self, link: Link, token: object, error: str | None) -> None: ...

    def on_lost(self, link: Link, reason: str) -> None: ...


class Transport(Protocol):
    """A fabric, as one worker uses it."""

    @property
    def address(self) -> str:
        """Where peers connect (after `open`)."""
        ...

    def open(self, handler: TransportHandler) -> None:
        """Start listening. Raises TransportUnavailableError. Called once, from the loop's thread."""
        ...

    def register(self, region: MemoryRegion) -> tuple[int, bytes]:
        """Make local memory readable for peers and usable as a destination; returns (registration, key)."""
        ...

    def connect(self, address: str) -> Link:
        """Start connecting; failures come through `on_lost`. Raises TransceiverError for a malformed address."""
        ...

    def poll(self, timeout_s: float) -> None:
        """Deliver what is there; wait up to `timeout_s` (0: not at all) when nothing is."""
        ...

    def wake(self) -> None:
        """Make a waiting `poll` return. Any thread; never blocks."""
        ...

    def close(self) -> None:
        """Cut all links, unregister, stop listening. Called from the loop's thread. Idempotent."""
        ...
