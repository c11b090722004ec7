"""Transport over UCX: ucxx for context, worker, listener and endpoints; `ucp_binding` for messages, keys and reads.

Everything here runs in the transceiver's loop thread. Endpoint error handling is always on: with it off, reading from a
dead peer aborts the process. The loop sleeps in epoll on UCX's event descriptor and an eventfd; it never spins.
"""

from __future__ import annotations

import ctypes
import logging
import os
import select
import time
from collections import deque
from collections.abc import Iterable
from typing import Any

from kvcache.storage.page_storage import MemoryRegion
from transceiver.cma import process_identity
from transceiver.config import CacheTransceiverConfig
from transceiver.cut_links import cut_links
from transceiver.device_memory import HOST, is_host, tls_with_devices
from transceiver.errors import TransceiverError, TransportUnavailableError
from transceiver.host_copies import HostCopies
from transceiver.host_port import format_address, parse_address
from transceiver.transport import TransportHandler
from transceiver.ucp_binding import UCS_INPROGRESS, UCS_OK
from transceiver.ucx_fabric import BASE_OPTIONS, UcxFabric
from transceiver.ucx_link import PendingRead, UcxLink
from transceiver.ucx_remote_reads import ReadServer
from transceiver.wake_fd import WakeFd
from transceiver.wire import MAX_MESSAGE_BYTES

__all__ = ["UcxTransport"]

_log = logging.getLogger(__name__)
_MAX_HANDSHAKE_BYTES = 4 << 20  # of a message before the secret is proved: a layout and the keys of 256 regions fit
_MAX_PROGRESS = 64  # rounds before events are delivered, so that a busy fabric cannot starve the protocol


class UcxTransport:
    """Implements `Transport` over one UCX context and worker."""

    def __init__(self, host: str, config: CacheTransceiverConfig, devices: Iterable[str] = ()) -> None:
        self._host = host
        self._config = config
        self._tls = tls_with_devices(config.ucx_tls, devices)
        self._links: dict[int, UcxLink] = {}
        self._inbox: deque[tuple[int, bytes]] = deque()
        self._accepted: deque[UcxLink] = deque()
        self._lost: deque[UcxLink] = deque()
        self._regions: list[MemoryRegion] = []
        self._fabrics: list[UcxFabric] = []  # the configured one, and one without cma when the kernel refuses that
        self.no_cma: dict[str, str] = {}  # address -> why later connections to it use no cma lane
        self._woken = False
        self.copies = HostCopies(max(0, config.copy_threads - 1), self.wake)
        self._server = ReadServer(self._links, self._regions, self.fail)
        self._wake_fd = WakeFd()
        self._epoll: select.epoll | None = None
        self._listener: Any = None
        self.handler: TransportHandler

    @property
    def address(self) -> str:
        return format_address("ucx", self._host, self._listener.port)

    @property
    def identity(self) -> bytes:
        return process_identity() if self._config.allows_cma else b""

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
        self._api = api
        self._epoll = select.epoll()
        self._epoll.register(self._wake_fd, select.EPOLLIN)
        try:
            main = self._add_fabric(self._tls)
            self._listener = api.UCXListener.create(main.worker, 0, self._on_connect)
        except (RuntimeError, OSError, ValueError) as error:
            raise TransportUnavailableError(
                f"UCX cannot start with TLS={self._tls}: {error}; check cache_transceiver_config.ucx_tls"
            ) from error

    def _add_fabric(self, tls: str) -> UcxFabric:
        assert self._epoll is not None
        options = {"TLS": tls, **BASE_OPTIONS, **self._config.ucx_options}
        fabric = UcxFabric(self._api, options, self._on_am, self._server.on_ask, self._on_data)
        self._epoll.register(fabric.event_fd, select.EPOLLIN)
        self._fabrics.append(fabric)
        for number, region in enumerate(self._regions, 1):
            fabric.map(number, region)
        return fabric

    def register(self, region: MemoryRegion) -> tuple[int, bytes]:
        self._regions.append(region)
        number = len(self._regions)
        return number, self._fabrics[0].map(number, region)

    @property
    def maps_memory(self) -> bool:
        """Pools of peers on this host may be mapped and copied from: ours are all in host memory."""
        return self._config.shared_pools and all(is_host(region.device) for region in self._regions)

    def device_of(self, registration: int | None) -> str:
        """Where the memory of a registration lies (None: unregistered host memory)."""
        return HOST if registration is None else self._regions[registration - 1].device

    def _fabric_for(self, address: str) -> UcxFabric:
        if address not in self.no_cma:
            return self._fabrics[0]
        if len(self._fabrics) == 1:
            rest = [name for name in self._tls.split(",") if name not in ("cma", "all")]
            self._add_fabric(",".join(rest or ["tcp"]))
        return self._fabrics[1]

    def connect(self, address: str) -> UcxLink:
        host, port = parse_address("ucx", address)
        try:
            fabric = self._fabric_for(address)
            endpoint = self._api.UCXEndpoint.create(fabric.worker, host, port, True)
        except Exception as error:  # ucxx raises one class per UCX status
            raise TransceiverError(f"cannot connect to {address}: {error}") from error
        return self._adopt(fabric, endpoint, address)

    def _adopt(self, fabric: UcxFabric, endpoint: Any, peer: str) -> UcxLink:
        link = UcxLink(self, fabric, endpoint, peer)
        self._links[link.handle] = link
        endpoint.set_close_callback(self._on_close, (link,))
        return link

    def _on_connect(self, request: int) -> None:  # inside progress
        try:
            endpoint = self._listener.create_endpoint_from_conn_request(request, True)
            self._accepted.append(self._adopt(self._fabrics[0], endpoint, f"client-{request:x}"))
        except Exception as error:  # an exception must not travel through UCX's C frames
            _log.warning("a connection could not be accepted: %s", error)

    def _on_close(self, link: UcxLink) -> None:  # inside progress
        self._lost.append(link)

    def _on_am(self, endpoint: int, data: int, length: int) -> None:  # inside progress
        link = self._links.get(endpoint)
        if length <= (MAX_MESSAGE_BYTES if link is not None and link.trusted else _MAX_HANDSHAKE_BYTES):
            self._inbox.append((endpoint, ctypes.string_at(data, length)))

    def _on_data(self, endpoint: int, header: bytes, data: int, length: int) -> None:  # inside progress
        link = self._links.get(endpoint)
        if link is not None:
            link.remote_reads.arrived(header, data, length)

    def poll(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            progressed = 0
            while progressed < _MAX_PROGRESS and self._progress():
                progressed += 1
            if self._deliver() or progressed == _MAX_PROGRESS or self._woken:
                self._woken = False
                self.copies.step()  # a fabric that always has something to say does not hold copies up
                return
            copied = self.copies.step()  # one piece at a time: messages, cancels and timers come in between
            left = deadline - time.monotonic()
            if left <= 0:
                return
            if copied:
                continue
            if self.copies.may_sleep() and all(fabric.worker.arm() for fabric in self._fabrics):
                assert self._epoll is not None
                for fd, _ in self._epoll.poll(left):
                    if fd == self._wake_fd.fileno():
                        self._wake_fd.drain()
                        self._woken = False
                        return

    def _progress(self) -> bool:
        answers = [fabric.progress() for fabric in self._fabrics]  # every one gets its turn
        return any(answers)

    def _deliver(self) -> bool:
        busy = bool(self._accepted or self._inbox or self._lost)
        while self._accepted:
            link = self._accepted.popleft()
            self.handler.on_accept(link)
        for link in list(self._links.values()):
            busy |= self._complete(link)
        busy |= self._copy() | self._server.serve()
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
        ucp, busy = link.fabric.ucp, False
        while link.sends and (not link.sends[0][0] or ucp.status(link.sends[0][0]) != UCS_INPROGRESS):
            request, _ = link.sends.popleft()
            if request:
                ucp.free(request)
        while link.given_up or (link.reads and self._advance(link, link.reads[0])):
            read = link.given_up.popleft() if link.given_up else link.reads.popleft()
            busy = True
            self.handler.on_get_done(link, read.token, read.error)
        return busy

    def _copy(self) -> bool:
        """Report the copies that have ended."""
        busy = False
        while (copy := self.copies.take()) is not None:
            read = copy.owner
            assert isinstance(read, PendingRead)
            read.link.copies.discard(read)
            busy = True
            self.handler.on_get_done(read.link, read.token, copy.error)
        return busy

    def _advance(self, link: UcxLink, read: PendingRead) -> bool:
        """True when nothing of `read` is under way any more."""
        if read.number:
            if link.open and link.remote_reads.left(read.number):
                return False
            if link.remote_reads.left(read.number):
                read.error = "the link is closed"
            link.remote_reads.forget(read.number)  # what comes now is dropped
            return True
        ucp = link.fabric.ucp
        while read.requests:
            status = ucp.status(read.requests[-1])
            if status == UCS_INPROGRESS:
                return False
            ucp.free(read.requests.pop())
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
        for key in link.keys.values():
            link.fabric.ucp.destroy_key(key)
        link.unmap()
        link.endpoint.remove_close_callback()
        try:
            link.endpoint.close_blocking(1_000_000, 50)  # forced where the peer is dead; up to 50 ms
        except Exception as error:  # ucxx raises one class per UCX status; the endpoint is gone either way
            _log.debug("closing the endpoint to %s: %s", link.peer, error)
        self.copies.abandon(link.copies, "the link is closed")
        self._drain(link)
        link.endpoint = None  # an endpoint keeps the listener alive
        if reason is not None:
            self.handler.on_lost(link, reason)

    def _drain(self, link: UcxLink) -> None:
        """Complete every request of a closed endpoint: closing has failed them, nothing writes any more."""
        limit = time.monotonic() + 1.0
        status, free = link.fabric.ucp.status, link.fabric.ucp.free
        while (
            link.reads or link.given_up or link.sends or link.copies or not link.answers.end(status, free)
        ) and time.monotonic() < limit:
            self._complete(link)
            self.copies.step()
            self._copy()
            link.fabric.progress()
        # Not reported as done: the pages of these reads stay in quarantine until the whole transport is closed.
        for read in (*link.reads, *link.copies):
            _log.error("a read from %s did not end with its endpoint (%r)", link.peer, read.token)
        link.reads.clear()
        link.sends.clear()

    def wake(self) -> None:
        self._woken = True
        self._wake_fd.wake()

    def close(self) -> None:
        self._wake_fd.close()
        if self._epoll is None:
            return
        try:
            self._cut_all()
        finally:  # whatever happens: no thread may copy into memory that is freed
            self.copies.close()
            self._epoll.close()
            self._epoll = None
            self._listener = None
            for fabric in self._fabrics:
                fabric.close()
            self._fabrics.clear()

    def _cut_all(self) -> None:
        def turn() -> None:
            self._progress()
            for link in list(self._links.values()):
                self._complete(link)

        cut_links(self._links.values, lambda link: link.sends, turn, lambda link: self.drop(link, None))
