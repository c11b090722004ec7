"""Small pure helpers of the transceiver's door: argument checks, the conversation's digest, a CSV line."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping

import numpy as np

from kvcache.block_table import BlockTable
from kvcache.storage.page_storage import PageStorage
from transceiver.stats import PerfRow
from transceiver.transfer_types import GrantTicket, TransferOutcome

__all__ = ["check_tables", "conversation_digest", "perf_row", "phase_seconds"]


def conversation_digest(conversation_id: str | None) -> bytes:
    """What travels instead of the conversation's id (32 bytes; no id has a digest of its own)."""
    tagged = b"none" if conversation_id is None else b"id:" + conversation_id.encode()
    return hashlib.sha256(tagged).digest()


def check_tables(storage: PageStorage, tables: tuple[BlockTable, ...]) -> None:
    """Raises ValueError unless every row names a page of this storage, and no page twice."""
    seen: set[int] = set()
    for table in tables:
        if not 0 <= table.group < len(storage.layout.groups) or table.group in seen:
            raise ValueError(f"table of group {table.group}: the layout has no such group, or it is given twice")
        seen.add(table.group)
        if not len(table):
            continue
        if int(table.pages.min()) < 0 or int(table.pages.max()) >= storage.num_pages(table.group):
            raise ValueError(f"table of group {table.group} names a page outside the pool")
        if len(np.unique(table.pages)) != len(table):
            raise ValueError(f"table of group {table.group} names one destination page twice")
        if int(table.ordinals.min()) < 0 or int(table.valid_tokens.min()) < 0:
            raise ValueError(f"table of group {table.group} has a negative ordinal or token count")


def perf_row(ticket: GrantTicket, outcome: TransferOutcome) -> PerfRow:
    """The CSV line of a finished pull."""
    seconds = outcome.seconds
    transfer = seconds.get("transfer", 0.0)
    return PerfRow(
        timestamp=time.time(), side="receive", transfer_id=ticket.transfer_id, peer=ticket.address,
        transport=outcome.transport, status=outcome.status.value, blocks=outcome.blocks, bytes=outcome.bytes,
        segments=outcome.segments, mean_segment_bytes=outcome.bytes / outcome.segments if outcome.segments else 0.0,
        queue_ms=seconds.get("queue", 0.0) * 1e3, prepare_ms=seconds.get("prepare", 0.0) * 1e3,
        transfer_ms=transfer * 1e3, verify_ms=seconds.get("verify", 0.0) * 1e3,
        task_ms=seconds.get("total", 0.0) * 1e3,
        throughput_mib_s=outcome.bytes / transfer / 2**20 if transfer > 0 else 0.0,
        retries=outcome.retries, digest_mismatches=outcome.digest_mismatches,
    )  # fmt: skip


def phase_seconds(marks: Mapping[str, float], created: float, now: float) -> dict[str, float]:
    """Times of a pull's phases from the clock at which each ended; they add up to `total`."""
    seconds, last = {}, created
    for name, mark in (("queue", "connect"), ("prepare", "grant"), ("transfer", "data")):
        at = marks.get(mark, last)
        seconds[name], last = at - last, at
    seconds["verify"] = now - last if "data" in marks else 0.0
    seconds["total"] = now - created
    return seconds
