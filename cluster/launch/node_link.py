"""The wire between a job's first node and the agent on each node: framed JSON over TCP, both sides known.

Used by `NodePool` (accepting side) and `NodeAgent` (connecting side). An agent runs what it is told to, so both sides
prove the job's secret token first and a stranger gets nothing. No pickle, bounded frames, every wait has a deadline.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import secrets
import select
import socket
import struct
import threading
import time
from typing import Any

from cluster.launch.errors import LinkError

__all__ = ["BEAT_S", "SILENCE_S", "NodeLink", "accept_link", "open_link"]

BEAT_S = 1.0
SILENCE_S = 20.0

_MAX_FRAME = 1 << 20
_NONCE = 32
_HANDSHAKE_S = 10.0


class NodeLink:
    """A connection whose ends know each other. `send` may be called from any thread, `receive` from one."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._send_lock = threading.Lock()
        self._buffer = bytearray()
        self._closed = False
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(_HANDSHAKE_S)

    def send(self, message: dict[str, Any]) -> None:
        """Send one message. Raises LinkError when the connection is gone or the peer does not read."""
        data = json.dumps(message).encode()
        if len(data) > _MAX_FRAME:
            raise LinkError(f"a message of {len(data)} bytes is above the limit of {_MAX_FRAME}")
        try:
            with self._send_lock:
                self._socket.sendall(struct.pack(">I", len(data)) + data)
        except OSError as error:
            raise LinkError(f"cannot send: {error}") from error

    def receive(self, timeout_s: float) -> dict[str, Any] | None:
        """The next message, or None when none came within `timeout_s`. Raises LinkError when the peer closed."""
        deadline = time.monotonic() + timeout_s
        while (message := self._parse()) is None:
            left = deadline - time.monotonic()
            if self._closed:
                raise LinkError("the connection is closed")
            if left <= 0:
                return None
            self._read(left)
        return message

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._closed = True
        with contextlib.suppress(OSError):  # never connected, or closed by the peer already
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _read(self, timeout_s: float) -> None:
        try:
            readable, _, _ = select.select([self._socket], [], [], timeout_s)
            if not readable:
                return
            data = self._socket.recv(65536)
        except (OSError, ValueError) as error:
            raise LinkError(f"cannot read: {error}") from error
        if not data:
            raise LinkError("the peer closed the connection")
        self._buffer += data

    def _parse(self) -> dict[str, Any] | None:
        if len(self._buffer) < 4:
            return None
        (length,) = struct.unpack(">I", self._buffer[:4])
        if length > _MAX_FRAME:
            raise LinkError(f"a frame of {length} bytes is above the limit of {_MAX_FRAME}")
        if len(self._buffer) < 4 + length:
            return None
        data = bytes(self._buffer[4 : 4 + length])
        del self._buffer[: 4 + length]
        try:
            message = json.loads(data)
        except ValueError as error:
            raise LinkError(f"not a message: {error}") from error
        if not isinstance(message, dict):
            raise LinkError("not a message")
        return message


def _proof(token: bytes, side: bytes, first: str, second: str) -> str:
    return hmac.new(token, side + first.encode() + second.encode(), hashlib.sha256).hexdigest()


def accept_link(connection: socket.socket, token: bytes) -> NodeLink:
    """Prove the token to a connected agent and have it proven. Raises LinkError and closes the connection otherwise."""
    link = NodeLink(connection)
    try:
        nonce = secrets.token_hex(_NONCE)
        link.send({"nonce": nonce})
        answer = link.receive(_HANDSHAKE_S) or {}
        theirs, proof = str(answer.get("nonce")), str(answer.get("proof"))
        if not hmac.compare_digest(proof, _proof(token, b"node", nonce, theirs)):
            raise LinkError("the peer does not know the job's token")
        link.send({"proof": _proof(token, b"head", theirs, nonce)})
    except LinkError:
        link.close()
        raise
    return link


def open_link(host: str, port: int, token: bytes, timeout_s: float) -> NodeLink:
    """Connect to the job's first node, trying until `timeout_s`. Raises LinkError."""
    deadline = time.monotonic() + timeout_s
    pause = threading.Event()
    why = "no attempt was made"
    while time.monotonic() < deadline:
        try:
            connection = socket.create_connection((host, port), timeout=min(5.0, timeout_s))
        except OSError as error:
            why = str(error)
            pause.wait(0.2)
            continue
        return _prove(NodeLink(connection), token)
    raise LinkError(f"no connection to {host}:{port} within {timeout_s:g} s: {why}")


def _prove(link: NodeLink, token: bytes) -> NodeLink:
    try:
        challenge = link.receive(_HANDSHAKE_S) or {}
        theirs, nonce = str(challenge.get("nonce")), secrets.token_hex(_NONCE)
        link.send({"nonce": nonce, "proof": _proof(token, b"node", theirs, nonce)})
        answer = link.receive(_HANDSHAKE_S) or {}
        if not hmac.compare_digest(str(answer.get("proof")), _proof(token, b"head", nonce, theirs)):
            raise LinkError("the head does not know the job's token")
    except LinkError:
        link.close()
        raise
    return link
