"""The HTTP surface over real workers on the hash model, in one process: reuse from text history, stops, disconnects."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from cluster.config import ClusterConfig
from cluster.engine import load_tokenizer
from cluster.frontend import create_app
from cluster.local_cluster import local_cluster
from cluster.orchestrator import Orchestrator

MAX_SEQ_LEN = 2048
DEADLINE_S = 20.0


@contextlib.asynccontextmanager
async def served() -> AsyncIterator[tuple[Orchestrator, httpx.AsyncClient]]:
    config = ClusterConfig.model_validate(
        {
            "model": "hash",
            "engine": {"max_num_tokens": 64, "max_seq_len": MAX_SEQ_LEN},
            "kv_cache_config": {
                "tokens_per_block": 16,
                "max_tokens": 4096,
                "block_reuse_config": {"policy": "per_conversation", "max_num_turns": 5},
            },
            "cache_transceiver_config": {"backend": "inproc", "kv_transfer_timeout_ms": 10000},
        }
    )

    async def no_metrics() -> bytes:
        return b""

    async with local_cluster(config) as orchestrator:
        app = create_app(
            orchestrator,
            load_tokenizer("hash"),
            model_name="hash",
            server_config=config.server,
            max_seq_len=MAX_SEQ_LEN,
            metrics_text=no_metrics,
        )
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=DEADLINE_S) as client:
            yield orchestrator, client


async def books_balance(orchestrator: Orchestrator) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while orchestrator.in_flight or any(
            worker.open_grants or worker.cache.open_sequences or worker.cache.peer_pins
            for worker in await orchestrator.stats()
        ):
            await asyncio.sleep(0.01)
    for handle in orchestrator.fleet.handles:
        await handle.check_integrity()


@pytest.mark.parametrize("with_id", [True, False])
async def test_history_as_text_reuses_all_but_the_new_message(with_id: bool) -> None:
    messages: list[dict[str, str]] = [{"role": "system", "content": "Answer with care. " * 8}]
    fields: dict[str, Any] = {"temperature": 1, "seed": 5, "max_tokens": 24, "ignore_eos": True}
    if with_id:
        fields["conversation_params"] = {"conversation_id": "talk"}
    endpoint = 0
    async with served() as (orchestrator, client):
        for turn in range(4):
            messages.append({"role": "user", "content": f"question {turn}"})
            body = (await client.post("/v1/chat/completions", json={"messages": messages, **fields})).json()
            kvferry = body["kvferry"]
            assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == endpoint
            cached = kvferry["ctx_cached_tokens"] + kvferry["ctx_pulled_tokens"]
            assert cached + kvferry["recomputed_tokens"] == body["usage"]["prompt_tokens"]
            record = (await client.get(f"/kvferry/requests/{body['id']}?wait_s=10")).json()
            assert record["backflow"] == "done"
            endpoint = body["usage"]["total_tokens"] - 1  # the last sampled token has no KV
            messages.append(body["choices"][0]["message"])
        await books_balance(orchestrator)


async def test_stop_string_ends_decoding_and_the_turn_is_kept() -> None:
    fields: dict[str, Any] = {"temperature": 1, "seed": 5, "max_tokens": 1000, "ignore_eos": True}
    async with served() as (orchestrator, client):
        whole = (await client.post("/v1/completions", json={"prompt": "once", **fields, "max_tokens": 40})).json()
        stop = whole["choices"][0]["text"][20:23]
        cut = whole["choices"][0]["text"].index(stop)
        stopped = (await client.post("/v1/completions", json={"prompt": "once", **fields, "stop": stop})).json()
        assert stopped["choices"][0]["text"] == whole["choices"][0]["text"][:cut]
        assert stopped["choices"][0]["finish_reason"] == "stop"
        assert stopped["usage"]["completion_tokens"] == cut + len(stop)
        await books_balance(orchestrator)


@pytest.mark.parametrize("stream", [False, True])
async def test_client_that_leaves_frees_the_workers(stream: bool) -> None:
    body = {"prompt": "once", "max_tokens": 1900, "ignore_eos": True, "stream": stream}
    async with served() as (orchestrator, client):
        asking = asyncio.create_task(client.post("/v1/completions", json=body))
        async with asyncio.timeout(DEADLINE_S):
            while not orchestrator.in_flight:
                await asyncio.sleep(0)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await books_balance(orchestrator)
        after = await client.post("/v1/completions", json={"prompt": "once", "max_tokens": 4})
        assert after.status_code == 200


async def test_prompt_beyond_the_pool_is_refused_and_the_server_goes_on() -> None:
    async with served() as (_, client):
        response = await client.post("/v1/completions", json={"prompt": [5] * MAX_SEQ_LEN})
        assert (response.status_code, response.json()["error"]["code"]) == (413, "context_length_exceeded")
        assert (await client.post("/v1/completions", json={"prompt": "x", "max_tokens": 2})).status_code == 200
