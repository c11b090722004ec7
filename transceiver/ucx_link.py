"""One UCX endpoint and what is under way on it: messages out, batches of reads in. Used by `transceiver.ucx` only."""

from __future__ import annotations

import contextlib
import errno
import logging
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from transceiver.cma import CmaReader, has_ended, same_host_pid
from transceiver.copy_plan import HostReader
from transceiver.device_memory import HOST, host_may_copy
from transceiver.errors import LinkClosedError, TransceiverError
from transceiver.host_copies import HostCopy
from transceiver.messages import RegionInfo
from transceiver.peer_memory import PeerMemory
from transceiver.transport import ReadBatch, RemoteRegion
from transceiver.ucp_binding import UcpError
from transceiver.ucx_remote_reads import READ_AM_ID, Answers, RemoteReads

if TYPE_CHECKING:
    from transceiver.ucx import UcxTransport
    from transceiver.ucx_fabric import UcxFabric

__all__ = ["AM_ID", "PendingRead", "UcxLink", "UcxRemoteRegion"]

_log = logging.getLogger(__name__)
AM_ID = 23
_MAX_SENDS = 1024  # messages a link may have waiting before it is given up


@dataclass(frozen=True, slots=True)
class UcxRemoteRegion:
    """A peer's region. `key` is as it came; UCX sees it only when it has to read."""

    address: int
    nbytes: int
    key: bytes
    device: str = HOST
    mapped: PeerMemory | None = None

    @property
    def view(self) -> NDArray[np.uint8] | None:
        return self.mapped.view if self.mapped is not None else None

    @property
    def base(self) -> int:
        """Where a reader of this host finds the first byte: in the mapping, or in the peer's own memory."""
        return self.mapped.address if self.mapped is not None else self.address

    def holds(self, batch: ReadBatch) -> bool:
        """No read of `batch` leaves the region."""
        size = np.uint64(self.nbytes)
        return bool(((batch.nbytes <= size) & (batch.offset <= size - np.minimum(batch.nbytes, size))).all())


@dataclass(slots=True, eq=False)
class PendingRead:
    """A batch under way as UCX requests, or in `UcxTransport.copies`."""

    token: object
    link: UcxLink
    requests: list[int] = field(default_factory=list)
    error: str | None = None
    number: int = 0  # in `UcxLink.remote_reads`, when the peer sends the bytes


class UcxLink:
    """One UCX endpoint with what is under way on it."""

    def __init__(self, owner: UcxTransport, fabric: UcxFabric, endpoint: Any, peer: str) -> None:
        self.owner = owner
        self.fabric = fabric
        self.peer = peer
        self.endpoint = endpoint
        self.handle: int = endpoint.handle
        self.open = True
        self.keys: dict[bytes, int] = {}  # a peer's key -> UCX's form of it
        self.reads: deque[PendingRead] = deque()  # UCX requests
        self.given_up: deque[PendingRead] = deque()  # to be reported
        self.copies: set[PendingRead] = set()  # copies by threads of this process
        self.cma: CmaReader | None = None
        self.maps_pools = False  # the peer's pools are mapped here
        self.sends: deque[tuple[int, bytes]] = deque()
        self.remote_reads = RemoteReads()
        self.answers = Answers()
        self.trusted = False
        self._transport = ""
        self._lane = ""  # known from the first read on
        self._identity = b""
        self._mapped: dict[RegionInfo, PeerMemory] = {}
        self._unmapped = ""  # why the peer's pools could not be mapped

    @property
    def transport(self) -> str:
        if not self._transport and self.open:
            self._transport = f"ucx/{self._best_lane()}"
        return self._transport

    def _best_lane(self) -> str:
        lanes = {name.partition("/")[0] for name in self.fabric.ucp.transports(self.handle)}
        # Reads go over cma whenever the endpoint has such a lane (RNDV_THRESH=inf); else over what remains.
        best = next((lane for lane in ("rc_mlx5", "rc_verbs", "cma", "tcp") if lane in lanes), None)
        return best or "+".join(sorted(lanes)) or "unknown"

    @property
    def detail(self) -> str:
        if self.maps_pools:
            return "copies from the mapped pool"
        call = "process_vm_readv" if self.cma is not None else "messages" if self._lane == "tcp" else "ucp_get"
        reasons = [("its pools cannot be mapped", self._unmapped)]
        if self.cma is None:
            reasons.append(("the kernel refuses cma", self.owner.no_cma.get(self.peer, "")))
        return "; ".join([call, *(f"{what}: {why}" for what, why in reasons if why)])

    @property
    def copies_itself(self) -> bool:
        return self.maps_pools or self.cma is not None

    @property
    def direct_read_bytes(self) -> int:
        return 4 << 10 if self.copies_itself and not self.maps_pools else 64 << 10

    def send(self, payload: bytes) -> None:
        self._send(AM_ID, payload)

    def _send(self, am_id: int, payload: bytes) -> None:
        if not self.open:
            raise LinkClosedError(f"the link to {self.peer} is closed")
        try:
            request = self.fabric.ucp.send(self.handle, am_id, payload)
        except UcpError as error:
            raise LinkClosedError(f"cannot send to {self.peer}: {error}") from error
        if request:
            self.sends.append((request, payload))
            if len(self.sends) > _MAX_SENDS:
                self.owner.fail(self)
                raise LinkClosedError(f"{self.peer} does not take messages: {_MAX_SENDS} are waiting")

    def open_region(self, info: RegionInfo, device: str = HOST) -> RemoteRegion:
        if not self.open:
            raise LinkClosedError(f"the link to {self.peer} is closed")
        return UcxRemoteRegion(info.address, info.nbytes, info.key, device, self._mapped.get(info))

    def _handle(self, key: bytes) -> int:
        """UCX's own form of a peer's key. Raises TransceiverError for one that UCX cannot use."""
        if key not in self.keys:
            try:
                self.keys[key] = self.fabric.unpack_key(self.handle, key)
            except UcpError as error:
                raise TransceiverError(f"the memory key of {self.peer} cannot be used: {error}") from error
        return self.keys[key]

    def _reader(self, remote: UcxRemoteRegion, device: str) -> HostReader | None:
        """What copies from `remote` to memory on `device` in this process; None: UCX has to."""
        if not host_may_copy(remote.device, device):
            return None
        return remote.mapped or self.cma

    def get(self, batch: ReadBatch, remote: RemoteRegion, region: int | None, token: object) -> None:
        if not self.open:
            raise LinkClosedError(f"the link to {self.peer} is closed")
        assert isinstance(remote, UcxRemoteRegion)
        read = PendingRead(token, self)
        reader = self._reader(remote, self.owner.device_of(region))
        if reader is not None:
            if not remote.holds(batch):
                raise TransceiverError(f"a read from {self.peer} would leave its region of {remote.nbytes} bytes")
            copy = HostCopy(reader, batch, remote.base, token, read)
            self.copies.add(read)
            self.owner.copies.add(copy)
            return
        if host_may_copy(remote.device, self.owner.device_of(region)) and self._reads_by_message():
            self._ask(read, batch, remote)
        else:
            self._issue(read, batch, remote, region)
        self.reads.append(read)

    def _reads_by_message(self) -> bool:
        """The lane has no remote memory access of its own (see `ucx_remote_reads`)."""
        if not self._lane:
            self._lane = self._best_lane()
        return self._lane == "tcp"

    def _ask(self, read: PendingRead, batch: ReadBatch, remote: UcxRemoteRegion) -> None:
        """Have the peer send a batch. Raises LinkClosedError when nothing was started."""
        read.number, message = self.remote_reads.ask(
            batch.local, batch.offset + np.uint64(remote.address), batch.nbytes
        )
        try:
            self._send(READ_AM_ID, message)
        except LinkClosedError:
            self.remote_reads.forget(read.number)
            raise

    def give_up(self, mine: Callable[[object], bool]) -> None:
        """Reads by message: what still comes for them is dropped, and the peer is told to send no more of it."""
        for read in [read for read in self.reads if read.number and mine(read.token)]:
            self.reads.remove(read)
            self.remote_reads.forget(read.number)
            read.error = "given up"
            self.given_up.append(read)
            with contextlib.suppress(LinkClosedError):
                self._send(READ_AM_ID, self.remote_reads.take_back(read.number))

    def read_now(self, batch: ReadBatch, remote: RemoteRegion) -> bool:
        assert isinstance(remote, UcxRemoteRegion)
        reader = self._reader(remote, HOST)
        if not self.open or reader is None or not remote.holds(batch):
            return False
        try:
            plan = reader.plan(batch.local, batch.offset + np.uint64(remote.base), batch.nbytes, 0, cut=False)
            for piece in range(plan.pieces):
                reader.copy(plan, piece)
        except OSError:  # `get` will say what is wrong
            return False
        return True

    def _issue(self, read: PendingRead, batch: ReadBatch, remote: UcxRemoteRegion, region: int | None) -> None:
        """Hand a batch to UCX. Raises TransceiverError when nothing was started."""
        ucp, param, key = self.fabric.ucp, self.fabric.get_param(region), self._handle(remote.key)
        try:
            for local, offset, nbytes in zip(
                batch.local.tolist(), batch.offset.tolist(), batch.nbytes.tolist(), strict=True
            ):
                request = ucp.get(self.handle, local, nbytes, remote.address + offset, key, param)
                if request:
                    read.requests.append(request)
        except UcpError as error:
            read.error = str(error)
            if not read.requests:
                raise TransceiverError(f"cannot read from {self.peer}: {error}") from error

    def trust(self) -> None:
        """From now on the peer may have registered memory sent to it; `PeerTable` looks at the size of messages."""
        self.trusted = True

    @property
    def peer_has_ended(self) -> bool:
        return has_ended(self._identity)

    def on_peer_process(self, identity: bytes, regions: Collection[RegionInfo]) -> bool:
        """On the same host: copy from the peer's memory in this process, from a mapping or by one kernel call a batch.

        Returns False when the kernel lets us do neither (containers, other users) although UCX has a cma lane: that
        lane would fail too, so connect anew.
        """
        self._identity = identity
        try:
            pid = same_host_pid(identity)
        except OSError as error:
            raise LinkClosedError(f"{self.peer} cannot be looked at: {error}") from error
        if pid is None or not self.owner.identity:  # another host, or the configuration allows no cma
            return True
        self.maps_pools = self.owner.maps_memory and self._map_all(regions)
        lane = self._best_lane() == "cma"
        reader, scratch = CmaReader(pid), np.zeros(1, np.uint64)
        probe = next(info.address for info in regions if info.kind == 1)  # generation numbers: always in host memory
        try:
            one = np.asarray([8], np.uint64)
            reader.read(np.asarray([scratch.ctypes.data], np.uint64), np.asarray([probe], np.uint64), one)
            self.cma = reader if lane else None
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.EACCES, errno.ENOSYS):
                raise LinkClosedError(f"{self.peer} cannot be read: {error}") from error
            if not self.maps_pools:
                _log.warning("the kernel refuses cma to %s (%s): its blocks will come over TCP", self.peer, error)
                self.owner.no_cma[self.peer] = error.strerror or str(error)
                return not lane  # without a cma lane this link is good as it is: UCX knew
        if self.maps_pools:
            self._transport = "ucx/shm"
        return True

    def _map_all(self, regions: Collection[RegionInfo]) -> bool:
        """Map the peer's regions, all or none."""
        if not all(info.file for info in regions):
            return False  # private pools, or such on a device
        try:
            for info in regions:
                self._mapped[info] = PeerMemory(self._identity, info.file - 1, info.inode, info.nbytes)
        except OSError as error:
            self._mapped.clear()
            self._unmapped = error.strerror or str(error)
            _log.warning("the shared memory of %s cannot be mapped (%s): its blocks come another way", self.peer, error)
            return False
        return True

    def unmap(self) -> None:
        """Forget the mappings: they stay until the reads under way have ended."""
        self._mapped.clear()

    def close(self) -> None:
        if self.open:
            self.owner.drop(self, None)
