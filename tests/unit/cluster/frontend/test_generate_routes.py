from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion

from cluster.engine import HashTokenizer
from cluster.errors import EngineFailedError, NotReadyError, QueueFullError, WorkerLostError
from cluster.frontend.protocol import ChatCompletionRequest, unknown_fields
from cluster.request import FinishReason
from tests.unit.cluster.frontend.fake_backend import MODEL, FakeBackend, build_app, client_of, says

TOKENIZER = HashTokenizer()
HELLO = [{"role": "user", "content": "hello"}]


def openai_client(http: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(api_key="none", base_url="http://test/v1", http_client=http, max_retries=0)


def events(body: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in body.split("\n\n") if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


async def test_chat_answer_parses_as_openai_has_it_and_accounts_for_the_prompt() -> None:
    backend = FakeBackend(says("Hi ", "there"))
    async with client_of(build_app(backend)) as client:
        response = await client.post(
            "/v1/chat/completions", json={"model": MODEL, "messages": HELLO, "max_tokens": 8, "temperature": 0}
        )
    answer = ChatCompletion.model_validate(response.json())
    assert response.headers["x-request-id"] == answer.id
    assert answer.choices[0].message.content == "Hi there"
    assert answer.choices[0].finish_reason == "length"
    prompt = TOKENIZER.encode("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n")
    assert backend.requests[0].prompt_ids.tolist() == prompt
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), 8)
    assert answer.usage.total_tokens == len(prompt) + 8
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    kvferry = response.json()["kvferry"]
    assert kvferry["recomputed_tokens"] == len(prompt)
    assert (kvferry["transport"], kvferry["ttft_ms"], kvferry["ignored_fields"]) == ("inproc", 250.0, [])


async def test_second_turn_counts_cached_tokens_and_splices() -> None:
    backend = FakeBackend(says("Hi"))
    async with client_of(build_app(backend)) as client:
        first = (await client.post("/v1/chat/completions", json={"messages": HELLO})).json()
        messages = [*HELLO, first["choices"][0]["message"], {"role": "user", "content": "more"}]
        second = (await client.post("/v1/chat/completions", json={"messages": messages})).json()
        metrics = (await client.get("/metrics")).text
    shared = first["usage"]["total_tokens"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == shared
    assert second["kvferry"]["spliced_tokens"] == shared
    assert f"kvferry_spliced_prompt_tokens_total {float(shared)}" in metrics


async def test_openai_client_streams_with_usage() -> None:
    backend = FakeBackend(says("Hi ", "there"), FinishReason.STOP)
    async with client_of(build_app(backend)) as http:
        stream = await openai_client(http).chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": [{"type": "text", "text": "hello"}]}],
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"return_token_ids": True, "ignore_eos": True, "conversation_params": {"conversation_id": "c"}},
        )
        chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hi there"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    ids = [i for c in chunks if c.choices for i in (c.choices[0].model_extra or {}).get("token_ids", [])]
    assert ids == TOKENIZER.encode("Hi there")
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 8
    assert (chunks[-1].model_extra or {})["kvferry"]["conversation_id"] == "c"
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert backend.requests[0].sampling.ignore_eos


async def test_stream_without_usage_ends_with_the_kvferry_object_then_done() -> None:
    async with client_of(build_app(FakeBackend(says("Hi")))) as client:
        response = await client.post("/v1/chat/completions", json={"messages": HELLO, "stream": True})
    got = events(response.text)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["x-request-id"] == got[0]["id"]
    assert got[-1] == "[DONE]"
    assert got[-2]["choices"][0]["finish_reason"] == "length"
    assert got[-2]["kvferry"]["prompt_tokens"] > 0
    assert "usage" not in got[-2]


async def test_continuous_usage_counts_up() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with client_of(build_app(FakeBackend(says("a", "bc")))) as client:
        response = await client.post("/v1/completions", json={"prompt": "p", "stream": True, "stream_options": options})
    assert [chunk["usage"]["completion_tokens"] for chunk in events(response.text)[:-1]] == [1, 3, 3, 3]


@pytest.mark.parametrize("tokens", [(2,), ()])
async def test_empty_answer_still_has_a_role_and_an_end(tokens: tuple[int, ...]) -> None:
    batches = [tokens] if tokens else []
    async with client_of(build_app(FakeBackend(lambda request: batches, FinishReason.STOP))) as client:
        response = await client.post("/v1/chat/completions", json={"messages": HELLO, "stream": True})
        whole = await client.post("/v1/chat/completions", json={"messages": HELLO})
    chunks = events(response.text)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
    assert whole.json()["choices"][0]["message"]["content"] == ""
    assert whole.json()["usage"]["completion_tokens"] == len(tokens)


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
async def test_prompt_ids_are_returned_once_on_request(route: str) -> None:
    backend = FakeBackend(says("a", "b"))
    body = {"messages": HELLO, "prompt": "p", "return_token_ids": True}
    async with client_of(build_app(backend)) as client:
        whole = (await client.post(route, json=body)).json()
        chunks = events((await client.post(route, json={**body, "stream": True})).text)[:-1]
    expected = backend.requests[0].prompt_ids.tolist()
    places = [part for chunk in [whole, *chunks] for part in [chunk, *chunk["choices"]]]
    assert [part["prompt_token_ids"] for part in places if "prompt_token_ids" in part] == [expected, expected]


async def test_completion_takes_text_or_ids_and_returns_ids() -> None:
    backend = FakeBackend(says("xyz"))
    async with client_of(build_app(backend)) as http:
        client = openai_client(http)
        text = await client.completions.create(model=MODEL, prompt="abc", max_tokens=3)
        ids = await client.completions.create(
            model=MODEL, prompt=TOKENIZER.encode("abc"), max_tokens=3, extra_body={"return_token_ids": True}
        )
        nested = await client.completions.create(model=MODEL, prompt=[TOKENIZER.encode("abc")])
    assert isinstance(text, Completion)
    assert text.choices[0].text == ids.choices[0].text == nested.choices[0].text == "xyz"
    assert (ids.choices[0].model_extra or {})["token_ids"] == TOKENIZER.encode("xyz")
    assert "token_ids" not in (text.choices[0].model_extra or {})
    assert [request.prompt_ids.tolist() for request in backend.requests] == [TOKENIZER.encode("abc")] * 3
    assert [request.sampling.max_tokens for request in backend.requests] == [3, 3, 16]


async def test_sampling_fields_reach_the_cluster() -> None:
    backend = FakeBackend(says("x"))
    body = {
        "prompt": "abc", "max_tokens": 9, "min_tokens": 2, "temperature": 0.5, "top_p": 0.9, "top_k": -1, "seed": -1,
        "stop_token_ids": [70], "cache_salt": "s", "prompt_cache_key": "key",
    }  # fmt: skip
    async with client_of(build_app(backend)) as client:
        await client.post("/v1/completions", json=body)
        await client.post("/v1/completions", json={"prompt": "abc"}, headers={"X-Session-ID": "one"})
        await client.post("/v1/chat/completions", json={"messages": HELLO, "max_completion_tokens": 4, "max_tokens": 9})
        await client.post("/v1/chat/completions", json={"messages": HELLO})
    first, second, third, fourth = backend.requests
    assert (first.sampling.max_tokens, first.sampling.min_tokens, first.sampling.top_k) == (9, 2, 0)
    assert (first.sampling.temperature, first.sampling.top_p, first.sampling.seed) == (0.5, 0.9, 2**63 - 1)
    assert (first.sampling.stop_token_ids, first.cache_salt, first.conversation_id) == ((70,), "s", "key")
    assert (second.sampling.seed, second.sampling.temperature, second.conversation_id) == (99, 1.0, "one")
    assert third.sampling.max_tokens == 4
    assert fourth.sampling.max_tokens == 512 - len(fourth.prompt_ids)


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_string_ends_the_answer_early(stream: bool) -> None:
    backend = FakeBackend(says("one ST", "OP two", "three"))
    async with client_of(build_app(backend)) as client:
        response = await client.post(
            "/v1/completions", json={"prompt": "p", "stop": "STOP", "stream": stream, "return_token_ids": True}
        )
    assert backend.streams[0].stopped_with == len("one STOP")
    assert backend.streams[0].cancels == 0
    if stream:
        chunks = events(response.text)[:-1]
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "one "
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    else:
        answer = response.json()
        assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("one ", "stop")
        assert answer["usage"]["completion_tokens"] == len(answer["choices"][0]["token_ids"]) == len("one STOP")


async def test_unknown_fields_are_ignored_named_and_counted() -> None:
    body = {"prompt": "p", "user": "me", "wobble": 1, "n": 1, "logprobs": None}
    async with client_of(build_app(FakeBackend(says("x")))) as client:
        answer = (await client.post("/v1/completions", json=body)).json()
        metrics = (await client.get("/metrics")).text
    assert answer["kvferry"]["ignored_fields"] == ["user", "wobble"]
    assert "kvferry_http_ignored_fields_total 2.0" in metrics
    assert 'kvferry_http_requests_total{route="completions",status="200"} 1.0' in metrics


def test_unknown_names_inside_an_option_group_are_told_with_their_group() -> None:
    body = {"conversation_params": {"conversationid": "x"}, "stream_options": {"include_usage": True, "nope": 1}}
    assert unknown_fields(ChatCompletionRequest, body) == ["conversation_params.conversationid", "stream_options.nope"]


@pytest.mark.parametrize("stream", [False, True])
async def test_failure_before_the_first_token_is_an_http_error(stream: bool) -> None:
    backend = FakeBackend(lambda request: [WorkerLostError("the worker died; send it again")])
    async with client_of(build_app(backend)) as client:
        response = await client.post("/v1/completions", json={"prompt": "p", "stream": stream})
        again = await client.get("/health")
    assert response.status_code == 502
    assert response.json()["error"]["code"] == "worker_lost"
    assert response.headers["x-request-id"].startswith("cmpl-")
    assert again.status_code == 200


async def test_failure_in_a_stream_is_its_last_event() -> None:
    backend = FakeBackend(lambda request: [(70,), EngineFailedError("the worker failed")])
    async with client_of(build_app(backend)) as http:
        response = await http.post("/v1/completions", json={"prompt": "p", "stream": True})
        stream = await openai_client(http).completions.create(model=MODEL, prompt="p", stream=True)
        with pytest.raises(openai.APIError, match="the worker failed"):
            async for _ in stream:
                pass
        metrics = (await http.get("/metrics")).text
    last = events(response.text)[-1]
    assert last["error"] == {
        "message": "the worker failed", "type": "server_error", "param": None, "code": "engine_failed",
    }  # fmt: skip
    assert "kvferry_http_stream_errors_total 2.0" in metrics


@pytest.mark.parametrize("stream", [False, True])
async def test_internal_error_tells_the_client_nothing_of_the_inside(stream: bool) -> None:
    backend = FakeBackend(lambda request: [RuntimeError("secret detail")])
    async with client_of(build_app(backend)) as client:
        response = await client.post("/v1/completions", json={"prompt": "p", "stream": stream})
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    assert "secret" not in response.text
    assert "Traceback" not in response.text


async def test_answer_that_the_cluster_cancelled_is_an_error_not_a_short_answer() -> None:
    async with client_of(build_app(FakeBackend(says("x"), FinishReason.CANCELLED))) as client:
        response = await client.post("/v1/completions", json={"prompt": "p"})
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "engine_failed"


async def test_full_queue_says_when_to_come_back() -> None:
    backend = FakeBackend(says("x"))
    backend.error = QueueFullError("256 requests are waiting; try again")
    async with client_of(build_app(backend)) as client:
        response = await client.post("/v1/completions", json={"prompt": "p"})
    assert (response.status_code, response.headers["retry-after"]) == (429, "1")
    assert response.json()["error"]["type"] == "rate_limit_error"


async def test_not_ready_is_for_the_cluster_to_say_and_becomes_503() -> None:
    backend = FakeBackend(says("x"))
    backend.error = NotReadyError("no generation worker is up")
    async with client_of(build_app(backend)) as client:
        response = await client.post("/v1/completions", json={"prompt": "p"})
        assert (response.status_code, response.json()["error"]["code"]) == (503, "not_ready")
        backend.error = None
        backend.ready = False  # a worker is being restarted: the cluster may wait for it
        assert (await client.post("/v1/completions", json={"prompt": "p"})).status_code == 200
