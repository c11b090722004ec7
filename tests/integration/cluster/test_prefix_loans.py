"""A prompt's prefix is pulled from whichever worker holds it: another context worker, or a generation worker.

On the hash model an equal answer means that every pulled block was right.
"""

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
from cluster.request import SamplingParams
from cluster.serve_request import RequestUsage, ServeRequest
from cluster.serve_stream import ServeStream
from tests.integration.cluster.quiet import quiet
from transceiver.testing import Fault, FaultInjector, FaultKind

BLOCK = 16
PROMPT = np.random.default_rng(1).integers(0, 256, 150).astype(np.int32)
NEXT_USER = np.random.default_rng(2).integers(0, 256, 9).astype(np.int32)
_ids = itertools.count()


def config(pull: str = "eager", backflow: str = "eager", contexts: int = 2, **cache: Any) -> ClusterConfig:
    return ClusterConfig.model_validate(
        {
            "model": "hash",
            "engine": {"max_num_tokens": 64, "max_seq_len": 2048},
            "kv_cache_config": {
                "tokens_per_block": BLOCK,
                "max_tokens": 4096,
                "block_reuse_config": {"policy": "per_conversation", "max_num_turns": 5},
                **cache,
            },
            "context_servers": {"num_instances": contexts, "router": {"type": "round_robin"}},
            "cache_transceiver_config": {
                "backend": "inproc",
                "kv_transfer_timeout_ms": 1000,
                "connect_timeout_ms": 500,
                "kv_backflow": backflow,
                "kv_prefix_pull": pull,
            },
        }
    )


async def begin(o: Orchestrator, tokens: np.ndarray, salt: str | None = None, conversation: str = "c") -> ServeStream:
    parameters = SamplingParams(max_tokens=20, ignore_eos=True)
    return await o.serve(ServeRequest(f"l{next(_ids)}", tokens, parameters, conversation, salt))


async def ask(o: Orchestrator, tokens: np.ndarray, **how: Any) -> tuple[list[int], RequestUsage]:
    stream = await begin(o, tokens, **how)
    async for _ in stream:
        pass
    await o.turn_record(stream.request.request_id, 5)
    usage = stream.usage
    assert usage.ctx_cached_tokens + usage.ctx_pulled_tokens + usage.recomputed_tokens == len(tokens)
    return stream.token_ids, usage


def continued(answer: Sequence[int]) -> np.ndarray:
    return np.concatenate([PROMPT, np.asarray(answer, np.int32), NEXT_USER]).astype(np.int32)


@pytest.fixture(scope="module")
def expected() -> tuple[list[int], list[int]]:
    """The two answers of a worker that reuses nothing."""

    async def run() -> tuple[list[int], list[int]]:
        async with local_cluster(config(enable_block_reuse=False), aggregated=True) as o:
            first, _ = await ask(o, PROMPT)
            return first, (await ask(o, continued(first)))[0]

    return asyncio.run(run())


def calls_of(orchestrator: Orchestrator, method: str) -> list[str]:
    """A list that gets the worker's id at every call of `method`."""
    made: list[str] = []
    for handle in orchestrator.fleet.handles:
        channel = handle.channel
        assert isinstance(channel, LocalChannel)

        async def call(name: str, *args: Any, inner: Any = channel.call, worker: str = handle.worker_id) -> Any:
            if name == method:
                made.append(worker)
            return await inner(name, *args)

        channel.call = call  # type: ignore[method-assign]
    return made


@pytest.mark.parametrize("pull", ["eager", "auto"])
@pytest.mark.parametrize("backflow", ["eager", "off"])
async def test_a_turn_on_another_context_worker_computes_only_what_is_new(
    pull: str, backflow: str, expected: tuple[list[int], list[int]]
):
    async with local_cluster(config(pull, backflow)) as o:
        first, one = await ask(o, PROMPT)
        second, two = await ask(o, continued(first))
        assert (first, second) == expected
        assert one.ctx_worker != two.ctx_worker
        assert (one.ctx_cached_tokens, one.ctx_pulled_tokens) == (0, 0)
        held = (len(PROMPT) + len(first) - 1) // BLOCK * BLOCK  # whole blocks of the last turn
        assert (two.ctx_cached_tokens, two.ctx_pulled_tokens) == (0, held)
        assert two.recomputed_tokens == len(continued(first)) - held
        again, three = await ask(o, continued(first), conversation="d")  # by its turn on the first worker again
        assert again == second
        assert three.ctx_worker == one.ctx_worker
        assert three.recomputed_tokens < 64  # less than a grain is not worth a loan
        await quiet(o)


async def test_what_the_context_side_evicted_comes_back_from_the_generation_side(
    expected: tuple[list[int], list[int]],
):
    async with local_cluster(config(contexts=1)) as o:
        first, _ = await ask(o, PROMPT)
        await next(h for h in o.fleet.handles if h.worker_id == "context-0").reset_prefix_cache()
        second, usage = await ask(o, continued(first))
        assert (first, second) == expected
        assert usage.ctx_cached_tokens == 0
        assert usage.ctx_pulled_tokens == (len(PROMPT) + len(first) - 1) // BLOCK * BLOCK
        await quiet(o)


async def test_a_context_worker_that_has_its_turns_asks_nobody(expected: tuple[list[int], list[int]]):
    async with local_cluster(config(contexts=1)) as o:
        lends, prefills = calls_of(o, "lend"), calls_of(o, "prefill")
        first, _ = await ask(o, PROMPT)
        second, usage = await ask(o, continued(first))
        assert (first, second) == expected
        assert (usage.ctx_pulled_tokens, lends, len(prefills)) == (0, [], 2)


async def test_a_lender_that_has_lost_its_blocks_is_asked_once(expected: tuple[list[int], list[int]]):
    async with local_cluster(config(contexts=1, backflow="off")) as o:
        lends = calls_of(o, "lend")
        first, _ = await ask(o, PROMPT)
        await o.reset_prefix_cache()
        second, usage = await ask(o, continued(first))
        assert (first, second) == expected
        assert (usage.ctx_cached_tokens, usage.ctx_pulled_tokens) == (0, 0)
        assert lends == ["generation-0"]
        await o.reset_prefix_cache()
        lends.clear()
        await ask(o, np.concatenate([PROMPT, NEXT_USER]))
        assert len(lends) <= 1
        await quiet(o)


@pytest.mark.parametrize("pull", ["off", "eager"])
async def test_nothing_is_pulled_when_that_is_off_or_blocks_are_not_reused(pull: str):
    async with local_cluster(config(pull, enable_block_reuse=pull == "off")) as o:
        lends = calls_of(o, "lend")
        first, _ = await ask(o, PROMPT)
        _, usage = await ask(o, continued(first))
        assert usage.ctx_pulled_tokens == 0
        assert lends == [] or pull == "eager"
        await quiet(o)


async def test_one_tenants_blocks_are_never_lent_to_another(expected: tuple[list[int], list[int]]):
    async with local_cluster(config()) as o:
        await ask(o, PROMPT, salt="one")
        first, usage = await ask(o, PROMPT, salt="two")
        assert first == expected[0]
        assert (usage.ctx_cached_tokens, usage.ctx_pulled_tokens) == (0, 0)


FAULTS = [
    (kind, step)
    for kind in (FaultKind.DROP, FaultKind.CORRUPT, FaultKind.CUT, FaultKind.DELAY, FaultKind.DUPLICATE)
    for step in ("get", "")
    if (kind, step) not in {(FaultKind.CORRUPT, ""), (FaultKind.DUPLICATE, "get")}
]


@pytest.mark.parametrize(("kind", "step"), FAULTS)
async def test_a_fault_of_the_pull_costs_a_recomputation_never_a_wrong_token(
    kind: FaultKind, step: str, expected: tuple[list[int], list[int]]
):
    injector = FaultInjector([])
    async with local_cluster(config(), faults={"context-1": injector}) as o:
        first, one = await ask(o, PROMPT)
        assert one.ctx_worker == "context-0"
        injector.add(Fault(kind, step, seconds=0.2))
        second, usage = await ask(o, continued(first))
        assert (first, second) == expected
        assert usage.ctx_worker == "context-1"
        await quiet(o)


async def test_a_lender_that_dies_before_the_pull_costs_a_recomputation(expected: tuple[list[int], list[int]]):
    async with local_cluster(config(backflow="off")) as o:
        first, _ = await ask(o, PROMPT)
        for handle in o.fleet.handles:
            channel = handle.channel
            assert isinstance(channel, LocalChannel)

            async def call(name: str, *args: Any, inner: Any = channel.call, channel: Any = channel) -> Any:
                result = await inner(name, *args)
                if name == "lend" and result is not None:
                    await channel.worker.close()
                return result

            channel.call = call  # type: ignore[method-assign]
        second, usage = await ask(o, continued(first))
        assert second == expected[1]
        assert usage.ctx_pulled_tokens == 0


async def test_random_cancels_around_a_loan_leak_nothing(expected: tuple[list[int], list[int]]):
    generator = np.random.default_rng(7)
    async with local_cluster(config()) as o:
        first, _ = await ask(o, PROMPT)
        for round_ in range(60):
            tokens = continued(first) if round_ % 2 else PROMPT
            if round_ % 5 == 0:
                await o.fleet.handles[round_ // 5 % 2].reset_prefix_cache()
            stream = await begin(o, tokens, conversation=f"c{round_ % 3}")
            for _ in range(int(generator.integers(0, 60))):
                await asyncio.sleep(0)
            if generator.random() < 0.5:
                await asyncio.sleep(float(generator.random()) * 0.01)
            await stream.cancel()
        await quiet(o)
        assert (await ask(o, continued(first)))[0] == expected[1]


async def test_a_prefill_that_lacks_room_for_a_loan_is_computed_when_there_is_room(
    expected: tuple[list[int], list[int]],
):
    async with local_cluster(config(max_tokens=26 * BLOCK)) as o:
        first, _ = await ask(o, PROMPT)
        others = [await begin(o, np.random.default_rng(s).integers(0, 256, 200).astype(np.int32)) for s in (3, 4)]
        second, _ = await ask(o, continued(first))
        assert second == expected[1]
        for stream in others:
            async for _ in stream:
                pass
            assert len(stream.token_ids) == 20
        await quiet(o)
