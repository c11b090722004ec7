"""Counters of a transceiver and the optional CSV of its transfers.

Written by the loop only and read as a snapshot by anyone. Recording never blocks or breaks a transfer: a file that
cannot be written is reported once and then left alone.
"""

from __future__ import annotations

import csv
import logging
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TextIO

from transceiver.transfer_types import TransferOutcome, TransferStatus

__all__ = ["LinkStats", "PerfCsv", "PerfRow", "TransceiverStats"]

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class LinkStats:
    """What one link has moved. Times in seconds, summed over its pulls; `detail` says how, in words."""

    peer: str
    transport: str
    transfers: int = 0
    bytes: int = 0
    segments: int = 0
    transfer_s: float = 0.0
    queue_s: float = 0.0
    prepare_s: float = 0.0
    retries: int = 0
    detail: str = ""

    def add(self, outcome: TransferOutcome, detail: str) -> None:
        """Count a pull that has ended."""
        self.transport, self.detail = outcome.transport, detail
        self.transfers += 1
        self.bytes += outcome.bytes
        self.segments += outcome.segments
        self.transfer_s += outcome.seconds.get("transfer", 0.0)
        self.queue_s += outcome.seconds.get("queue", 0.0)
        self.prepare_s += outcome.seconds.get("prepare", 0.0)
        self.retries += outcome.retries

    @property
    def mean_segment_bytes(self) -> float:
        """Mean size of a read after adjacent pages were joined (0 before the first)."""
        return self.bytes / self.segments if self.segments else 0.0

    @property
    def bandwidth(self) -> float:
        """Effective bytes per second of the reads on this link (0 before the first)."""
        return self.bytes / self.transfer_s if self.transfer_s > 0 else 0.0


@dataclass(slots=True)
class TransceiverStats:
    """Totals since the start, and what is open now."""

    publications: int = 0
    pulls: int = 0
    open_publications: int = 0
    open_pulls: int = 0
    quarantined_pulls: int = 0
    parked_requests: int = 0
    sent_done: int = 0
    sent_failed: int = 0
    sent_cancelled: int = 0
    sent_timed_out: int = 0
    received_done: int = 0
    received_failed: int = 0
    received_cancelled: int = 0
    received_timed_out: int = 0
    blocks_received: int = 0
    bytes_received: int = 0
    segments_received: int = 0
    digests_checked: int = 0
    digest_mismatches: int = 0
    stale_generations: int = 0
    stale_messages: int = 0
    malformed_messages: int = 0
    refused_links: int = 0
    refused_pulls: int = 0
    lost_links: int = 0
    reconnects: int = 0
    retries: int = 0
    links: dict[str, LinkStats] = field(default_factory=dict)

    def count_sent(self, status: TransferStatus) -> None:
        """A grant has ended."""
        name = f"sent_{status.value}"
        setattr(self, name, getattr(self, name) + 1)

    def count_received(self, outcome: TransferOutcome) -> None:
        """A pull has ended and is settled."""
        name = f"received_{outcome.status.value}"
        setattr(self, name, getattr(self, name) + 1)
        self.pulls += 1
        self.blocks_received += outcome.blocks
        self.bytes_received += outcome.bytes
        self.segments_received += outcome.segments


@dataclass(frozen=True, slots=True)
class PerfRow:
    """One line of the CSV."""

    timestamp: float
    side: str
    transfer_id: str
    peer: str
    transport: str
    status: str
    blocks: int
    bytes: int
    segments: int
    mean_segment_bytes: float
    queue_ms: float
    prepare_ms: float
    transfer_ms: float
    verify_ms: float
    task_ms: float
    throughput_mib_s: float
    retries: int
    digest_mismatches: int


class PerfCsv:
    """Appends one line per finished transfer; the header goes into an empty file only. Opens at the first line."""

    def __init__(self, path: str | None) -> None:
        self._path = path
        self._file: TextIO | None = None

    def write(self, row: PerfRow) -> None:
        """Append a line; a file that cannot be written ends the CSV with one warning."""
        if self._path is None:
            return
        try:
            if self._file is None:
                Path(self._path).parent.mkdir(parents=True, exist_ok=True)
                self._file = open(self._path, "a", newline="", encoding="utf-8")  # noqa: SIM115 (open until close)
                if self._file.tell() == 0:
                    csv.writer(self._file).writerow([f.name for f in fields(PerfRow)])
            csv.writer(self._file).writerow([getattr(row, f.name) for f in fields(PerfRow)])
            self._file.flush()
        except OSError as error:
            _log.warning("the transfer CSV %s ends here: %s", self._path, error)
            self.close()
            self._path = None

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._file is not None:
            self._file.close()
            self._file = None
