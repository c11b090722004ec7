"""Addresses of transports that listen on a host and a port: ``scheme://host:port``, IPv6 in brackets."""

from __future__ import annotations

import ipaddress
import socket
from typing import Any, TypeAlias

from transceiver.errors import TransceiverError

__all__ = ["AddressInfo", "format_address", "name_in", "numeric", "parse_address", "with_host"]

_SCHEMES = ("ucx", "nixl")  # of the transports that listen on a host and a port
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


def numeric(host: str, port: int) -> AddressInfo:
    """What `socket.getaddrinfo` says of a TCP peer at a numeric address. Raises OSError for a name: no look-up."""
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)[0]
    except (socket.gaierror, UnicodeError) as error:
        raise OSError(f"{host!r} is not a numeric address: {error}") from error


def name_in(address: str) -> str:
    """The name of a host that must be looked up before anybody can connect to `address`; empty when there is none."""
    scheme = address.partition("://")[0]
    if scheme not in _SCHEMES:
        return ""
    try:
        host, _ = parse_address(scheme, address)
        ipaddress.ip_address(host)
    except TransceiverError:  # the transport will say so
        return ""
    except ValueError:
        return host
    return ""


def with_host(address: str, host: str) -> str:
    """`address` with another host."""
    scheme = address.partition("://")[0]
    return format_address(scheme, host, parse_address(scheme, address)[1])
