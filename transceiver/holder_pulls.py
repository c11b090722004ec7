"""What the holding side knows of a receiver: what it asks for, and a pull under way."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvcache.storage.page_storage import PageStorage
from transceiver.loop_context import Timer
from transceiver.messages import PullRequest
from transceiver.page_part import PartView
from transceiver.publication import Publication
from transceiver.transfer_types import TransferStatus
from transceiver.transport import Link

__all__ = ["ActivePull", "Asked", "find_waiting", "request_columns"]


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """A request, and who asks over which link. `parts`: which part of a page the receiver shares, per group."""

    link: Link
    request: PullRequest
    parts: tuple[PartView | None, ...]
    worker_id: str


@dataclass(slots=True, eq=False)
class ActivePull:
    link: Link
    request: PullRequest
    parts: tuple[PartView | None, ...]
    publication: Publication
    started: float
    groups: NDArray[np.int32]
    ordinals: NDArray[np.int32]
    valid: NDArray[np.int32]
    waiting: NDArray[np.int64]  # rows that were not granted yet
    timer: Timer | None = None
    reason: str = ""
    status: TransferStatus = TransferStatus.CANCELLED


def request_columns(
    request: PullRequest,
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32], NDArray[np.int64]]:
    """Group, ordinal, valid tokens and index of every requested row."""
    empty = np.empty(0, np.int32)
    columns = (
        np.concatenate([empty, *(np.full(len(g.ordinals), g.group, np.int32) for g in request.groups)]),
        np.concatenate([empty, *(g.ordinals for g in request.groups)]),
        np.concatenate([empty, *(g.valid_tokens for g in request.groups)]),
    )
    return *columns, np.arange(len(columns[0]), dtype=np.int64)


def find_waiting(active: ActivePull, storage: PageStorage) -> tuple[NDArray[np.int32], NDArray[np.uint64], int]:
    """(pages, generations, number of stale rows) of the rows still waiting.

    Page -1: not published, or given out anew since it was.
    """
    waiting = active.waiting
    pages = np.full(len(waiting), -1, np.int32)
    generations = np.zeros(len(waiting), np.uint64)
    stale_rows = 0
    for group in np.unique(active.groups[waiting]).tolist():
        if group >= len(storage.layout.groups):
            continue
        mine = np.flatnonzero(active.groups[waiting] == group)
        at = waiting[mine]
        found, numbers = active.publication.find(group, active.ordinals[at], active.valid[at])
        held = np.flatnonzero(found >= 0)
        stale = storage.generations(group)[found[held]] != numbers[held]
        stale_rows += int(stale.sum())
        found[held[stale]] = -1
        pages[mine], generations[mine] = found, numbers
    return pages, generations, stale_rows
