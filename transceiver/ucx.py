"""Transport over UCX: ucxx for context, worker, listener and endpoints; `ucp_binding` for messages, keys and reads.

Everything here runs in the transceiver's loop thread. Endpoint error handling is always on: with it off, reading from a
dead peer aborts the process. The loop sleeps in epoll on UCX's event descriptor and an eventfd; it never spins.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import select
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvcache.storage.page_storage import MemoryRegion
from transceiver.cma import CmaReader, process_identity, same_host_pid
from transceiver.config import CacheTransceiverConfig
from transceiver.errors import LinkClosedError, TransceiverError, TransportUnavailableError
from transceiver.transport import ReadBatch, RemoteRegion, TransportHandler
from transceiver.ucp_binding import UCS_INPROGRESS, UCS_OK, UcpBinding, UcpError
from transceiver.wire import MAX_MESSAGE_BYTES

__all__ = ["UcxLink", "UcxTransport", "parse_address"]

_log = logging.getLogger(__name__)
_AM_ID = 23
_MAX_SENDS = 1024  # messages a link may have waiting before it is given up
_SMALL_READ = 64 << 10  # one read of this size goes through UCX: it also proves that the peer still answers
_MAX_PROGRESS = 64  # rounds before events are delivered, so that a busy fabric cannot starve the protocol
_FLUSH_S = 0.2  # on close: how long the last messages may take to leave
_BASE_OPTIONS = {
    # With rendezvous on, an error-handling endpoint may not use cma; without it, reads go over cma at full speed.
    "RNDV_THRESH": "inf",
    # A read over plain TCP is emulated by the peer, whose answer needs the id of our endpoint.
    "RESOLVE_REMOTE_EP_ID": "y",
    "KEEPALIVE_INTERVAL": "1s",
    "TCP_TX_SEG_SIZE": "256K",
    "TCP_RX_SEG_SIZE": "1M",
}


def parse_address(address: str) -> tuple[str, int]:
    """(host, port) of ``ucx://host:port`` (IPv6 in brackets). Raises TransceiverError."""
    scheme, _, rest = address.partition("://")
    host, _, port = rest.rpartition(":")
    if scheme != "ucx" or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise TransceiverError(f"{address!r} is not an address of the form ucx://host:port")
    return host.strip("[]"), int(port)


@dataclass(frozen=True, slots=True)
class _RemoteRegion:
    address: int
    nbytes: int
    key: int


@dataclass(slots=True, eq=False)
class _Read:
    """A batch under way; `requests` None: it waits for its one kernel call."""

    token: object
    batch: ReadBatch
    remote: _RemoteRegion
    region: int | None
    requests: list[int] | None = None
    error: str | None = None


class UcxLink:
    """One UCX endpoint with what is under way on it."""

    def __init__(self, owner: UcxTransport, endpoint: Any, peer: str) -> None:
        self.owner = owner
        self.peer = peer
        self.endpoint = endpoint
        self.handle: int = endpoint.handle
        self.open = True
        self.keys: list[int] = []
        self.reads: deque[_Read] = deque()
        self.cma: CmaReader | None = None
        self.sends: deque[tuple[int, bytes]] = deque()
        self._transport = ""

    @property
    def transport(self) -> str:
        if not self._transport and self.open:
            lanes = {name.partition("/")[0] for name in self.owner.ucp.transports(self.handle)}
            # Reads go over cma whenever the endpoint has such a lane (RNDV_THRESH=inf); else over what remains.
            best = next((lane for lane in ("rc_mlx5", "rc_verbs", "cma", "tcp") if lane in lanes), None)
            self._transport = f"ucx/{best or '+'.join(sorted(lanes)) or 'unknown'}"
        return self._transport

    def send(self, payload: bytes) -> None:
        if not self.open:
            raise LinkClosedError(f"the link to {self.peer} is closed")
        try:
            request = self.owner.ucp.send(self.handle, _AM_ID, payload)
        except UcpError as error:
            raise LinkClosedError(f"cannot send to {self.peer}: {error}") from error
        if request:
            self.sends.append((request, payload))
            if len(self.sends) > _MAX_SENDS:
                self.owner.fail(self)
                raise LinkClosedError(f"{self.peer} does not take messages: {_MAX_SENDS} are waiting")

    def open_region(self, address: int, nbytes: int, key: bytes) -> RemoteRegion:
        if not self.open:
            raise LinkClosedError(f"the link to {self.peer} is closed")
        try:
            handle = self.owner.ucp.unpack_key(self.handle, key)
        except UcpError as error:
            raise TransceiverError(f"the memory key of {self.peer} cannot be used: {error}") from error
        self.keys.append(handle)
        return _RemoteRegion(address, nbytes, handle)

    def get(self, batch: ReadBatch, remote: RemoteRegion, region: int | None, token: object) -> None:
        if not self.open:
            raise LinkClosedError(f"the link to {self.peer} is closed")
        assert isinstance(remote, _RemoteRegion)
        read = _Read(token, batch, remote, region)
        if self.cma is None or (len(batch) == 1 and int(batch.nbytes[0]) <= _SMALL_READ):
            self.issue(read)
        self.reads.append(read)

    def issue(self, read: _Read) -> None:
        """Hand a batch to UCX. Raises TransceiverError when nothing was started."""
        ucp, param, key, base = self.owner.ucp, self.owner.get_param(read.region), read.remote.key, read.remote.address
        batch = read.batch
        requests: list[int] = []
        read.requests = requests
        try:
            for local, offset, nbytes in zip(
                batch.local.tolist(), batch.offset.tolist(), batch.nbytes.tolist(), strict=True
            ):
                request = ucp.get(self.handle, local, nbytes, base + offset, key, param)
                if request:
                    requests.append(request)
        except UcpError as error:
            read.error = str(error)
            if not requests:
                raise TransceiverError(f"cannot read from {self.peer}: {error}") from error

    def on_peer_process(self, identity: bytes) -> None:
        """On the same host, with a cma lane: read batches with one kernel call (after a probe)."""
        pid = same_host_pid(identity) if self.transport == "ucx/cma" else None
        self.cma = CmaReader(pid) if pid is not None else None

    def close(self) -> None:
        if self.open:
            self.owner.drop(self, None)


class UcxTransport:
    """Implements `Transport` over one UCX context and worker."""

    def __init__(self, host: str, config: CacheTransceiverConfig) -> None:
        self._host = host
        self._config = config
        self._links: dict[int, UcxLink] = {}
        self._inbox: deque[tuple[int, bytes]] = deque()
        self._accepted: deque[UcxLink] = deque()
        self._lost: deque[UcxLink] = deque()
        self._memory: list[int] = []
        self._params: dict[int, ctypes.Structure] = {}
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._wake_lock = threading.Lock()
        self._epoll: select.epoll | None = None
        self._listener: Any = None
        self.handler: TransportHandler
        self.ucp: UcpBinding

    @property
    def address(self) -> str:
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"ucx://{host}:{self._listener.port}"

    @property
    def identity(self) -> bytes:
        return process_identity() if "cma" in self._config.ucx_tls or self._config.ucx_tls == "all" else b""

    def open(self, handler: TransportHandler) -> None:
        self.handler = handler
        # Read once, when the libraries are loaded: ucxx sets variables that UCX does not know, and prints every lost
        # peer to stdout. A loss is an outcome here and is logged by us.
        os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
        os.environ.setdefault("UCXX_LOG_LEVEL", "FATAL")
        try:
            import ucxx._lib.libucxx as api
        except (ImportError, OSError) as error:
            raise TransportUnavailableError(f"backend ucx needs the package ucxx-cu12: {error}") from error
        options = {"TLS": self._config.ucx_tls, **_BASE_OPTIONS, **self._config.ucx_options}
        feature = api.Feature
        try:
            self._api = api
            self._context = api.UCXContext(options, (feature.AM, feature.RMA, feature.WAKEUP))
            self._worker = api.UCXWorker(self._context, False, False)
            self._worker.init_blocking_progress_mode()
            self.ucp = UcpBinding()
            self._handle: int = self._worker.handle
            self._keep = self.ucp.on_message(self._handle, _AM_ID, self._on_am)
            self._listener = api.UCXListener.create(self._worker, 0, self._on_connect)
        except (RuntimeError, OSError, ValueError) as error:
            raise TransportUnavailableError(
                f"UCX cannot start with TLS={options['TLS']}: {error}; check cache_transceiver_config.ucx_tls"
            ) from error
        self._epoll = select.epoll()
        self._epoll.register(self._worker.epoll_file_descriptor, select.EPOLLIN)
        self._epoll.register(self._wake_fd, select.EPOLLIN)

    def register(self, region: MemoryRegion) -> tuple[int, bytes]:
        handle = self.ucp.map_memory(self._context.handle, region.address, region.nbytes)
        self._memory.append(handle)
        return handle, self.ucp.pack_key(self._context.handle, handle)

    def get_param(self, region: int | None) -> ctypes.Structure:
        """The reusable parameter block of reads into a registered region."""
        key = region or 0
        param = self._params.get(key)
        if param is None:
            param = self._params[key] = self.ucp.get_param(region)
        return param

    def connect(self, address: str) -> UcxLink:
        host, port = parse_address(address)
        try:
            endpoint = self._api.UCXEndpoint.create(self._worker, host, port, True)
        except Exception as error:  # ucxx raises one class per UCX status
            raise TransceiverError(f"cannot connect to {address}: {error}") from error
        return self._adopt(endpoint, address)

    def _adopt(self, endpoint: Any, peer: str) -> UcxLink:
        link = UcxLink(self, endpoint, peer)
        self._links[link.handle] = link
        endpoint.set_close_callback(self._on_close, (link,))
        return link

    def _on_connect(self, request: int) -> None:  # inside progress
        try:
            endpoint = self._listener.create_endpoint_from_conn_request(request, True)
            self._accepted.append(self._adopt(endpoint, f"client-{request:x}"))
        except Exception as error:  # an exception must not travel through UCX's C frames
            _log.warning("a connection could not be accepted: %s", error)

    def _on_close(self, link: UcxLink) -> None:  # inside progress
        self._lost.append(link)

    def _on_am(self, endpoint: int, data: int, length: int) -> None:  # inside progress
        if length <= MAX_MESSAGE_BYTES:
            self._inbox.append((endpoint, ctypes.string_at(data, length)))

    def poll(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            progressed = 0
            while progressed < _MAX_PROGRESS and self.ucp.progress(self._handle):
                progressed += 1
            if self._deliver() or progressed == _MAX_PROGRESS:
                return
            left = deadline - time.monotonic()
            if left <= 0:
                return
            if self._worker.arm():
                assert self._epoll is not None
                for fd, _ in self._epoll.poll(left):
                    if fd == self._wake_fd:
                        os.eventfd_read(self._wake_fd)
                        return

    def _deliver(self) -> bool:
        busy = bool(self._accepted or self._inbox or self._lost)
        while self._accepted:
            link = self._accepted.popleft()
            self.handler.on_accept(link)
        for link in list(self._links.values()):
            busy |= self._complete(link)
        while self._inbox:
            handle, payload = self._inbox.popleft()
            receiver = self._links.get(handle)
            if receiver is not None:
                self.handler.on_message(receiver, payload)
        while self._lost:
            lost = self._lost.popleft()
            if lost.open:
                self.drop(lost, "the connection to the peer is lost")
        return busy

    def _complete(self, link: UcxLink) -> bool:
        ucp, busy = self.ucp, False
        while link.sends and (not link.sends[0][0] or ucp.status(link.sends[0][0]) != UCS_INPROGRESS):
            request, _ = link.sends.popleft()
            if request:
                ucp.free(request)
        while link.reads and self._advance(link, link.reads[0]):
            read = link.reads.popleft()
            busy = True
            self.handler.on_get_done(link, read.token, read.error)
            if read.requests is None:
                break  # one kernel call at a time: messages and cancels come in between
        return busy

    def _advance(self, link: UcxLink, read: _Read) -> bool:
        """True when nothing of `read` is under way any more."""
        if read.requests is None:
            if not link.open or link.cma is None:
                read.error = read.error or "the link is closed"
                return True
            try:
                batch = read.batch
                link.cma.read(batch.local, batch.offset + np.uint64(read.remote.address), batch.nbytes)
                return True
            except OSError as error:
                if error.errno not in (errno.EPERM, errno.ENOSYS):
                    read.error = f"reading the peer's memory: {error}"
                    return True
                _log.warning("direct reads from %s are refused (%s): UCX reads one by one", link.peer, error)
                link.cma = None
            try:
                link.issue(read)
            except TransceiverError as error:
                read.error = str(error)
        ucp, requests = self.ucp, read.requests or []
        while requests:
            status = ucp.status(requests[-1])
            if status == UCS_INPROGRESS:
                return False
            ucp.free(requests.pop())
            if status != UCS_OK:
                read.error = ucp.status_text(status)
        return True

    def fail(self, link: UcxLink) -> None:
        """Give a link up at the next poll."""
        if link not in self._lost:
            self._lost.append(link)

    def drop(self, link: UcxLink, reason: str | None) -> None:
        """Close the endpoint, complete what was under way, and report a loss when there is a reason."""
        link.open = False
        self._links.pop(link.handle, None)
        for key in link.keys:
            self.ucp.destroy_key(key)
        link.endpoint.remove_close_callback()
        try:
            link.endpoint.close_blocking(1_000_000, 50)  # forced where the peer is dead; up to 50 ms
        except Exception as error:  # ucxx raises one class per UCX status; the endpoint is gone either way
            _log.debug("closing the endpoint to %s: %s", link.peer, error)
        self._drain(link)
        link.endpoint = None  # an endpoint keeps the listener alive
        if reason is not None:
            self.handler.on_lost(link, reason)

    def _drain(self, link: UcxLink) -> None:
        """Complete every request of a closed endpoint: closing has failed them, nothing writes any more."""
        ucp, limit = self.ucp, time.monotonic() + 1.0
        while (link.reads or link.sends) and time.monotonic() < limit:
            self._complete(link)
            ucp.progress(self._handle)
        while link.reads:
            # Not reported as done: the pages of this read stay in quarantine until the whole transport is closed.
            _log.error("a read from %s did not end with its endpoint (%r)", link.peer, link.reads.popleft().token)
        link.sends.clear()

    def wake(self) -> None:
        with self._wake_lock:
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        with self._wake_lock:
            if self._wake_fd >= 0:
                os.close(self._wake_fd)
            self._wake_fd = -1
        if self._epoll is None:
            return
        limit = time.monotonic() + _FLUSH_S
        while any(link.sends for link in self._links.values()) and time.monotonic() < limit:
            self.ucp.progress(self._handle)
            for link in list(self._links.values()):
                self._complete(link)
        for link in list(self._links.values()):
            self.drop(link, None)
        self._epoll.close()
        self._epoll = None
        self._listener = None
        self.ucp.on_message(self._handle, _AM_ID, None)
        for _ in range(_MAX_PROGRESS):
            if not self.ucp.progress(self._handle):
                break
        for handle in self._memory:
            self.ucp.unmap_memory(self._context.handle, handle)
        self._memory.clear()
        self._worker = None
        self._context = None
