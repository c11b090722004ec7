"""Errors of the transceiver. Faults of a peer are never raised: they are `TransferOutcome` values.

What is raised concerns this process: a wrong configuration, misuse of the API, a transport that cannot start.
"""

from __future__ import annotations

__all__ = [
    "HandshakeRefusedError",
    "LinkClosedError",
    "TransceiverClosedError",
    "TransceiverError",
    "TransceiverFullError",
    "TransportUnavailableError",
    "WireFormatError",
]


class TransceiverError(RuntimeError):
    """Base of all transceiver errors."""


class TransceiverClosedError(TransceiverError):
    """The transceiver was not started, or is closed."""


class TransceiverFullError(TransceiverError):
    """A bound of the configuration is reached: too many publications or pulls at once; try later or raise it."""


class TransportUnavailableError(TransceiverError):
    """The configured transport cannot start on this machine; the message says what to install or change."""


class LinkClosedError(TransceiverError):
    """The link to the peer is gone."""


class WireFormatError(TransceiverError):
    """Bytes from a peer that are not a message of this protocol version, or exceed its bounds."""


class HandshakeRefusedError(TransceiverError):
    """The two sides do not fit together; `field` names what differs."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field
