"""What the frontend asks of the orchestrator, and what it learns about how a request was served."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from cluster.request import FinishReason, SamplingParams

__all__ = ["RequestUsage", "ServeRequest", "TurnRecord"]


@dataclass(frozen=True, slots=True, eq=False)
class ServeRequest:
    """A request of a client. `prompt_ids` is int32 (n,), n >= 1; `request_id` need not be unique."""

    request_id: str
    prompt_ids: NDArray[np.int32]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    conversation_id: str | None = None
    cache_salt: str | None = None


@dataclass(frozen=True, slots=True)
class RequestUsage:
    """Where the KV of a prompt came from and what moved.

    On the side that computes the prompt: ctx_cached_tokens (found in its cache) + ctx_pulled_tokens (pulled from a peer
    for this request) + recomputed_tokens = prompt_tokens. On the generation side gen_cached_tokens of the prompt were
    there already and transferred_tokens came from the context worker; repaired_tokens arrived damaged and were computed
    again. In aggregated mode the one worker stands for the context side.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    ctx_cached_tokens: int = 0
    ctx_pulled_tokens: int = 0
    recomputed_tokens: int = 0
    gen_cached_tokens: int = 0
    transferred_tokens: int = 0
    repaired_tokens: int = 0
    ctx_to_gen_blocks: int = 0
    ctx_to_gen_bytes: int = 0
    ctx_worker: str | None = None
    gen_worker: str | None = None
    transport: str | None = None
    retries: int = 0
    ttft_s: float | None = None
    e2e_s: float | None = None


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """A served request, kept for a while: its usage, its end, and what flowed back to the context side.

    backflow: "off", "pending", or the status of the transfer: "done", "failed", "timed_out", or "cancelled" when the
    context side declined (computing is cheaper, or it has no room); `backflow_reason` says why.
    """

    request_id: str
    conversation_id: str | None
    finish_reason: FinishReason | None
    usage: RequestUsage
    backflow: str = "off"
    backflow_reason: str = ""
    gen_to_ctx_blocks: int = 0
    gen_to_ctx_bytes: int = 0
    endpoint_tokens: int | None = None
