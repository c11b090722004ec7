"""The application under uvicorn, as users run it: a closed connection reaches the answer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import httpx
import uvicorn

from tests.unit.cluster.frontend.fake_backend import FakeBackend, build_app

DEADLINE_S = 20.0


@contextlib.asynccontextmanager
async def served(backend: FakeBackend) -> AsyncIterator[str]:
    server = uvicorn.Server(uvicorn.Config(build_app(backend), host="127.0.0.1", port=0, log_level="warning"))
    task = asyncio.create_task(server.serve())
    try:
        async with asyncio.timeout(DEADLINE_S):
            while not server.started:
                await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        await task


async def test_closed_connection_cancels_the_answer() -> None:
    backend = FakeBackend(lambda request: [(70,), asyncio.Event()])
    async with served(backend) as url, httpx.AsyncClient(base_url=url) as client:
        async with client.stream("POST", "/v1/completions", json={"prompt": "p", "stream": True}) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                if line.startswith("data:"):
                    break
        async with asyncio.timeout(DEADLINE_S):
            while backend.streams[0].cancels == 0:
                await asyncio.sleep(0.01)
        assert (await client.get("/health")).status_code == 200


async def test_refused_large_body_leaves_the_server_serving() -> None:
    backend = FakeBackend(lambda request: [(70,)])
    async with served(backend) as url, httpx.AsyncClient(base_url=url) as client:
        with contextlib.suppress(httpx.WriteError, httpx.ReadError):  # the server may close before all is sent
            refused = await client.post("/v1/completions", content=b" " * (17 * 1024 * 1024))
            assert refused.status_code == 413
        assert (await client.post("/v1/completions", json={"prompt": "p"})).status_code == 200
