"""The accounting part of an answer: OpenAI's `usage` and our `kvferry` object.

Both say what happened, not what was hoped for: `cached_tokens` counts prompt tokens whose KV was reused, not computed,
on the context side, and ctx_cached + ctx_pulled + recomputed is the whole prompt.
"""

from __future__ import annotations

from typing import Any

from cluster.frontend.answer import Answer
from cluster.frontend.call import Call
from cluster.serve_request import RequestUsage, TurnRecord

__all__ = ["kvferry_object", "partial_usage_object", "turn_record_object", "usage_object"]


def usage_object(answer: Answer) -> dict[str, Any]:
    """OpenAI's usage of a finished answer."""
    usage = answer.usage
    return {
        **partial_usage_object(usage.prompt_tokens, answer.num_tokens),
        "prompt_tokens_details": {"cached_tokens": usage.ctx_cached_tokens + usage.ctx_pulled_tokens},
    }


def partial_usage_object(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    """OpenAI's usage while an answer is on its way: what was reused is not yet known."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def kvferry_object(call: Call, answer: Answer) -> dict[str, Any]:
    """Where the KV of a finished answer came from and went."""
    return {
        "request_id": call.request_id,
        "conversation_id": call.conversation_id,
        "spliced_tokens": call.prompt.spliced_tokens,
        "ignored_fields": list(call.ignored_fields),
        **_usage_fields(answer.usage),
        "completion_tokens": answer.num_tokens,
    }


def turn_record_object(record: TurnRecord) -> dict[str, Any]:
    """A finished turn with the back-flow that followed it."""
    return {
        "request_id": record.request_id,
        "conversation_id": record.conversation_id,
        "finish_reason": None if record.finish_reason is None else str(record.finish_reason),
        **_usage_fields(record.usage),
        "backflow": record.backflow,
        "backflow_reason": record.backflow_reason,
        "gen_to_ctx_blocks": record.gen_to_ctx_blocks,
        "gen_to_ctx_bytes": record.gen_to_ctx_bytes,
        "endpoint_tokens": record.endpoint_tokens,
    }


def _usage_fields(usage: RequestUsage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "ctx_cached_tokens": usage.ctx_cached_tokens,
        "ctx_pulled_tokens": usage.ctx_pulled_tokens,
        "recomputed_tokens": usage.recomputed_tokens,
        "gen_cached_tokens": usage.gen_cached_tokens,
        "transferred_tokens": usage.transferred_tokens,
        "repaired_tokens": usage.repaired_tokens,
        "ctx_to_gen_blocks": usage.ctx_to_gen_blocks,
        "ctx_to_gen_bytes": usage.ctx_to_gen_bytes,
        "ctx_worker": usage.ctx_worker,
        "gen_worker": usage.gen_worker,
        "transport": usage.transport,
        "retries": usage.retries,
        "ttft_ms": _milliseconds(usage.ttft_s),
        "e2e_ms": _milliseconds(usage.e2e_s),
    }


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)
