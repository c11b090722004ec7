"""One link and what is known of its other end: how far the handshake is, its pools, the pulls that use it.

Made and changed by `PeerTable` and `LinkHandshake`, in the loop; read by `Pull`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from transceiver.device_memory import HOST
from transceiver.errors import LinkClosedError
from transceiver.loop_context import Timer
from transceiver.messages import Challenge, Hello, Message, RegionInfo
from transceiver.page_part import PagePart, PoolShape
from transceiver.receiver import Pull
from transceiver.transport import Link, RemoteRegion
from transceiver.wire import encode

__all__ = ["LinkPhase", "Peer"]

_log = logging.getLogger(__name__)


class LinkPhase(StrEnum):
    NAMING = "naming"  # the host's name is being looked up
    CONNECTING = "connecting"  # Hello sent / nothing received yet
    PROVING = "proving"  # Proof sent / Challenge sent
    READY = "ready"
    CLOSED = "closed"


@dataclass(slots=True, eq=False)
class Peer:
    """One link and what is known of its other end."""

    link: Link
    outgoing: bool
    cut: Callable[[str], None]
    phase: LinkPhase = LinkPhase.CONNECTING
    address: str = ""  # what pulls call it
    target: str = ""  # where its link leads, when a name had to be looked up for that
    hello: Hello | None = None
    challenge: Challenge | None = None
    worker_id: str = ""
    timer: Timer | None = None
    pulls: dict[int, Pull] = field(default_factory=dict)
    parts: tuple[PagePart | None, ...] = ()
    pools: tuple[PoolShape, ...] = ()
    farewells: list[bytes] = field(default_factory=list)
    infos: dict[tuple[int, int], RegionInfo] = field(default_factory=dict)
    regions: dict[tuple[int, int], RemoteRegion] = field(default_factory=dict)

    def tell(self, message: Message) -> None:
        """Send a message; a link that is gone is told nothing, its loss resolves the rest."""
        self._send(encode(message))

    def _send(self, payload: bytes) -> None:
        try:
            self.link.send(payload)
        except LinkClosedError as error:
            _log.debug("a message to %s was not sent: %s", self.link.peer, error)

    def become_ready(self) -> None:
        """The handshake is over: larger messages may come, and what waited for the link is said."""
        self.phase = LinkPhase.READY
        self.link.trust()
        self.stop_timer()
        while self.farewells:
            self._send(self.farewells.pop(0))

    def stop_timer(self) -> None:
        """The handshake is not waited for any more."""
        if self.timer is not None:
            self.timer.cancel()

    def num_pages(self, group: int) -> int:
        """Pages in the peer's pool of `group`."""
        info = self.infos[0, group]
        return info.nbytes // info.page_bytes

    def page_bytes(self, group: int) -> int:
        """Bytes of a page of the peer's pool of `group`."""
        return self.infos[0, group].page_bytes

    def pool(self, group: int) -> RemoteRegion:
        """The peer's pages, readable."""
        return self._region(0, group)

    def generations(self, group: int) -> RemoteRegion:
        """The peer's generation numbers, readable."""
        return self._region(1, group)

    def _region(self, kind: int, group: int) -> RemoteRegion:
        region = self.regions.get((kind, group))
        if region is None:
            info = self.infos[kind, group]
            device = self.pools[group].device if kind == 0 and self.pools else HOST
            region = self.regions[kind, group] = self.link.open_region(info, device)
        return region
