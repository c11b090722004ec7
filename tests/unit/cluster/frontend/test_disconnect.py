"""A client that goes away cancels its answer, wherever it is; a waiting one is kept alive. Plain ASGI, no sockets."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from fastapi import FastAPI

from cluster.errors import TransferFailedError
from cluster.frontend import FrontendSettings
from cluster.frontend.disconnect import run_while_connected
from tests.unit.cluster.frontend.fake_backend import FakeBackend, FakeStream, build_app, client_of

DEADLINE_S = 20.0


class AsgiClient:
    """One request whose client can hang up."""

    def __init__(self, app: FastAPI, path: str, body: dict[str, Any]) -> None:
        self._app = app
        self._path = path
        self._request = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
        self.gone = asyncio.Event()
        self.sent: list[Any] = []
        self.got_body = asyncio.Event()

    async def run(self) -> None:
        scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.4"}, "http_version": "1.1", "method": "POST",
            "path": self._path, "raw_path": self._path.encode(), "root_path": "", "scheme": "http", "query_string": b"",
            "headers": [], "client": ("test", 1), "server": ("test", 80), "state": {},
        }  # fmt: skip
        async with asyncio.timeout(DEADLINE_S):
            await self._app(scope, self._receive, self._send)

    async def _receive(self) -> Any:
        if self._request:
            return self._request.pop()
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.sent.append(message)
        if message.get("body"):
            self.got_body.set()

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


async def begun(backend: FakeBackend) -> FakeStream:
    async with asyncio.timeout(DEADLINE_S):
        while not backend.streams:
            await asyncio.sleep(0)
    return backend.streams[0]


@pytest.mark.parametrize("stream", [False, True])
async def test_hanging_up_before_the_first_token_cancels(stream: bool) -> None:
    backend = FakeBackend(lambda request: [asyncio.Event()])
    client = AsgiClient(build_app(backend), "/v1/completions", {"prompt": "p", "stream": stream})
    task = asyncio.create_task(client.run())
    answer = await begun(backend)
    client.gone.set()
    await task
    assert answer.cancels == 1
    assert b"data:" not in client.body


async def test_hanging_up_in_the_middle_of_a_stream_cancels() -> None:
    backend = FakeBackend(lambda request: [(70,), asyncio.Event()])
    app = build_app(backend)
    client = AsgiClient(app, "/v1/completions", {"prompt": "p", "stream": True})
    task = asyncio.create_task(client.run())
    answer = await begun(backend)
    async with asyncio.timeout(DEADLINE_S):
        await client.got_body.wait()
    assert answer.cancels == 0
    client.gone.set()
    await task
    assert answer.cancels == 1
    assert b"[DONE]" not in client.body
    async with client_of(app) as http:
        assert "kvferry_http_client_disconnects_total 1.0" in (await http.get("/metrics")).text


async def test_finished_answer_is_not_cancelled() -> None:
    backend = FakeBackend(lambda request: [(70,)])
    client = AsgiClient(build_app(backend), "/v1/completions", {"prompt": "p", "stream": True})
    await client.run()
    assert backend.streams[0].cancels == 0
    assert client.body.endswith(b"data: [DONE]\n\n")


async def test_waiting_stream_is_kept_alive_by_comments_and_goes_on() -> None:
    gate = asyncio.Event()
    backend = FakeBackend(lambda request: [gate, (70,)])
    app = build_app(backend, settings=FrontendSettings(keep_alive_s=0.01))
    client = AsgiClient(app, "/v1/completions", {"prompt": "p", "stream": True})
    task = asyncio.create_task(client.run())
    async with asyncio.timeout(DEADLINE_S):
        await client.got_body.wait()
    assert client.body.startswith(b": keep-alive\n\n")
    gate.set()
    await task
    assert client.body.endswith(b"data: [DONE]\n\n")


async def test_error_after_a_keep_alive_is_an_event() -> None:
    gate = asyncio.Event()
    backend = FakeBackend(lambda request: [gate, TransferFailedError("the link is down")])
    app = build_app(backend, settings=FrontendSettings(keep_alive_s=0.01))
    client = AsgiClient(app, "/v1/completions", {"prompt": "p", "stream": True})
    task = asyncio.create_task(client.run())
    async with asyncio.timeout(DEADLINE_S):
        await client.got_body.wait()
    gate.set()
    await task
    assert client.sent[0]["status"] == 200
    assert b'"code":"kv_transfer_failed"' in client.body
    assert b"[DONE]" not in client.body


async def test_cancel_that_hangs_is_given_up() -> None:
    backend = FakeBackend(lambda request: [asyncio.Event()])
    app = build_app(backend, settings=FrontendSettings(cancel_timeout_s=0.01))
    client = AsgiClient(app, "/v1/completions", {"prompt": "p"})
    task = asyncio.create_task(client.run())
    answer = await begun(backend)

    async def hangs() -> None:
        await asyncio.Event().wait()

    answer.cancel = hangs  # type: ignore[method-assign]
    client.gone.set()
    await task
    assert client.sent[0]["status"] == 499


async def test_hanging_up_while_the_body_is_sent_is_no_server_error() -> None:
    client = AsgiClient(build_app(FakeBackend(lambda request: [])), "/v1/completions", {})
    client._request = [{"type": "http.request", "body": b'{"prompt": ', "more_body": True}]
    client.gone.set()
    await client.run()
    assert client.sent[0]["status"] == 499


async def test_result_that_comes_in_the_moment_of_cancelling_is_given_back() -> None:
    begun_work, gate = asyncio.Event(), asyncio.Event()
    discarded: list[str] = []

    async def work() -> str:
        begun_work.set()
        await gate.wait()
        return "result"

    async def never() -> Any:
        await asyncio.Event().wait()

    async def discard(result: str) -> None:
        discarded.append(result)

    task = asyncio.create_task(run_while_connected(never, work(), discard))
    await begun_work.wait()
    gate.set()
    await asyncio.sleep(0)  # now the work is done, and its waiter has not been woken yet
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert discarded == ["result"]


async def test_leaving_between_the_first_token_and_the_status_line_cancels() -> None:
    backend = FakeBackend(lambda request: [(70,), asyncio.Event()])
    app = build_app(backend)
    for wait in range(40):  # loop iterations until the caller is cancelled: one of them hits the moment
        client = AsgiClient(app, "/v1/completions", {"prompt": "p", "stream": True})
        task = asyncio.create_task(client.run())
        for _ in range(wait):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert len(backend.streams) > 10
    assert [stream.cancels for stream in backend.streams] == [1] * len(backend.streams)
