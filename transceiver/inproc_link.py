"""One end of a link between two transports of this process. Used by `transceiver.inproc` only."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from transceiver.errors import LinkClosedError, TransceiverError
from transceiver.messages import RegionInfo
from transceiver.transport import ReadBatch, RemoteRegion

if TYPE_CHECKING:
    from transceiver.inproc import InprocTransport

__all__ = ["InprocLink"]


@dataclass(frozen=True, slots=True)
class _Region:
    view: ClassVar[None] = None
    address: int
    nbytes: int


class InprocLink:
    """Implements `Link`; what happens on it is done by its owner."""

    transport = "inproc"
    detail = "memory copy in one process"
    peer_has_ended = False
    direct_read_bytes = 64 << 10
    copies_itself = False
    maps_pools = False

    def __init__(self, owner: InprocTransport, peer: str) -> None:
        self.owner = owner
        self.peer = peer
        self.other: InprocLink | None = None
        self.open = True
        self.unfinished: set[int] = set()
        self.held: list[bytes] = []

    def send(self, payload: bytes) -> None:
        other = self.other
        if not self.open or other is None:
            raise LinkClosedError(f"the link to {self.peer} is closed")
        self.owner.send(self, other, payload)

    def open_region(self, info: RegionInfo, device: str = "cpu") -> RemoteRegion:
        if info.key != b"inproc":
            raise TransceiverError("this key is not for the inproc transport")
        return _Region(info.address, info.nbytes)

    def get(self, batch: ReadBatch, remote: RemoteRegion, region: int | None, token: object) -> None:
        if not self.open:
            raise LinkClosedError(f"the link to {self.peer} is closed")
        assert isinstance(remote, _Region)
        self.owner.start_get(self, batch, remote.address, token)

    def give_up(self, mine: Callable[[object], bool]) -> None:
        """Reads cannot be taken back here."""

    def read_now(self, batch: ReadBatch, remote: RemoteRegion) -> bool:
        return False

    def trust(self) -> None:
        """Nothing to do: messages are handed over, not read from a stream."""

    def on_peer_process(self, identity: bytes, regions: Collection[RegionInfo]) -> bool:
        """Nothing to learn: the peer is in this process."""
        return True

    def close(self) -> None:
        if self.open:
            self.open = False
            self.owner.fail_reads(self, "the link was closed")
            if self.other is not None:
                self.other.owner.post(self.other.lost_event("the peer closed the link"))

    def lost_event(self, reason: str) -> Callable[[], None]:
        """What to run in the owner's loop when the other side is gone."""

        def lost() -> None:
            if self.open:
                self.open = False
                self.owner.fail_reads(self, reason)
                self.owner.handler.on_lost(self, reason)

        return lost
