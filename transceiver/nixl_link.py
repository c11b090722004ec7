"""One peer of the NIXL transport: a TCP connection for messages, a NIXL agent for reads."""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from transceiver.control_socket import ControlSocket
from transceiver.errors import LinkClosedError, TransceiverError
from transceiver.messages import RegionInfo
from transceiver.transport import ReadBatch, RemoteRegion

if TYPE_CHECKING:
    from transceiver.nixl_transport import NixlTransport

__all__ = ["NixlLink", "NixlRead", "NixlRemoteRegion", "pack_region_key", "unpack_region_key"]

_KEY_HEAD = struct.Struct("<BI")  # 0 host memory, 1 device memory; device number; the agent's metadata follows
_KINDS = ("DRAM", "VRAM")


def pack_region_key(memory: str, device: int, metadata: bytes) -> bytes:
    """What a peer needs to read a region: the kind of memory and the metadata of the agent that registered it."""
    return _KEY_HEAD.pack(_KINDS.index(memory), device) + metadata


def unpack_region_key(key: bytes) -> tuple[str, int, bytes]:
    """Inverse of `pack_region_key`. Raises TransceiverError for bytes that are not a key."""
    if len(key) <= _KEY_HEAD.size or key[0] >= len(_KINDS):
        raise TransceiverError("this memory key is not for the nixl transport")
    kind, device = _KEY_HEAD.unpack_from(key)
    return _KINDS[kind], device, key[_KEY_HEAD.size :]


@dataclass(frozen=True, slots=True)
class NixlRemoteRegion:
    """A peer's registered memory; `agent` is its name as NIXL knows it."""

    view: ClassVar[None] = None
    address: int
    nbytes: int
    memory: str
    device: int
    agent: str


@dataclass(slots=True, eq=False)
class NixlRead:
    """A batch under way. `scratch` is the registration made for it alone, if there is one.

    `held`: it has failed, but NIXL does not let its handle go.
    """

    link: NixlLink
    token: object
    handle: Any
    state: str
    scratch: Any = None
    error: str | None = None
    held: bool = False


@dataclass(slots=True, eq=False)
class NixlLink:
    """Implements `Link`."""

    owner: NixlTransport
    control: ControlSocket
    peer: str
    transport: str = "nixl"
    detail: str = "NIXL reads; which of its transports it takes, NIXL does not say"
    direct_read_bytes: int = 64 << 10
    peer_has_ended: bool = False
    copies_itself: bool = False
    maps_pools: bool = False
    open: bool = True
    agents: set[str] = field(default_factory=set)  # names this link has loaded

    def send(self, payload: bytes) -> None:
        if not self.open:
            raise LinkClosedError(f"the link to {self.peer} is closed")
        try:
            self.control.send(payload)
        except LinkClosedError as error:
            self.owner.fail(self)
            raise LinkClosedError(f"cannot send to {self.peer}: {error}") from error
        self.owner.sent(self)

    def open_region(self, info: RegionInfo, device: str = "cpu") -> RemoteRegion:
        if not self.open:
            raise LinkClosedError(f"the link to {self.peer} is closed")
        memory, number, metadata = unpack_region_key(info.key)
        agent = self.owner.fabric.load(self, metadata)
        return NixlRemoteRegion(info.address, info.nbytes, memory, number, agent)

    def get(self, batch: ReadBatch, remote: RemoteRegion, region: int | None, token: object) -> None:
        if not self.open:
            raise LinkClosedError(f"the link to {self.peer} is closed")
        assert isinstance(remote, NixlRemoteRegion)
        self.owner.start_get(self, batch, remote, region, token)

    def give_up(self, mine: Callable[[object], bool]) -> None:
        """Reads cannot be taken back here."""

    def read_now(self, batch: ReadBatch, remote: RemoteRegion) -> bool:
        return False

    def trust(self) -> None:
        self.control.trust()

    def on_peer_process(self, identity: bytes, regions: Collection[RegionInfo]) -> bool:
        return True

    def close(self) -> None:
        if self.open:
            self.owner.drop(self, None)
