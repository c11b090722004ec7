"""Addresses of transports that listen on a host and a port: ``scheme://host:port``, IPv6 in brackets."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import Future
from typing import Any, TypeAlias

from transceiver.errors import TransceiverError

__all__ = ["AddressInfo", "format_address", "parse_address", "resolve"]

LOOKUP_S = 1.0  # a transport's only thread waits for it
AddressInfo: TypeAlias = tuple[socket.AddressFamily, socket.SocketKind, int, str, Any]


def parse_address(scheme: str, address: str) -> tuple[str, int]:
    """(host, port) of an address of this scheme. Raises TransceiverError for anything else."""
    found, _, rest = address.partition("://")
    host, _, port = rest.rpartition(":")
    if found != scheme or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise TransceiverError(
            f"{address!r} is not an address of the form {scheme}://host:port: both sides need the same backend"
        )
    return host.strip("[]"), int(port)


def format_address(scheme: str, host: str, port: int) -> str:
    """The inverse of `parse_address`."""
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def resolve(host: str, port: int) -> AddressInfo:
    """What `socket.getaddrinfo` says first of a TCP peer. Numeric addresses need no look-up and do not block.

    A name is looked up in a thread of its own; blocks for LOOKUP_S at most. Raises OSError.
    """
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)[0]
    except socket.gaierror:
        pass
    except UnicodeError as error:
        raise OSError(f"{host!r} is no name of a host: {error}") from error
    answer: Future[AddressInfo] = Future()

    def look_up() -> None:
        try:
            answer.set_result(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0])
        except Exception as error:
            answer.set_exception(error)

    threading.Thread(target=look_up, name="kvferry-lookup", daemon=True).start()
    try:
        return answer.result(LOOKUP_S)
    except TimeoutError as error:
        if answer.done():  # the look-up's own
            raise
        raise OSError(f"the name {host!r} was not found within {LOOKUP_S:g} s") from error
