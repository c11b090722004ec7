"""What the client makes of refusals and of servers that are not there; the good case is the demo's test."""

from __future__ import annotations

import json

import httpx
import pytest

from cluster.chat import ChatError, KvferryClient


def client_of(handler: httpx.MockTransport) -> KvferryClient:
    return KvferryClient("http://server", transport=handler, api_key="k")


async def test_bodies_and_headers_are_as_the_interface_wants_them() -> None:
    seen: list[httpx.Request] = []

    def handle(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, text='data: {"id":"r","choices":[{"delta":{"content":"x"}}]}\n\ndata: [DONE]\n\n')

    pieces: list[str] = []
    async with client_of(httpx.MockTransport(handle)) as client:
        answer = await client.chat(
            [{"role": "user", "content": "hi"}], conversation_id="c", max_tokens=3, on_text=pieces.append
        )
        await client.complete([1, 2], temperature=0.0)
    assert answer.text == "x"
    assert pieces == ["x"]
    body = json.loads(seen[0].content)
    assert body["conversation_params"] == {"conversation_id": "c"}
    assert (body["max_tokens"], body["stream"], body["stream_options"]) == (3, True, {"include_usage": True})
    assert seen[0].headers["authorization"] == "Bearer k"
    assert json.loads(seen[1].content)["prompt"] == [1, 2]


@pytest.mark.parametrize(
    ("response", "words"),
    [
        (httpx.Response(413, json={"error": {"message": "too long"}}), "413: too long"),
        (httpx.Response(502, text="bad gateway"), "502: bad gateway"),
        (httpx.Response(500, json=["x"]), "500"),
    ],
)
async def test_a_refusal_is_its_message(response: httpx.Response, words: str) -> None:
    async with client_of(httpx.MockTransport(lambda request: response)) as client:
        with pytest.raises(ChatError, match=words):
            await client.chat([{"role": "user", "content": "hi"}])
        with pytest.raises(ChatError, match=words):
            await client.request_record("r", wait_s=1.0)


async def test_no_server_names_the_command_that_starts_one() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    async with client_of(httpx.MockTransport(refuse)) as client:
        with pytest.raises(ChatError, match="kvferry serve"):
            await client.models()


async def test_a_broken_connection_is_told() -> None:
    def cut(request: httpx.Request) -> httpx.Response:
        raise httpx.ReadError("cut", request=request)

    async with client_of(httpx.MockTransport(cut)) as client:
        with pytest.raises(ChatError, match="failed: cut"):
            await client.chat([{"role": "user", "content": "hi"}])
