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


async def received(o: Orchestrator, least: int) -> list[int]:
    """How many pages of the (new, zeroed) generation pool had something in them, until `least` have."""
    channel = o.fleet.handles[1].channel
    assert isinstance(channel, LocalChannel)
    storage, seen = channel.worker.storage, [0]
    async with asyncio.timeout(10):
        while seen[-1] < least:
            seen.append(sum(np.any(storage.page(page, 0)) for page in range(storage.num_pages(0))))
            await asyncio.sleep(0.01)
    return seen


async def test_blocks_arrive_before_the_prompt_is_computed():
    async with local_cluster(config("hash:step_ms=60")) as o:
        stream = await begin(o, PROMPT)
        seen = await received(o, 3 * CHUNK // BLOCK)
        assert not stream.token_ids
        assert len(set(seen)) >= 3
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
    async with local_cluster(config("hash:step_ms=50")) as o:
        stream = await begin(o, PROMPT)
        await received(o, 1)
        assert not stream.token_ids
        handle = o.fleet.handles[worker]
        handle.needs_kill = True
        handle.mark_lost("a test killed it")
        async for _ in stream:
            pass
        assert stream.token_ids == expected[0]
        # a context worker's prompt is gone; a generation worker that came back takes it as ever
        assert stream.usage.retries in ((1,) if worker == 0 else (0, 1))
        await quiet(o)


async def test_prompts_that_queue_for_longer_than_a_transfer_may_take_are_served(
    expected: tuple[list[int], list[int]],
):
    async with local_cluster(config("hash:step_ms=120", enable_block_reuse=False)) as o:
        answers = await asyncio.gather(*(ask(o, PROMPT, conversation=f"q{i}", max_tokens=2) for i in range(5)))
        assert answers == [expected[0][:2]] * 5
        await quiet(o)


async def test_a_prefill_longer_than_a_transfer_may_take_is_handed_over_as_ever(expected: tuple[list[int], list[int]]):
    async with local_cluster(config("hash:step_ms=400")) as o:
        stream = await begin(o, PROMPT, max_tokens=2)
        async for _ in stream:
            pass
        assert stream.token_ids == expected[0][:2]
        assert stream.usage.retries == 0
        await quiet(o)


async def test_long_and_short_prompts_in_small_pools_do_not_wait_for_each_other_in_a_ring():
    async with local_cluster(config("hash:step_ms=5", enable_block_reuse=False, max_tokens=63 * BLOCK)) as o:
        prompts = [np.random.default_rng(i).integers(0, 256, 60).astype(np.int32) for i in range(16)]
        prompts += [np.roll(PROMPT, i + 1) for i in range(3)]
        streams = [await begin(o, tokens, conversation=f"r{i}", max_tokens=3) for i, tokens in enumerate(prompts)]
        for stream in streams:
            async for _ in stream:
                pass
            assert stream.usage.retries == 0
        await quiet(o)
