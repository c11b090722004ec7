"""`enable_pipelined_transfer`: a long prompt's blocks reach the generation side while its next chunk is computed."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from cluster.channel import LocalChannel
from cluster.config import ClusterConfig
from cluster.local_cluster import local_cluster
from cluster.orchestrator import Orchestrator
from cluster.request import FinishReason, SamplingParams
from cluster.serve_request import ServeRequest
from cluster.serve_stream import ServeStream
from tests.integration.cluster.quiet import quiet
from transceiver.testing import Fault, FaultInjector, FaultKind

BLOCK = 16
CHUNK = 64
PROMPT = np.random.default_rng(1).integers(0, 256, 330).astype(np.int32)
NEXT_USER = np.random.default_rng(2).integers(0, 256, 90).astype(np.int32)
_ids = itertools.count()


def config(model: str = "hash", pipelined: bool = True, **cache: Any) -> ClusterConfig:
    return ClusterConfig.model_validate(
        {
            "model": model,
            "engine": {"max_num_tokens": CHUNK, "max_batch_size": 16, "max_seq_len": 2048},
            "kv_cache_config": {"tokens_per_block": BLOCK, "max_tokens": 4096, **cache},
            "cache_transceiver_config": {
                "backend": "inproc",
                "kv_transfer_timeout_ms": 2000,
                "connect_timeout_ms": 500,
                "kv_backflow": "eager",
                "enable_pipelined_transfer": pipelined,
            },
        }
    )


async def begin(o: Orchestrator, tokens: np.ndarray, conversation: str = "c", **how: Any) -> ServeStream:
    parameters = SamplingParams(**{"max_tokens": 20, "ignore_eos": True, **how})
    return await o.serve(ServeRequest(f"p{next(_ids)}", tokens, parameters, conversation))


async def ask(o: Orchestrator, tokens: np.ndarray, **how: Any) -> list[int]:
    stream = await begin(o, tokens, **how)
    async for _ in stream:
        pass
    await o.turn_record(stream.request.request_id, 5)
    usage = stream.usage
    assert usage.ctx_cached_tokens + usage.ctx_pulled_tokens + usage.recomputed_tokens == len(tokens)
    assert usage.gen_cached_tokens + usage.transferred_tokens + usage.repaired_tokens >= len(tokens) - BLOCK
    return stream.token_ids


def continued(answer: Sequence[int]) -> np.ndarray:
    return np.concatenate([PROMPT, np.asarray(answer, np.int32), NEXT_USER]).astype(np.int32)


@pytest.fixture(scope="module")
def expected() -> tuple[list[int], list[int]]:
    async def run() -> tuple[list[int], list[int]]:
        async with local_cluster(config(pipelined=False)) as o:
            first = await ask(o, PROMPT)
            return first, await ask(o, continued(first))

    return asyncio.run(run())


@pytest.mark.parametrize("reuse", [True, False])
async def test_two_turns_are_those_of_a_run_without(reuse: bool, expected: tuple[list[int], list[int]]):
    async with local_cluster(config(enable_block_reuse=reuse)) as o:
        first = await ask(o, PROMPT)
        assert (first, await ask(o, continued(first))) == expected
        assert await ask(o, PROMPT[:40], max_tokens=5) != []  # shorter than a chunk: handed over as ever
        await quiet(o)


async def test_blocks_arrive_before_the_prompt_is_computed():
    async with local_cluster(config("hash:step_ms=60")) as o:
        channel = o.fleet.handles[1].channel
        assert isinstance(channel, LocalChannel)
        storage = channel.worker.storage
        stream = await begin(o, PROMPT)
        seen: list[int] = []
        while not stream.token_ids:  # pages of a new pool are zero until something arrives in them
            seen.append(sum(np.any(storage.page(page, 0)) for page in range(storage.num_pages(0))))
            await asyncio.sleep(0.01)
        assert len(set(seen)) >= 3
        assert seen[-1] >= 3 * CHUNK // BLOCK
        async for _ in stream:
            pass
        await quiet(o)


async def test_an_answer_that_ends_with_its_first_token_leaves_nothing():
    async with local_cluster(config()) as o:
        stream = await begin(o, PROMPT, max_tokens=1)
        async for _ in stream:
            pass
        assert stream.finish_reason is FinishReason.LENGTH
        assert len(stream.token_ids) == 1
        await quiet(o)


@pytest.mark.parametrize("worker", ["context-0", "generation-0"])
@pytest.mark.parametrize(
    ("kind", "step"),
    [(FaultKind.CORRUPT, "get")]
    + [(kind, step) for kind in (FaultKind.DROP, FaultKind.CUT, FaultKind.DELAY) for step in ("get", "")],
)
async def test_a_fault_costs_a_retry_never_a_wrong_token(
    worker: str, kind: FaultKind, step: str, expected: tuple[list[int], list[int]]
):
    injector = FaultInjector([Fault(kind, step, seconds=0.2)])
    async with local_cluster(config(), faults={worker: injector}) as o:
        first = await ask(o, PROMPT)
        assert (first, await ask(o, continued(first))) == expected
        await quiet(o)


async def test_many_at_once_with_small_pools_are_preempted_and_right(expected: tuple[list[int], list[int]]):
    async with local_cluster(config(max_tokens=60 * BLOCK, enable_block_reuse=False)) as o:
        answers = await asyncio.gather(*(ask(o, PROMPT, conversation=f"c{i}") for i in range(6)))
        assert answers == [expected[0]] * 6
        await quiet(o)


async def test_random_cancels_leak_nothing(expected: tuple[list[int], list[int]]):
    generator = np.random.default_rng(3)
    async with local_cluster(config("hash:step_ms=1")) as o:
        for round_ in range(40):
            stream = await begin(o, np.roll(PROMPT, round_), conversation=f"c{round_ % 3}")
            for _ in range(int(generator.integers(0, 60))):
                await asyncio.sleep(0)
            if generator.random() < 0.6:
                await asyncio.sleep(float(generator.random()) * 0.03)
            await stream.cancel()
        await quiet(o)
        assert await ask(o, PROMPT) == expected[0]


@pytest.mark.parametrize("worker", [0, 1])
async def test_the_death_of_either_worker_meanwhile_costs_no_token(worker: int, expected: tuple[list[int], list[int]]):
    async with local_cluster(config("hash:step_ms=20")) as o:
        stream = await begin(o, PROMPT)
        await asyncio.sleep(0.06)
        handle = o.fleet.handles[worker]
        handle.needs_kill = True
        handle.mark_lost("a test killed it")
        async for _ in stream:
            pass
        assert stream.token_ids == expected[0]
        assert stream.usage.retries == 1
        await quiet(o)
