"""A request on its way through the cluster, as frozen values: what crosses a process boundary and nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["EngineRequest", "FinishReason", "OutputDelta", "ReuseBreakdown", "SamplingParams"]


class FinishReason(StrEnum):
    """Why a request produced its last token."""

    STOP = "stop"  # an end-of-sequence token or a stop string
    LENGTH = "length"  # max_tokens or the model's length limit
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen.

    A draw depends on (seed, token position) alone, so it is the same on whichever worker and in whatever batch.
    `temperature` 0 is greedy. `top_k` 0 and `top_p` 1.0 are off.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    ignore_eos: bool = False
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class EngineRequest:
    """One request as a worker sees it.

    prompt_ids       int32 (n,), n >= 1
    first_token_ids  tokens already sampled elsewhere (the context worker's first one, or those a client has already
                     received when the request is retried): they count against max_tokens and are not sent again
    """

    request_id: str
    prompt_ids: NDArray[np.int32]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    conversation_id: str | None = None
    cache_salt: str | None = None
    first_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ReuseBreakdown:
    """Where the KV of a prompt came from, in tokens; cached + pulled + recomputed = prompt."""

    prompt_tokens: int
    cached_tokens: int
    pulled_tokens: int
    recomputed_tokens: int


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """What one request produced since the last delta of it."""

    request_id: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    error: str | None = None
    detail: dict[str, Any] = field(default_factory=dict)
