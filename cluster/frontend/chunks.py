"""Formats answers as OpenAI's objects: whole answers, and the chunks of a stream. No I/O."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Any

from cluster.frontend.answer import Answer
from cluster.frontend.call import Call
from cluster.frontend.streaming import event
from cluster.frontend.text_output import TextDelta
from cluster.frontend.usage import kvferry_object, partial_usage_object, usage_object

__all__ = ["AnswerFormat"]

_NOTHING = TextDelta("", ())


class AnswerFormat:
    """One call's answer in the shape of its endpoint."""

    def __init__(self, call: Call, *, model_name: str, created: int) -> None:
        self._call = call
        self._head = {"id": call.request_id, "created": created, "model": model_name}

    def whole(self, answer: Answer) -> dict[str, Any]:
        """The body of a finished answer."""
        choice: dict[str, Any] = {"index": 0, "finish_reason": str(answer.finish_reason), "logprobs": None}
        if self._call.is_chat:
            choice["message"] = {"role": "assistant", "content": answer.text, "refusal": None}
        else:
            choice["text"] = answer.text
        if self._call.request.return_token_ids:
            choice["token_ids"] = list(answer.token_ids)
        return {
            **self._head,
            "object": "chat.completion" if self._call.is_chat else "text_completion",
            "choices": [choice],
            "usage": usage_object(answer),
            **self._facts(answer),
        }

    async def stream(self, answer: Answer, on_end: Callable[[], None]) -> AsyncGenerator[bytes, None]:
        """The chunks of an answer as events; `on_end` is called when the answer is complete, before its last chunk."""
        options = self._call.request.stream_options
        include_usage = bool(options and options.include_usage)
        continuous = include_usage and bool(options and options.continuous_usage_stats)
        deltas = answer.deltas()
        first = True
        try:
            async for delta in deltas:
                if first and self._call.is_chat:
                    yield self._event([self._choice(_NOTHING, role=True)])
                if delta.text or self._call.request.return_token_ids:
                    extra = {"usage": self._usage_so_far(answer)} if continuous else {}
                    yield self._event([self._choice(delta)], **extra)
                first = False
        finally:
            await deltas.aclose()
        on_end()
        last = self._choice(_NOTHING, role=first, finish_reason=str(answer.finish_reason))
        facts = self._facts(answer)
        if not include_usage:
            yield self._event([last], **facts)
            return
        extra = {"usage": self._usage_so_far(answer)} if continuous else {}
        yield self._event([last], **extra)
        yield self._event([], usage=usage_object(answer), **facts)

    def _facts(self, answer: Answer) -> dict[str, Any]:
        """Our own fields: the accounting and, when token ids were asked for, the prompt as the cluster saw it."""
        facts: dict[str, Any] = {"kvferry": kvferry_object(self._call, answer)}
        if self._call.request.return_token_ids:
            facts["prompt_token_ids"] = self._call.prompt.token_ids.tolist()
        return facts

    def _usage_so_far(self, answer: Answer) -> dict[str, Any]:
        return partial_usage_object(len(self._call.prompt.token_ids), answer.num_tokens)

    def _event(self, choices: list[dict[str, Any]], **extra: Any) -> bytes:
        kind = "chat.completion.chunk" if self._call.is_chat else "text_completion"
        return event({**self._head, "object": kind, "choices": choices, **extra})

    def _choice(self, delta: TextDelta, *, role: bool = False, finish_reason: str | None = None) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish_reason, "logprobs": None}
        if self._call.is_chat:
            body: dict[str, Any] = {"role": "assistant"} if role else {}
            if delta.text or role:
                body["content"] = delta.text
            choice["delta"] = body
        else:
            choice["text"] = delta.text
        if self._call.request.return_token_ids and not role and finish_reason is None:
            choice["token_ids"] = list(delta.token_ids)
        return choice
