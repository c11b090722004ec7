"""A broken engine gets its worker replaced; a model that fails in one step costs that step's requests only."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from cluster.config import ClusterConfig
from cluster.errors import ClusterError, EngineFailedError
from cluster.local_cluster import local_cluster
from cluster.orchestrator import Orchestrator
from cluster.request import SamplingParams
from cluster.serve_request import ServeRequest
from cluster.worker_handle import WorkerHandle, WorkerState

CONFIG = ClusterConfig.model_validate(
    {
        "model": "hash",
        "kv_cache_config": {"tokens_per_block": 16, "max_tokens": 2048},
        "cache_transceiver_config": {"backend": "inproc", "kv_transfer_timeout_ms": 2000},
    }
)
PROMPT = np.arange(50, dtype=np.int32)


async def ask(orchestrator: Orchestrator) -> list[int]:
    stream = await orchestrator.serve(ServeRequest("r", PROMPT, SamplingParams(max_tokens=12, ignore_eos=True)))
    async for _ in stream:
        pass
    return stream.token_ids


def worker_of(orchestrator: Orchestrator, worker_id: str) -> tuple[WorkerHandle, object]:
    (handle,) = [h for h in orchestrator.fleet.handles if h.worker_id == worker_id]
    return handle, handle.channel.worker  # type: ignore[attr-defined]


@pytest.mark.parametrize("victim", ["context-0", "generation-0"])
async def test_a_poisoned_cache_gets_its_worker_replaced(victim: str):
    async with local_cluster(CONFIG) as orchestrator:
        expected = await ask(orchestrator)
        handle, worker = worker_of(orchestrator, victim)
        worker.manager.poison_reason = "a test broke it"  # type: ignore[attr-defined]
        with pytest.raises(ClusterError):
            await ask(orchestrator)
        async with asyncio.timeout(20):
            while handle.restarts == 0 or handle.state is not WorkerState.READY:
                await asyncio.sleep(0.01)
        assert await ask(orchestrator) == expected


@pytest.mark.parametrize("victim", ["context-0", "generation-0"])
async def test_a_model_that_fails_once_costs_one_request(victim: str, monkeypatch: pytest.MonkeyPatch):
    async with local_cluster(CONFIG) as orchestrator:
        expected = await ask(orchestrator)
        await orchestrator.reset_prefix_cache()
        _, worker = worker_of(orchestrator, victim)
        runner = worker.engine.runner  # type: ignore[attr-defined]

        def explode(plan: object) -> list[int | None]:
            monkeypatch.undo()
            raise RuntimeError("the device is on fire")

        monkeypatch.setattr(runner, "execute", explode)
        with pytest.raises(EngineFailedError, match="on fire"):
            await ask(orchestrator)
        assert await ask(orchestrator) == expected
        async with asyncio.timeout(10):
            while any(s.open_grants or s.cache.open_sequences for s in await orchestrator.stats()):
                await asyncio.sleep(0.01)
        for handle in orchestrator.fleet.handles:
            await handle.check_integrity()
