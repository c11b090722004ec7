"""The network between two ranks without blocks and without UCX: one TCP connection, every byte compared.

For `--host-transfer`: what a plain socket reaches is what the blocks' bandwidth is to be read against.
"""

from __future__ import annotations

import socket
import struct
import threading
import time

import numpy as np
from numpy.typing import NDArray

__all__ = ["RawFabric"]

_TIMEOUT_S = 30.0


class RawFabric:
    """A sender thread on one rank, a receiver on the other."""

    def __init__(self, host: str) -> None:
        self._host = host

    def listen(self, nbytes: int) -> int:
        """Offer `nbytes` of a known pattern for each request of one connection; returns the port."""
        server = socket.create_server((self._host, 0))
        server.settimeout(_TIMEOUT_S)
        threading.Thread(target=_send, args=(server, _pattern(nbytes)), name="raw-send", daemon=True).start()
        return int(server.getsockname()[1])

    def receive(self, host: str, port: int, nbytes: int, count: int) -> list[float]:
        """Ask `count` times; returns the seconds of each. Raises ValueError when a byte is wrong."""
        expected = _pattern(nbytes)
        buffer = np.empty(nbytes, np.uint8)
        seconds = []
        with socket.create_connection((host, port), timeout=_TIMEOUT_S) as connection:
            for _ in range(count):
                buffer[:] = 0xFF
                began = time.perf_counter()
                connection.sendall(struct.pack(">B", 1))
                view = memoryview(buffer.data)
                while view:
                    got = connection.recv_into(view)
                    if not got:
                        raise ConnectionError("the sender closed the connection")
                    view = view[got:]
                seconds.append(time.perf_counter() - began)
                if not np.array_equal(buffer, expected):
                    raise ValueError("bytes of the raw transfer are wrong")
        return seconds


def _pattern(nbytes: int) -> NDArray[np.uint8]:
    return ((np.arange(nbytes, dtype=np.uint32) * 17 + 47) % 251).astype(np.uint8)


def _send(server: socket.socket, data: NDArray[np.uint8]) -> None:
    with server:
        try:
            connection, _ = server.accept()
        except TimeoutError:
            return  # nobody came: the other side reports why
        with connection:
            connection.settimeout(_TIMEOUT_S)
            while connection.recv(1):
                connection.sendall(data.data)
