"""Whether a request fits the model and the pools of every worker, decided before anything is sent. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cluster.errors import InvalidRequestError, PromptTooLongError
from cluster.serve_request import ServeRequest
from cluster.worker import WorkerInfo

__all__ = ["fitted"]


def fitted(request: ServeRequest, workers: Sequence[WorkerInfo]) -> ServeRequest:
    """The request with max_tokens cut to what fits. Raises when the prompt itself cannot."""
    prompt_tokens = len(request.prompt_ids)
    if prompt_tokens == 0:
        raise InvalidRequestError("the prompt is empty: send at least one token", param="prompt")
    max_seq_len = min((info.max_seq_len for info in workers), default=prompt_tokens + 1)
    capacity = min((info.capacity_tokens for info in workers), default=prompt_tokens + 1)
    if prompt_tokens >= max_seq_len:
        raise PromptTooLongError(
            f"the prompt has {prompt_tokens} tokens, but this server takes at most {max_seq_len - 1} "
            f"(engine.max_seq_len is {max_seq_len}, one token is left for the answer): shorten the prompt",
            param="prompt",
        )
    if prompt_tokens >= capacity:
        raise PromptTooLongError(
            f"the prompt has {prompt_tokens} tokens, but the KV pool can hold only {capacity}: shorten the prompt "
            "or raise kv_cache_config.max_tokens",
            param="prompt",
        )
    room = min(max_seq_len, capacity) - prompt_tokens
    if request.sampling.max_tokens > room:
        request = replace(request, sampling=replace(request.sampling, max_tokens=room))
    return request
