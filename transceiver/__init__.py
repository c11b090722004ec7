"""KV blocks between two memories: publish, pull, verify, and say what happened.

Knows block ranges, pages and peers; knows no scheduler, no Ray, no text. The transport is imported when it is started.
"""

from __future__ import annotations

from transceiver.config import BackflowMode, CacheTransceiverConfig, TransceiverBackend
from transceiver.errors import (
    HandshakeRefusedError,
    LinkClosedError,
    TransceiverClosedError,
    TransceiverError,
    TransceiverFullError,
    TransportUnavailableError,
    WireFormatError,
)
from transceiver.publication import Publication
from transceiver.receiver import Pull
from transceiver.stats import LinkStats, TransceiverStats
from transceiver.transceiver import CacheTransceiver
from transceiver.transfer_state import TransferState
from transceiver.transfer_types import GrantTicket, TransferOutcome, TransferStatus

__all__ = [
    "BackflowMode",
    "CacheTransceiver",
    "CacheTransceiverConfig",
    "GrantTicket",
    "HandshakeRefusedError",
    "LinkClosedError",
    "LinkStats",
    "Publication",
    "Pull",
    "TransceiverBackend",
    "TransceiverClosedError",
    "TransceiverError",
    "TransceiverFullError",
    "TransceiverStats",
    "TransferOutcome",
    "TransferState",
    "TransferStatus",
    "TransportUnavailableError",
    "WireFormatError",
]
