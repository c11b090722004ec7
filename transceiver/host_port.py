"""Addresses of transports that listen on a host and a port: ``scheme://host:port``, IPv6 in brackets."""

from __future__ import annotations

from transceiver.errors import TransceiverError

__all__ = ["format_address", "parse_address"]


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
