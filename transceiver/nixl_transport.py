"""Transport over NIXL (optional): reads by an NVIDIA NIXL agent, messages over a TCP connection of our own.

NIXL has no connections and tells nobody that a peer has gone, so every link is a socket: its end is the peer's end. The
agent has no progress thread (it would spin): the loop gives it its turns, often while something moves and rarely else.
Everything here runs in the transceiver's loop thread.
"""

from __future__ import annotations

import errno
import logging
import secrets
import select
import socket
import time

from kvcache.storage.page_storage import MemoryRegion
from transceiver.config import CacheTransceiverConfig
from transceiver.control_socket import ControlSocket
from transceiver.cut_links import cut_links
from transceiver.errors import LinkClosedError, TransceiverError
from transceiver.host_port import format_address, parse_address
from transceiver.nixl_fabric import NixlFabric
from transceiver.nixl_link import NixlLink, NixlRemoteRegion
from transceiver.transport import ReadBatch, TransportHandler
from transceiver.wake_fd import WakeFd

__all__ = ["NixlTransport"]

_log = logging.getLogger(__name__)
_BUSY_S = 2.0  # after the last event: the agent keeps getting frequent turns, a peer may be reading here
_PAUSE_S = (20e-6, 1e-3)  # between turns while something moves
_IDLE_S = 0.05  # between turns while nothing does
_WORKED_S = 50e-6  # a turn that took longer has moved something
_DRAIN_S = 1.0  # on a cut link: how long its reads may take to end
_ACCEPT_PAUSE_S = 0.5  # without descriptors or memory for a connection: nobody is let in for so long
_SHORT_OF = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class NixlTransport:
    """Implements `Transport` with one NIXL agent and one listening socket."""

    def __init__(self, worker_id: str, host: str, config: CacheTransceiverConfig) -> None:
        self._name = f"{worker_id}-{secrets.token_hex(8)}"
        self._host = host
        self._config = config
        self._links: dict[int, NixlLink] = {}  # by file descriptor
        self._wanted: dict[int, int] = {}
        self._lost: list[NixlLink] = []
        self._busy_until = 0.0
        self._pause = _PAUSE_S[0]
        self._wake_fd = WakeFd()
        self._epoll: select.epoll | None = None
        self._listener: socket.socket | None = None
        self._accept_at: float | None = None  # while no connections are taken: when the next one may be
        self._open = False
        self.fabric: NixlFabric
        self.handler: TransportHandler

    @property
    def address(self) -> str:
        assert self._listener is not None
        return format_address("nixl", self._host, self._listener.getsockname()[1])

    @property
    def identity(self) -> bytes:
        return b""

    def open(self, handler: TransportHandler) -> None:
        self.handler = handler
        self.fabric = NixlFabric(self._name, self._config.nixl_options)
        self._open = True
        dual = socket.has_dualstack_ipv6()
        family, anywhere = (socket.AF_INET6, "::") if dual else (socket.AF_INET, "")
        self._listener = socket.create_server((anywhere, 0), family=family, backlog=128, dualstack_ipv6=dual)
        self._listener.setblocking(False)
        self._epoll = select.epoll()
        self._epoll.register(self._wake_fd, select.EPOLLIN)
        self._epoll.register(self._listener.fileno(), select.EPOLLIN)

    def register(self, region: MemoryRegion) -> tuple[int, bytes]:
        return self.fabric.register(region)

    def connect(self, address: str) -> NixlLink:
        host, port = parse_address("nixl", address)
        try:
            control = ControlSocket.connect(host, port)
        except OSError as error:
            raise TransceiverError(f"cannot connect to {address}: {error}") from error
        link = self._adopt(control, address)
        if control.broken:
            self.fail(link)
        return link

    def _adopt(self, control: ControlSocket, peer: str) -> NixlLink:
        assert self._epoll is not None
        link = NixlLink(self, control, peer)
        fd = control.fileno()
        self._links[fd], self._wanted[fd] = link, control.wanted
        self._epoll.register(fd, control.wanted)
        self._stir()
        return link

    def _stir(self) -> None:
        self._busy_until = time.monotonic() + _BUSY_S
        self._pause = _PAUSE_S[0]

    def sent(self, link: NixlLink) -> None:
        """A message of `link` was queued: wait for its socket if it did not leave at once."""
        self._stir()
        fd = link.control.fileno()
        if self._epoll is not None and self._wanted.get(fd) != link.control.wanted:
            self._wanted[fd] = link.control.wanted
            self._epoll.modify(fd, link.control.wanted)

    def start_get(
        self, link: NixlLink, batch: ReadBatch, remote: NixlRemoteRegion, region: int | None, token: object
    ) -> None:
        """Start a batch of reads. Raises LinkClosedError when nothing was started; any failure gives the link up."""
        try:
            read = self.fabric.start(link, batch, remote, region, token)
        except TransceiverError as error:
            self.fail(link)
            raise LinkClosedError(str(error)) from error
        if read.error is not None:
            self.fail(link)
        self._stir()

    # --- the loop ------------------------------------------------------------------------------------------------

    def poll(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            began = time.monotonic()
            self._listen_again(began)
            woken = self._sockets(self._wait(deadline - began))
            busy = self._turn() | self._deliver_losses()
            if woken or busy or time.monotonic() >= deadline:
                return

    def _wait(self, left: float) -> list[tuple[int, int]]:
        """Socket events, waited for as long as what is under way allows."""
        assert self._epoll is not None
        if self._lost:
            return self._epoll.poll(0)
        if self._accept_at is not None:
            left = min(left, max(0.0, self._accept_at - time.monotonic()))
        if not self.fabric.reads and (not self._links or time.monotonic() > self._busy_until):
            return self._epoll.poll(max(0.0, min(left, _IDLE_S) if self._links else left))
        events = self._epoll.poll(0)
        if not events and left > 0 and self._pause:
            time.sleep(min(self._pause, left))  # epoll's own timeout is no finer than a millisecond
            self._pause = min(2 * self._pause, _PAUSE_S[1])
        return events

    def _sockets(self, events: list[tuple[int, int]]) -> bool:
        """Handle what the sockets report; True when the loop should go round."""
        busy = False
        for fd, _ in events:
            if fd == self._wake_fd.fileno():
                self._wake_fd.drain()
                busy = True
            elif self._listener is not None and fd == self._listener.fileno():
                self._accept()
                busy = True
            elif (link := self._links.get(fd)) is not None:
                busy = True
                for payload in link.control.on_ready():
                    if link.open:
                        self.handler.on_message(link, payload)
                if link.open:
                    self.sent(link)
                    if link.control.broken:
                        self.fail(link)
        return busy

    def _accept(self) -> None:
        assert self._listener is not None and self._epoll is not None
        try:
            connection, peer = self._listener.accept()
        except OSError as error:  # the peer left between its knock and our answer, or descriptors ran out
            _log.warning("a connection could not be accepted: %s", error)
            if error.errno in _SHORT_OF:  # it keeps knocking, which would wake every poll
                self._epoll.unregister(self._listener.fileno())
                self._accept_at = time.monotonic() + _ACCEPT_PAUSE_S
            return
        self.handler.on_accept(self._adopt(ControlSocket(connection, connected=True), f"client-{peer[0]}:{peer[1]}"))

    def _listen_again(self, now: float) -> None:
        """Take connections again after a shortage."""
        if self._accept_at is not None and now >= self._accept_at:
            assert self._listener is not None and self._epoll is not None
            self._accept_at = None
            self._epoll.register(self._listener.fileno(), select.EPOLLIN)

    def _turn(self) -> bool:
        """Let NIXL move things on and deliver reads that have ended. True when one has."""
        if not self._links and not self.fabric.reads:
            return False
        began = time.monotonic()
        ended = self.fabric.turn()
        if time.monotonic() - began > _WORKED_S:
            self._stir()
        for read in ended:
            error = read.error or (None if read.link.open else "the link is closed")
            self.handler.on_get_done(read.link, read.token, error)
            if not read.link.open:
                self.fabric.unload(read.link)
        return bool(ended)

    def fail(self, link: NixlLink) -> None:
        """Give a link up at the next poll."""
        if link.open and link not in self._lost:
            self._lost.append(link)

    def _deliver_losses(self) -> bool:
        busy = bool(self._lost)
        while self._lost:
            link = self._lost.pop()
            if link.open:
                self.drop(link, link.control.broken or "the connection to the peer is lost")
        return busy

    def drop(self, link: NixlLink, reason: str | None) -> None:
        """Close the link, complete what was under way, and report a loss when there is a reason.

        A read that does not end now stays in quarantine; it is reported when NIXL says that it is over.
        """
        fd = link.control.fileno()
        if self._epoll is not None and self._links.pop(fd, None) is not None:
            self._epoll.unregister(fd)
            self._wanted.pop(fd, None)
        link.open = False
        link.control.close()
        limit = time.monotonic() + _DRAIN_S
        while self.fabric.has_reads(link) and time.monotonic() < limit:
            if not self._turn():
                time.sleep(_PAUSE_S[1])
        if self.fabric.has_reads(link):
            _log.error("a read from %s did not end with its link", link.peer)
        self.fabric.unload(link)
        if reason is not None:
            self.handler.on_lost(link, reason)

    def wake(self) -> None:
        self._wake_fd.wake()

    def close(self) -> None:
        self._wake_fd.close()
        try:
            self._cut_all()
        finally:  # whatever happens: NIXL must not write into memory that is freed
            if self._epoll is not None:
                self._epoll.close()
                self._epoll = None
            if self._listener is not None:
                self._listener.close()
                self._listener = None
            if self._open:
                self._open = False
                self.fabric.close()

    def _cut_all(self) -> None:
        def turn() -> None:
            for link in self._links.values():
                link.control.on_ready()
            time.sleep(_PAUSE_S[1])

        cut_links(self._links.values, lambda link: link.control.waiting, turn, lambda link: self.drop(link, None))
