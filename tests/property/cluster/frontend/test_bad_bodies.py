"""Whatever is posted, the answer is an error object or an answer, never a 500, and the server goes on."""

from __future__ import annotations

import asyncio
import functools
import json
from typing import Any

from fastapi import FastAPI
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.frontend.protocol import ChatCompletionRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from cluster.frontend.unsupported import _UNSUPPORTED
from tests.unit.cluster.frontend.fake_backend import FakeBackend, build_app, client_of, says

ROUTES = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/completions": CompletionRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
LIKELY = st.sampled_from(
    [
        [{"role": "user", "content": "hello"}],
        [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
        [{"role": "assistant", "content": None}],
        "text",
        [1, 2, 3],
        {"include_usage": True},
        {"conversation_id": "c"},
        1,
        0.5,
        "model",
    ]
)


@st.composite
def bodies(draw: st.DrawFn) -> tuple[str, Any]:
    route = draw(st.sampled_from(sorted(ROUTES)))
    names = st.sampled_from([*sorted(ROUTES[route].model_fields), *sorted(_UNSUPPORTED), "unknown"])
    body = draw(st.dictionaries(names, LIKELY | JSON, max_size=6) | JSON)
    if isinstance(body, dict) and draw(st.booleans()):
        body |= {"messages": [{"role": "user", "content": "hello"}], "prompt": "p"}
    return route, body


@functools.cache
def app() -> FastAPI:
    return build_app(FakeBackend(says("ok")))


def post(route: str, content: bytes) -> tuple[int, Any, int]:
    async def run() -> tuple[int, Any, int]:
        async with client_of(app()) as client:
            response = await client.post(route, content=content)
            if response.headers["content-type"].startswith("text/event-stream"):
                parsed: Any = {"stream": response.text}
            else:
                parsed = response.json()
            return response.status_code, parsed, (await client.get("/health")).status_code

    return asyncio.run(run())


@settings(deadline=None, max_examples=150)
@given(case=bodies())
def test_any_json_gets_an_answer_or_a_client_error(case: tuple[str, Any]) -> None:
    route, body = case
    status, parsed, health = post(route, json.dumps(body).encode())
    assert status in (200, 400, 404, 413), parsed
    assert health == 200
    if status != 200:
        assert set(parsed["error"]) == {"message", "type", "param", "code"}
        assert parsed["error"]["message"]
        assert parsed["error"]["type"] == "invalid_request_error"


@settings(deadline=None, max_examples=60)
@given(route=st.sampled_from(sorted(ROUTES)), content=st.binary(max_size=60))
def test_any_bytes_get_a_client_error(route: str, content: bytes) -> None:
    status, parsed, health = post(route, content)
    assert status == 400, parsed
    assert "message" in parsed["error"]
    assert health == 200
