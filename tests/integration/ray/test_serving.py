"""The cluster as it is shipped: Ray actors, KV over UCX, HTTP in front, on the hash model; and its workers' deaths."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from cluster.config import ClusterConfig
from cluster.serve import RunningCluster, running_cluster

pytestmark = [pytest.mark.ray, pytest.mark.ucx, pytest.mark.usefixtures("no_leftovers")]

BLOCK = 16
MESSAGE = "the quick brown fox jumps over the lazy dog and wonders where the ferry goes"


def config(model: str = "hash", **changes: Any) -> ClusterConfig:
    tree: dict[str, Any] = {
        "model": model,
        "kv_cache_config": {
            "tokens_per_block": BLOCK,
            "max_tokens": 8192,
            "block_reuse_config": {"policy": "per_conversation", "max_num_turns": 5},
        },
        "cache_transceiver_config": {"kv_transfer_timeout_ms": 10000},
        "server": {"port": 0},
    }
    tree.update(changes)
    return ClusterConfig.model_validate(tree)


def body(messages: list[dict[str, str]], conversation: str = "c", **more: Any) -> dict[str, Any]:
    return {
        "model": "ignored-below",
        "messages": messages,
        "max_tokens": 24,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "conversation_params": {"conversation_id": conversation},
        **more,
    }


async def chat(client: httpx.AsyncClient, model: str, messages: list[dict[str, str]], **more: Any) -> dict[str, Any]:
    response = await client.post("/v1/chat/completions", json={**body(messages, **more), "model": model})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def stream(client: httpx.AsyncClient, request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    async with client.stream("POST", "/v1/chat/completions", json={**request, "stream": True}) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                yield json.loads(line.removeprefix("data: "))


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def client_of(cluster: RunningCluster) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=cluster.base_url, timeout=150)


async def test_a_conversation_over_http_reuses_both_sides_and_equals_the_aggregated_run():
    async with running_cluster(config()) as cluster, client_of(cluster) as client:
        assert (await client.get("/health")).status_code == 200
        history: list[dict[str, str]] = []
        answers = []
        for turn in range(3):
            history.append(user(f"{MESSAGE} {turn}"))
            answer = await chat(client, "hash", history)
            answers.append((list(history), answer))
            history.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
            record = (await client.get(f"/kvferry/requests/{answer['kvferry']['request_id']}?wait_s=10")).json()
            assert record["backflow"] == "done"
        last = answers[-1][1]
        assert last["kvferry"]["transport"].startswith("ucx/")
        assert last["kvferry"]["ctx_cached_tokens"] > answers[-2][1]["kvferry"]["prompt_tokens"]
        assert last["kvferry"]["ctx_to_gen_bytes"] > 0
        usage = last["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == last["kvferry"]["ctx_cached_tokens"]
        metrics = (await client.get("/metrics")).text
        assert 'kvferry_worker_up{role="context",worker="context-0"} 1.0' in metrics
        assert "kvferry_kv_transfer_bytes_total" in metrics
    plain = config(kv_cache_config={"tokens_per_block": BLOCK, "max_tokens": 8192, "enable_block_reuse": False})
    async with running_cluster(plain, aggregated=True) as cluster, client_of(cluster) as client:
        for messages, answer in answers[:1]:
            again = await chat(client, "hash", messages)
            assert again["choices"][0]["token_ids"] == answer["choices"][0]["token_ids"]
            assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def pid_of(cluster: RunningCluster, worker_id: str) -> int:
    (handle,) = [h for h in cluster.orchestrator.fleet.handles if h.worker_id == worker_id]
    assert handle.info is not None
    return handle.info.pid


@pytest.mark.parametrize(
    ("victim", "how"),
    [("context-0", {}), ("generation-0", {"temperature": 0.8, "seed": 7})],
    ids=["context-0 greedy", "generation-0 seeded"],
)
async def test_a_worker_killed_during_a_stream_costs_no_token(victim: str, how: dict[str, Any]):
    slow = "hash:step_ms=15"
    messages = [user(MESSAGE)]
    how = {"max_tokens": 120, **how}
    request = {**body(messages, **how), "model": slow}
    async with running_cluster(config(slow)) as cluster, client_of(cluster) as client:
        undisturbed = (await chat(client, slow, messages, **how))["choices"][0]["token_ids"]
        tokens: list[int] = []
        killed = False
        async for event in stream(client, {**request, "conversation_params": {"conversation_id": "d"}}):
            assert "error" not in event, event
            for choice in event["choices"]:
                tokens += choice.get("token_ids") or []
            if len(tokens) >= 20 and not killed:
                os.kill(pid_of(cluster, victim), signal.SIGKILL)
                killed = True
        assert killed
        assert tokens == undisturbed
        assert (await chat(client, slow, messages, **how))["choices"][0]["token_ids"] == undisturbed


async def test_with_retries_off_a_death_is_an_explicit_error_within_five_seconds_and_the_next_request_works():
    slow = "hash:step_ms=15"
    request = {**body([user(MESSAGE)], max_tokens=400), "model": slow}
    async with running_cluster(config(slow, max_retries=0)) as cluster, client_of(cluster) as client:
        error: dict[str, Any] | None = None
        killed_at = ended_at = 0.0
        async for event in stream(client, request):
            if "error" in event:
                error, ended_at = event["error"], time.monotonic()
            elif not killed_at:
                os.kill(pid_of(cluster, "generation-0"), signal.SIGKILL)
                killed_at = time.monotonic()
        assert error is not None
        assert error["code"] == "worker_lost"
        assert ended_at - killed_at < 5
        assert (await chat(client, slow, [user(MESSAGE)]))["choices"][0]["token_ids"]


async def test_workers_show_by_name_in_the_process_list(live_workers: Callable[[], list[str]]):
    async with running_cluster(config()):
        shown = " ".join(live_workers())
        assert "ray::ContextWorker" in shown
        assert "ray::GenerationWorker" in shown


async def test_two_workers_a_side_keep_a_conversation_together():
    several = config(context_servers={"num_instances": 2}, generation_servers={"num_instances": 2})
    async with running_cluster(several) as cluster, client_of(cluster) as client:
        first = await asyncio.gather(
            *(chat(client, "hash", [user(f"{MESSAGE} {i}")], conversation=f"c{i}") for i in range(6))
        )
        assert {answer["kvferry"]["ctx_worker"] for answer in first} == {"context-0", "context-1"}
        for i, answer in enumerate(first):
            history = [
                user(f"{MESSAGE} {i}"),
                {"role": "assistant", "content": answer["choices"][0]["message"]["content"]},
                user("and then?"),
            ]
            second = await chat(client, "hash", history, conversation=f"c{i}")
            for side in ("ctx_worker", "gen_worker"):
                assert second["kvferry"][side] == answer["kvferry"][side]
            assert second["kvferry"]["recomputed_tokens"] < 60


async def test_a_turn_on_another_context_worker_pulls_what_the_others_hold():
    several = config(
        context_servers={"num_instances": 2, "router": {"type": "round_robin"}},
        cache_transceiver_config={"kv_prefix_pull": "eager"},
    )
    async with running_cluster(several) as cluster, client_of(cluster) as client:
        first = await chat(client, "hash", [user(MESSAGE)])
        history = [
            user(MESSAGE),
            {"role": "assistant", "content": first["choices"][0]["message"]["content"]},
            user("and then?"),
        ]
        second = await chat(client, "hash", history)
        moved = second["kvferry"]
        assert moved["ctx_worker"] != first["kvferry"]["ctx_worker"]
        assert moved["ctx_pulled_tokens"] > 0.7 * second["usage"]["prompt_tokens"]
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == moved["ctx_pulled_tokens"]
        alone = await chat(client, "hash", history, cache_salt="nobody else's")
        assert alone["kvferry"]["ctx_pulled_tokens"] == 0
        assert alone["choices"][0]["message"]["content"] == second["choices"][0]["message"]["content"]


async def test_a_long_prompt_is_handed_over_while_it_is_computed():
    long = [user(" ".join(f"{MESSAGE} {i}" for i in range(6)))]
    reuse = {"tokens_per_block": BLOCK, "max_tokens": 8192, "block_reuse_config": {"policy": "all_reusable"}}
    pipelined = config(
        engine={"max_num_tokens": 64},
        kv_cache_config=reuse,
        cache_transceiver_config={"enable_pipelined_transfer": True},
    )
    async with running_cluster(pipelined) as cluster, client_of(cluster) as client:
        ahead = await chat(client, "hash", long)
        moved = ahead["kvferry"]
        assert moved["transport"].startswith("ucx/")
        assert moved["transferred_tokens"] >= ahead["usage"]["prompt_tokens"] - 1
        assert moved["recomputed_tokens"] == ahead["usage"]["prompt_tokens"] > 6 * 64
    async with running_cluster(config(kv_cache_config=reuse), aggregated=True) as cluster, client_of(cluster) as client:
        alone = await chat(client, "hash", long)
    assert alone["choices"][0]["message"]["content"] == ahead["choices"][0]["message"]["content"]
