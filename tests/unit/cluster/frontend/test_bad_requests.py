from __future__ import annotations

from typing import Any

import pytest

from cluster.frontend import FrontendSettings
from tests.unit.cluster.frontend.fake_backend import MODEL, FakeBackend, build_app, client_of, says

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]

# route, body, the field that the error names
BAD_FIELDS = [
    (CHAT, {}, "messages"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": "hello"}, "messages"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
    (CHAT, {"messages": [*HELLO, {"role": "robot", "content": "x"}]}, "messages[1].role"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]}, "messages[0]"),
    (CHAT, {"messages": HELLO, "max_tokens": -1}, "max_tokens"),
    (CHAT, {"messages": HELLO, "max_tokens": 0}, "max_tokens"),
    (CHAT, {"messages": HELLO, "max_tokens": "8"}, "max_tokens"),
    (CHAT, {"messages": HELLO, "max_tokens": 1.5}, "max_tokens"),
    (CHAT, {"messages": HELLO, "max_tokens": True}, "max_tokens"),
    (CHAT, {"messages": HELLO, "max_completion_tokens": 0}, "max_completion_tokens"),
    (CHAT, {"messages": HELLO, "min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    (CHAT, {"messages": HELLO, "temperature": 2.5}, "temperature"),
    (CHAT, {"messages": HELLO, "temperature": -0.1}, "temperature"),
    (CHAT, {"messages": HELLO, "top_p": 0}, "top_p"),
    (CHAT, {"messages": HELLO, "top_k": -2}, "top_k"),
    (CHAT, {"messages": HELLO, "seed": 2**63}, "seed"),
    (CHAT, {"messages": HELLO, "stream": "yes"}, "stream"),
    (CHAT, {"messages": HELLO, "stream_options": True}, "stream_options"),
    (CHAT, {"messages": HELLO, "stop": ""}, "stop"),
    (CHAT, {"messages": HELLO, "stop": ["a"] * 17}, "stop"),
    (CHAT, {"messages": HELLO, "stop": 3}, "stop"),
    (CHAT, {"messages": HELLO, "cache_salt": ""}, "cache_salt"),
    (CHAT, {"messages": HELLO, "conversation_params": {"conversation_id": 7}}, "conversation_params.conversation_id"),
    (CHAT, {"messages": HELLO, "prompt_cache_key": "k" * 257}, "prompt_cache_key"),
    (CHAT, {"messages": HELLO, "n": 2}, "n"),
    (CHAT, {"messages": HELLO, "n": True}, "n"),
    (CHAT, {"messages": HELLO, "logprobs": True}, "logprobs"),
    (CHAT, {"messages": HELLO, "tools": [{"type": "function"}]}, "tools"),
    (CHAT, {"messages": HELLO, "tool_choice": "required"}, "tool_choice"),
    (CHAT, {"messages": HELLO, "response_format": {"type": "json_object"}}, "response_format"),
    (CHAT, {"messages": HELLO, "logit_bias": {"5": 1}}, "logit_bias"),
    (CHAT, {"messages": HELLO, "frequency_penalty": 0.5}, "frequency_penalty"),
    (TEXT, {}, "prompt"),
    (TEXT, {"prompt": ""}, "prompt"),
    (TEXT, {"prompt": []}, "prompt"),
    (TEXT, {"prompt": None}, "prompt"),
    (TEXT, {"prompt": ["a", "b"]}, "prompt"),
    (TEXT, {"prompt": [1, "a"]}, "prompt"),
    (TEXT, {"prompt": [-1]}, "prompt"),
    (TEXT, {"prompt": [2**40]}, "prompt"),
    (TEXT, {"prompt": [259]}, "prompt"),
    (TEXT, {"prompt": [True]}, "prompt"),
    (TEXT, {"prompt": "x", "echo": True}, "echo"),
    (TEXT, {"prompt": "x", "best_of": 3}, "best_of"),
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"prompt": "a", "messages": HELLO}, "prompt"),
    ("/detokenize", {"tokens": [-1]}, "tokens"),
    ("/detokenize", {"tokens": [10**30]}, "tokens"),
    ("/detokenize", {"tokens": [400]}, "tokens"),
]


@pytest.mark.parametrize(("route", "body", "param"), BAD_FIELDS)
async def test_wrong_field_is_named_and_the_server_goes_on(route: str, body: dict[str, Any], param: str) -> None:
    async with client_of(build_app(FakeBackend(says("x")))) as client:
        response = await client.post(route, json=body)
        after = await client.post(TEXT, json={"prompt": "x"})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param, error
    assert param.partition("[")[0].partition(".")[0] in error["message"]
    assert error["type"] == "invalid_request_error"
    assert set(error) == {"message", "type", "param", "code"}
    assert after.status_code == 200


async def test_error_says_what_was_sent_and_what_to_send() -> None:
    async with client_of(build_app(FakeBackend(says("x")))) as client:
        response = await client.post(CHAT, json={"messages": HELLO, "temperature": 7, "max_tokens": -5})
    message = response.json()["error"]["message"]
    assert "temperature" in message
    assert "not 7; send a number from 0 to 2" in message
    assert "not -5; send a whole number of at least 1" in message


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"nonsense",
        b"[1]",
        b"3",
        b"null",
        b'"text"',
        b'{"prompt": NaN}',
        b"\xff\xfe",
        b'{"prompt": "\\ud800"}',
        b"[" * 100_000,
        b'{"a":' * 10_000,
        b"{'prompt': 1}",
    ],
)
@pytest.mark.parametrize("route", [CHAT, TEXT, "/tokenize", "/detokenize"])
async def test_body_that_is_no_json_object_is_refused(route: str, raw: bytes) -> None:
    async with client_of(build_app(FakeBackend(says("x")))) as client:
        response = await client.post(route, content=raw)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "invalid_json"


async def test_unknown_model_lists_the_served_one() -> None:
    async with client_of(build_app(FakeBackend(says("x")))) as client:
        for response in [
            await client.post(CHAT, json={"model": "gpt-x", "messages": HELLO}),
            await client.post(TEXT, json={"model": "gpt-x", "prompt": "p"}),
            await client.get("/v1/models/gpt-x"),
        ]:
            assert response.status_code == 404
            error = response.json()["error"]
            assert (error["code"], error["param"]) == ("model_not_found", "model")
            assert MODEL in error["message"]


async def test_unknown_route_and_method_are_error_objects() -> None:
    async with client_of(build_app(FakeBackend(says("x")))) as client:
        missing = await client.get("/v2/nothing")
        method = await client.get(CHAT)
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "unknown_route")
    assert (method.status_code, method.json()["error"]["code"]) == (405, "unknown_method")


async def test_prompt_longer_than_the_model_takes_is_413() -> None:
    async with client_of(build_app(FakeBackend(says("x")), max_seq_len=64)) as client:
        chat = await client.post(CHAT, json={"messages": [{"role": "user", "content": "x" * 64}]})
        ids = await client.post(TEXT, json={"prompt": [5] * 64})
        fits = await client.post(TEXT, json={"prompt": [5] * 63, "max_tokens": 100})
    assert (chat.status_code, chat.json()["error"]["param"]) == (413, "messages")
    assert (ids.status_code, ids.json()["error"]["code"]) == (413, "context_length_exceeded")
    assert "max_seq_len" in ids.json()["error"]["message"]
    assert fits.status_code == 200


async def test_large_body_is_refused_unread() -> None:
    app = build_app(FakeBackend(says("x")), settings=FrontendSettings(max_body_bytes=1000))
    sent = 0

    async def endless() -> Any:
        nonlocal sent
        for _ in range(10_000):
            sent += 1
            yield b"x" * 500

    async with client_of(app) as client:
        declared = await client.post(TEXT, content=b"x" * 2000)
        chunked = await client.post(TEXT, content=endless())
    assert (declared.status_code, declared.json()["error"]["code"]) == (413, "body_too_large")
    assert chunked.status_code == 413
    assert sent <= 4


async def test_session_header_that_is_too_long_is_named() -> None:
    async with client_of(build_app(FakeBackend(says("x")))) as client:
        response = await client.post(TEXT, json={"prompt": "p"}, headers={"x-session-id": "s" * 300})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "x-session-id")


@pytest.mark.parametrize("wait", ["-1", "nan", "inf", "soon"])
async def test_wrong_query_parameter_is_400(wait: str) -> None:
    async with client_of(build_app(FakeBackend(says("x")))) as client:
        response = await client.get(f"/kvferry/requests/abc?wait_s={wait}")
    assert (response.status_code, response.json()["error"]["param"]) == (400, "wait_s")
