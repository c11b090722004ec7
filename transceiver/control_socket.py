"""Framed messages over one non-blocking TCP connection: length (4 bytes, little-endian), then the payload.

For transports whose fabric has no connections of its own. Owns the socket and both directions' buffers, each bounded;
knows nothing of what the messages mean. Used by one thread, which waits on `fileno` with its own epoll.
"""

from __future__ import annotations

import errno
import os
import select
import socket
from collections import deque

from transceiver.errors import LinkClosedError
from transceiver.host_port import numeric
from transceiver.wire import MAX_MESSAGE_BYTES

__all__ = ["MAX_UNPROVEN_FRAME", "ControlSocket"]

MAX_UNPROVEN_FRAME = 256 << 10  # a peer that has not proved the secret makes us keep no more than this
_MAX_WAITING = 1024  # messages that may wait for a peer that does not read
_CHUNK = 256 << 10


class ControlSocket:
    """One connection. `broken` says why it is over; nothing raises for what the peer does."""

    def __init__(self, connection: socket.socket, *, connected: bool) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._socket = connection
        self._connected = connected
        self._incoming = bytearray()
        self._outgoing: deque[memoryview] = deque()
        self.limit = MAX_UNPROVEN_FRAME
        self.broken = ""

    @staticmethod
    def connect(host: str, port: int) -> ControlSocket:
        """Start connecting to a numeric address; failures show in `broken` later. Raises OSError. Never blocks."""
        family, kind, proto, _, target = numeric(host, port)
        connection = socket.socket(family, kind | socket.SOCK_CLOEXEC, proto)
        try:
            connection.setblocking(False)
            code = connection.connect_ex(target)
        except OSError:
            connection.close()
            raise
        link = ControlSocket(connection, connected=code == 0)
        if code not in (0, errno.EINPROGRESS):
            link.broken = os.strerror(code)
        return link

    def fileno(self) -> int:
        """For epoll."""
        return self._socket.fileno()

    @property
    def wanted(self) -> int:
        """The epoll events that `on_ready` wants to hear of."""
        busy = bool(self._outgoing) or not self._connected
        return select.EPOLLIN | (select.EPOLLOUT if busy else 0)

    def send(self, payload: bytes) -> None:
        """Queue a message and send what fits. Raises LinkClosedError when the connection is over or its queue full."""
        if self.broken:
            raise LinkClosedError(self.broken)
        if len(self._outgoing) >= 2 * _MAX_WAITING:
            self.broken = f"the peer does not take messages: {_MAX_WAITING} are waiting"
            raise LinkClosedError(self.broken)
        self._outgoing.append(memoryview(len(payload).to_bytes(4, "little")))
        if payload:
            self._outgoing.append(memoryview(payload))
        self._flush()

    def on_ready(self) -> list[bytes]:
        """Messages that have come whole, after epoll reported the socket. Sets `broken` when it is over."""
        if not self._connected and not self.broken:
            code = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                self.broken = os.strerror(code)
                return []
            try:
                self._socket.getpeername()
            except OSError:
                return []  # not connected yet
            self._connected = True
        self._flush()
        self._receive()
        return self._frames()

    def _flush(self) -> None:
        while self._connected and self._outgoing and not self.broken:
            try:
                sent = self._socket.sendmsg(list(self._outgoing)[:16])
            except BlockingIOError:
                return
            except OSError as error:
                self.broken = error.strerror or str(error)
                return
            while sent and self._outgoing:
                first = self._outgoing[0]
                if sent < len(first):
                    self._outgoing[0] = first[sent:]
                    return
                sent -= len(first)
                self._outgoing.popleft()

    def _receive(self) -> None:
        while self._connected and not self.broken and len(self._incoming) <= self.limit + 4:
            try:
                data = self._socket.recv(_CHUNK)
            except BlockingIOError:
                return
            except OSError as error:
                self.broken = error.strerror or str(error)
                return
            if not data:
                self.broken = "the peer closed the connection"
                return
            self._incoming += data

    def _frames(self) -> list[bytes]:
        frames, at = [], 0
        while len(self._incoming) - at >= 4:
            size = int.from_bytes(self._incoming[at : at + 4], "little")
            if size > self.limit:
                self.broken = f"a message of {size} bytes exceeds the bound of {self.limit}"
                break
            if len(self._incoming) - at - 4 < size:
                break
            frames.append(bytes(self._incoming[at + 4 : at + 4 + size]))
            at += 4 + size
        del self._incoming[:at]
        return frames

    @property
    def waiting(self) -> bool:
        """True while messages have not left."""
        return bool(self._outgoing) and self._connected and not self.broken

    def trust(self) -> None:
        """The peer has proved the secret: messages up to MAX_MESSAGE_BYTES may come."""
        self.limit = MAX_MESSAGE_BYTES

    def close(self) -> None:
        """Idempotent."""
        self.broken = self.broken or "the link is closed"
        self._socket.close()
