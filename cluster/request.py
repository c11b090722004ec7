"""A request on its way through the cluster, as frozen values: what crosses a process boundary and nothing else."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

__all__ = ["EngineRequest", "FinishReason", "SamplingParams", "conversation_key"]


class FinishReason(StrEnum):
    """Why a request produced its last token."""

    STOP = "stop"  # an end-of-sequence token or a stop string
    LENGTH = "length"  # max_tokens or the model's length limit
    HANDOFF = "handoff"  # a context worker's part is done; the answer goes on elsewhere
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
    kv_receiver      the worker that will pull what this request's worker grants, if it is known: nobody else may, and
                     when it dies the grant ends at once instead of at its lease's end
    """

    request_id: str
    prompt_ids: NDArray[np.int32]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    conversation_id: str | None = None
    cache_salt: str | None = None
    first_token_ids: tuple[int, ...] = ()
    kv_receiver: str | None = None

    @property
    def known_ids(self) -> NDArray[np.int32]:
        """int32: the prompt and the tokens sampled elsewhere (a copy)."""
        return np.concatenate([self.prompt_ids, np.asarray(self.first_token_ids, np.int32)]).astype(np.int32)


def conversation_key(conversation_id: str | None, cache_salt: str | None) -> str | None:
    """What a conversation is called inside: equal ids of two tenants (salts) are two conversations."""
    if conversation_id is None or cache_salt is None:
        return conversation_id
    return f"{hashlib.sha256(cache_salt.encode()).hexdigest()}:{conversation_id}"
