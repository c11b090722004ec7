"""Stands in for the link to a peer whose host's name is being looked up: nothing can be sent or read on it yet."""

from __future__ import annotations

from collections.abc import Callable, Collection

from transceiver.errors import LinkClosedError
from transceiver.messages import RegionInfo
from transceiver.transport import ReadBatch, RemoteRegion

__all__ = ["UnresolvedLink"]


class UnresolvedLink:
    """Implements `Link`. `PeerTable` puts the real one in its place when the address is known."""

    transport = ""
    detail = ""
    peer_has_ended = False
    copies_itself = False
    maps_pools = False
    direct_read_bytes = 0

    def __init__(self, peer: str) -> None:
        self.peer = peer

    def _not_yet(self) -> LinkClosedError:
        return LinkClosedError(f"the address of {self.peer} is not known yet")

    def send(self, payload: bytes) -> None:
        raise self._not_yet()

    def open_region(self, info: RegionInfo, device: str = "cpu") -> RemoteRegion:
        raise self._not_yet()

    def get(self, batch: ReadBatch, remote: RemoteRegion, region: int | None, token: object) -> None:
        raise self._not_yet()

    def give_up(self, mine: Callable[[object], bool]) -> None:
        """Reads cannot be taken back here."""

    def read_now(self, batch: ReadBatch, remote: RemoteRegion) -> bool:
        return False

    def trust(self) -> None:
        """Nothing to do: nobody is at the other end."""

    def on_peer_process(self, identity: bytes, regions: Collection[RegionInfo]) -> bool:
        raise self._not_yet()

    def close(self) -> None:
        """Nothing to cut."""
