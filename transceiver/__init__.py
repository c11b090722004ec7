"""KV blocks between two memories: publish, pull, verify, and say what happened.

Knows block ranges, pages and peers; knows no scheduler, no Ray, no text. The transport is imported when it is started.
"""

from __future__ import annotations

from transceiver.chunking import held_back
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
from transceiver.folded_pull import FoldedPull
from transceiver.mapping import Source, sources_of
from transceiver.parallel_layout import Interval, ParallelLayout, RankShare
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
    "FoldedPull",
    "GrantTicket",
    "HandshakeRefusedError",
    "Interval",
    "LinkClosedError",
    "LinkStats",
    "ParallelLayout",
    "Publication",
    "Pull",
    "RankShare",
    "Source",
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
    "held_back",
    "sources_of",
]
