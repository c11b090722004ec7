"""What the holding side remembers of a receiver: a pull under way, or a request that came before its publication."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from transceiver.loop_context import Timer
from transceiver.messages import PullRequest
from transceiver.page_part import PartView
from transceiver.publication import Publication
from transceiver.transfer_types import TransferStatus
from transceiver.transport import Link

__all__ = ["ActivePull", "ParkedRequest", "request_columns"]


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


@dataclass(slots=True, eq=False)
class ParkedRequest:
    link: Link
    request: PullRequest
    parts: tuple[PartView | None, ...]
    timer: Timer
    worker_id: str


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
