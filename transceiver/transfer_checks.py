"""Small pure helpers of the transceiver's door: argument checks, the conversation's digest, a CSV line."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from kvcache.block_table import BlockTable
from kvcache.storage.page_storage import PageStorage
from transceiver.stats import PerfRow
from transceiver.transfer_types import GrantTicket, TransferOutcome

__all__ = [
    "check_identity",
    "check_seconds",
    "check_tables",
    "check_ticket",
    "conversation_digest",
    "perf_row",
    "phase_seconds",
]

_FEW_ROWS = 64  # below it a list is checked faster than an array


def conversation_digest(conversation_id: str | None) -> bytes:
    """What travels instead of the conversation's id (32 bytes; no id has a digest of its own)."""
    tagged = b"none" if conversation_id is None else b"id:" + conversation_id.encode()
    return hashlib.sha256(tagged).digest()


def check_tables(storage: PageStorage, tables: tuple[BlockTable, ...]) -> None:
    """Raises ValueError unless every row names a page of this storage, none twice, and tokens that a block can hold."""
    seen: set[int] = set()
    most = storage.layout.tokens_per_block
    for table in tables:
        group = table.group
        if not 0 <= group < len(storage.layout.groups) or group in seen:
            raise ValueError(f"table of group {group}: the layout has no such group, or it is given twice")
        seen.add(group)
        if not len(table):
            continue
        for name in ("ordinals", "pages", "generations", "valid_tokens"):
            if getattr(table, name).dtype.kind not in "iu":
                raise ValueError(f"table of group {group}: its {name} are not integers")
        lowest, highest = _span(table.pages)
        if lowest < 0 or highest >= storage.num_pages(group):
            raise ValueError(
                f"table of group {group} names a page outside the pool: {lowest} to {highest} of "
                f"{storage.num_pages(group)} pages"
            )
        if _repeats(table.pages):
            raise ValueError(f"table of group {group} names one page twice")
        lowest, highest = _span(table.valid_tokens)
        if lowest < 1 or highest > most:
            raise ValueError(
                f"table of group {group}: valid_tokens of {lowest} to {highest}, a block holds 1 to {most} tokens"
            )
        if int(table.ordinals[0]) < 0:  # they increase
            raise ValueError(f"table of group {group} has a negative ordinal")


def _span(column: NDArray[np.int32]) -> tuple[int, int]:
    """Smallest and greatest value; `column` is not empty."""
    if len(column) > _FEW_ROWS:
        return int(column.min()), int(column.max())
    values = column.tolist()
    return min(values), max(values)


def _repeats(column: NDArray[np.int32]) -> bool:
    """True when a value occurs more than once."""
    if len(column) <= _FEW_ROWS:
        return len(set(column.tolist())) != len(column)
    ordered = np.sort(column)  # several times faster than np.unique
    return bool((ordered[1:] == ordered[:-1]).any())


def check_seconds(name: str, value: object) -> float:
    """`value` as seconds. Raises ValueError unless it is a finite number above 0."""
    if isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool):
        try:
            seconds = float(value)
        except OverflowError:
            seconds = math.inf
        if 0 < seconds < math.inf:
            return seconds
    raise ValueError(f"{name} is {str(value)[:40]!r}: write a finite number of seconds above 0, such as 30.0")


def check_identity(transfer_id: object, scope: object, receiver: object = None) -> None:
    """Raises ValueError for what no message can carry: ids and scopes of a wrong type, or too long."""
    _check_text("transfer_id", transfer_id)
    if receiver is not None:
        _check_text("receiver", receiver)
    if type(scope) is not bytes or len(scope) > 256:
        raise ValueError(f"scope is of type {type(scope).__name__}: write at most 256 bytes, such as b'' for no scope")


def check_ticket(ticket: object) -> None:
    """Raises ValueError for what cannot be a ticket that publish() made: another type, or damaged."""
    if not isinstance(ticket, GrantTicket):
        raise ValueError(f"the ticket is of type {type(ticket).__name__}: hand over what publish() made, as it is")
    _check_text("the ticket's transfer_id", ticket.transfer_id)
    if type(ticket.token) is not bytes or len(ticket.token) > 64:
        raise ValueError("the ticket's token is not what publish() made: hand the ticket over as it is")
    if type(ticket.address) is not str:
        raise ValueError("the ticket's address is not text: hand the ticket over as publish() made it")


def _check_text(name: str, value: object) -> None:
    if not isinstance(value, str) or len(value) > 256:
        raise ValueError(f"{name} is not text of at most 256 characters")
    value.encode()  # a lone surrogate: UnicodeEncodeError is a ValueError


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
