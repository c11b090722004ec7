"""The seam between the protocol and a fabric: links, registered regions, one-sided reads, and events.

A transport is driven by one thread, the transceiver's loop: it calls `poll`, which blocks without spinning and delivers
events to the handler; only `wake` may be called from elsewhere. A read touches local memory from `get` until its
completion was delivered, not after: a transport may copy in threads of its own, but says done when they have ended.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvcache.storage.page_storage import MemoryRegion
from transceiver.messages import RegionInfo

__all__ = ["LandingRead", "Link", "ReadBatch", "RemoteRegion", "Transport", "TransportHandler"]


@dataclass(frozen=True, slots=True, eq=False)
class ReadBatch:
    """Parallel columns, one element a read: local address, offset in the remote region, bytes."""

    local: NDArray[np.uint64]
    offset: NDArray[np.uint64]
    nbytes: NDArray[np.uint64]

    @staticmethod
    def single(local: int, offset: int, nbytes: int) -> ReadBatch:
        """A batch of one read."""
        return ReadBatch(*(np.asarray([value], np.uint64) for value in (local, offset, nbytes)))

    def __len__(self) -> int:
        return len(self.local)


class LandingRead:
    """A `token` that has work to do on the bytes of its read, best right after the copy and in the same thread.

    A transport that copies by itself (`Link.copies_itself`) calls `landed` for the elements of the batch, each once,
    before it delivers the completion; what it raises becomes the read's error. Others do not call it: the receiver then
    does the work itself.
    """

    @property
    def wants_landing(self) -> bool:
        """There is work to do."""
        raise NotImplementedError

    @property
    def by_element(self) -> bool:
        """Elements may be worked on apart, in any order and several at once; else `landed` wants the whole batch."""
        raise NotImplementedError

    def landed(self, start: int, stop: int) -> None:
        """Work on elements `start` to `stop` of the batch; blocks."""
        raise NotImplementedError


class RemoteRegion(Protocol):
    """A peer's registered memory, opened on one link."""

    @property
    def nbytes(self) -> int: ...

    @property
    def view(self) -> NDArray[np.uint8] | None:
        """The region's bytes, read-only, where the link has mapped it into this process."""
        ...


class Link(Protocol):
    """A connection to one peer. Equality is identity."""

    @property
    def peer(self) -> str:
        """For messages: the address, or where the peer came from."""
        ...

    @property
    def transport(self) -> str:
        """What moves the bytes, found out from the fabric: "ucx/shm", "ucx/cma", "ucx/tcp", "inproc"."""
        ...

    @property
    def detail(self) -> str:
        """How, in a few words for a person: the call that copies, and why a faster one does not."""
        ...

    @property
    def copies_itself(self) -> bool:
        """Host memory is copied by threads of the transport, which do the work of a `LandingRead`."""
        ...

    @property
    def maps_pools(self) -> bool:
        """The peer's pools are mapped into this process: `RemoteRegion.view` has them."""
        ...

    @property
    def direct_read_bytes(self) -> int:
        """Pieces of at least this size are best read straight to their place; smaller ones through a buffer."""
        ...

    def send(self, payload: bytes) -> None:
        """Queue one message; order is kept. Raises LinkClosedError."""
        ...

    def open_region(self, info: RegionInfo, device: str = "cpu") -> RemoteRegion:
        """Make a peer's region, on `device` there, readable. Raises TransceiverError for a key that does not fit."""
        ...

    def get(self, batch: ReadBatch, remote: RemoteRegion, region: int | None, token: object) -> None:
        """Start a batch of reads from `remote` into local memory.

        `region` is the local registration that holds the destinations (None: unregistered scratch memory, which the
        caller keeps alive). `on_get_done(link, token, error)` follows exactly once for the batch, when none of its
        reads is under way any more, also when the link is lost. Raises LinkClosedError or TransceiverError when
        nothing was started.
        """
        ...

    def give_up(self, mine: Callable[[object], bool]) -> None:
        """Nobody wants the reads any more whose token is `mine`: those that can be taken back complete with an error.

        Their `on_get_done` follows at the next poll; the others' when they end by themselves.
        """
        ...

    def read_now(self, batch: ReadBatch, remote: RemoteRegion) -> bool:
        """Read a few bytes into host memory before this returns. False, nothing read, where only `get` can do it."""
        ...

    def trust(self) -> None:
        """The peer has proved the secret: larger messages than those of the handshake may come."""
        ...

    @property
    def peer_has_ended(self) -> bool:
        """True when it is known that the peer's process is gone, so that connecting again is of no use."""
        ...

    def on_peer_process(self, identity: bytes, regions: Collection[RegionInfo]) -> bool:
        """The handshake brought the peer's `Transport.identity` and all of its regions.

        False: this link cannot read there, connect anew (the transport will then choose another way). Raises
        LinkClosedError when the peer's memory cannot be read at all.
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

    @property
    def identity(self) -> bytes:
        """What a proven peer may know about this process for faster reads (may be empty)."""
        ...

    def open(self, handler: TransportHandler) -> None:
        """Start listening. Raises TransportUnavailableError. Called once, from the loop's thread."""
        ...

    def register(self, region: MemoryRegion) -> tuple[int, bytes]:
        """Make local memory readable for peers and usable as a destination; returns (registration, key)."""
        ...

    def connect(self, address: str) -> Link:
        """Start connecting; failures come through `on_lost`. Raises TransceiverError for a malformed address.

        Where addresses have hosts, theirs is numeric here: names are looked up before, outside the loop.
        """
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
