"""Server-sent events in, one answer out."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cluster.chat import ChatError, KvUsage
from cluster.chat.stream_reader import StreamReader


def data(**fields: Any) -> str:
    return f"data: {json.dumps(fields)}"


def test_chat_chunks_become_an_answer() -> None:
    reader = StreamReader()
    lines = [
        ": keep-alive",
        data(id="r1", choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}]),
        "",
        data(id="r1", choices=[{"index": 0, "delta": {"content": "Hel"}, "token_ids": [1, 2]}]),
        data(id="r1", choices=[{"index": 0, "delta": {"content": "lo"}, "token_ids": [3]}]),
        data(id="r1", choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}]),
        data(
            id="r1",
            choices=[],
            usage={"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}},
            kvferry={"ctx_cached_tokens": 4, "recomputed_tokens": 5, "ttft_ms": None, "something_new": 1},
            prompt_token_ids=[7, 8, 9],
        ),
        "data: [DONE]",
    ]
    assert [reader.feed(line) for line in lines] == ["", "", "", "Hel", "lo", "", "", ""]
    answer = reader.answer(0.5)
    assert (answer.request_id, answer.text, answer.token_ids) == ("r1", "Hello", (1, 2, 3))
    assert (answer.prompt_token_ids, answer.finish_reason, answer.ttft_s) == ((7, 8, 9), "stop", 0.5)
    assert (answer.prompt_tokens, answer.completion_tokens, answer.cached_tokens) == (9, 3, 4)
    assert answer.usage == KvUsage(ctx_cached_tokens=4, recomputed_tokens=5)


def test_completion_chunks_carry_text() -> None:
    reader = StreamReader()
    assert reader.feed(data(id="r", choices=[{"text": "x", "token_ids": [5]}])) == "x"
    assert reader.first_token_seen


def test_a_token_without_text_counts_as_the_first() -> None:
    reader = StreamReader()
    reader.feed(data(id="r", choices=[{"delta": {}, "token_ids": [5]}]))
    assert reader.first_token_seen


def test_an_error_event_is_its_message() -> None:
    with pytest.raises(ChatError, match="worker died"):
        StreamReader().feed(data(error={"message": "worker died", "code": "worker_lost"}))
    with pytest.raises(ChatError, match="plain"):
        StreamReader().feed(data(error="plain"))


def test_a_cut_stream_is_no_answer() -> None:
    reader = StreamReader()
    reader.feed(data(id="r", choices=[{"delta": {"content": "x"}}]))
    with pytest.raises(ChatError, match="middle"):
        reader.answer(0.0)


def test_rubbish_is_told() -> None:
    with pytest.raises(ChatError, match="not JSON"):
        StreamReader().feed("data: {")
