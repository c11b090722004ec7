"""What workers are asked and what they answer: frozen values that cross process boundaries."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from cluster.request import FinishReason
from cluster.scheduler import SchedulerStats
from kvcache import CacheStats
from transceiver import GrantTicket, TransceiverStats, TransferOutcome

__all__ = [
    "Admission",
    "AdmissionStatus",
    "BackflowResult",
    "CacheShortfall",
    "OutputDelta",
    "PrefillResult",
    "PrefixLoan",
    "TurnHandoff",
    "WorkerInfo",
    "WorkerRole",
    "WorkerStats",
]


class WorkerRole(StrEnum):
    """What a worker is for. An aggregated worker does both halves of a request itself."""

    CONTEXT = "context"
    GENERATION = "generation"
    AGGREGATED = "aggregated"


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """Who a worker is. `incarnation` changes with every start of its process."""

    worker_id: str
    role: WorkerRole
    incarnation: str
    pid: int
    host: str
    transceiver_address: str
    layout_fingerprint: str
    tokens_per_block: int
    page_bytes: int
    capacity_tokens: int
    max_seq_len: int


@dataclass(frozen=True, slots=True)
class PrefillResult:
    """A prompt whose KV stands on a context worker, its first token, and the ticket to fetch the KV with.

    `finish_reason` is HANDOFF when the answer goes on elsewhere; else it ended with this token and `ticket` is None.
    cached_tokens (found in this worker's cache) + pulled_tokens (from a peer, see `PrefixLoan`) + recomputed_tokens is
    the prompt. `pull` is how that transfer went; None when there was none.
    """

    token_id: int
    finish_reason: FinishReason
    cached_tokens: int
    recomputed_tokens: int
    ticket: GrantTicket | None
    seconds: float
    pulled_tokens: int = 0
    pull: TransferOutcome | None = None


@dataclass(frozen=True, slots=True)
class CacheShortfall:
    """A context worker has less of a prompt than it was expected to have: only `cached_tokens`. Nothing was done."""

    cached_tokens: int


@dataclass(frozen=True, slots=True)
class PrefixLoan:
    """The first `num_tokens` tokens of a prompt, a whole number of blocks, granted to the context worker that shows
    `ticket`. The holder keeps the grant under `loan_id` until it was pulled, released, or its lease ends.
    """

    loan_id: str
    num_tokens: int
    ticket: GrantTicket


class AdmissionStatus(StrEnum):
    """Whether a generation worker took a request."""

    RUNNING = "running"
    TRANSFER_FAILED = "transfer_failed"


@dataclass(frozen=True, slots=True)
class Admission:
    """A generation worker's answer: the request decodes now, or its KV did not arrive.

    cached_tokens       prompt tokens whose KV this worker already had
    transferred_tokens  prompt tokens whose KV was pulled and verified
    repaired_tokens     prompt tokens that arrived damaged and are computed here instead
    """

    status: AdmissionStatus
    cached_tokens: int
    transferred_tokens: int
    repaired_tokens: int
    transfer: TransferOutcome | None


@dataclass(frozen=True, slots=True, eq=False)
class TurnHandoff:
    """The end of a turn, for the context worker that began it.

    token_ids      int32: prompt and answer, the last sampled token (which has no KV) included
    prompt_tokens  how many of them are the prompt
    finish_reason  why the answer ended
    ticket         grants the blocks that the generation worker has and the context worker may lack; None = take nothing
    """

    request_id: str
    conversation_id: str | None
    cache_salt: str | None
    token_ids: NDArray[np.int32]
    ticket: GrantTicket | None
    prompt_tokens: int
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True, eq=False)
class OutputDelta:
    """What one request produced on a generation worker since the last delta of it.

    The last one carries `finish_reason`, and how the turn ended here: `cached_tokens` of the prompt were found in this
    worker's cache, and `ticket` grants the turn's blocks to the context side (None when back-flow is off).
    """

    request_id: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    error: str | None = None
    cached_tokens: int | None = None
    ticket: GrantTicket | None = None


@dataclass(frozen=True, slots=True)
class BackflowResult:
    """What a context worker took of an answer. `endpoint_tokens` is where the turn ends in its cache."""

    endpoint_tokens: int
    already_cached_tokens: int
    transfer: TransferOutcome | None


@dataclass(frozen=True, slots=True)
class WorkerStats:
    """A worker's counters, for metrics."""

    info: WorkerInfo
    cache: CacheStats
    scheduler: SchedulerStats
    transceiver: TransceiverStats | None
    repaired_blocks: int
    open_grants: int
    busy_s: float
