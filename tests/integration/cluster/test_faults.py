"""Disturbed transfers under a serving cluster: the tokens are right or the error is explicit, and the cluster goes on.

Fault kinds and the reports behind them: blocks held for a dead or silent peer, damaged and stale data, a failed leg
that does not reach the other one.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence

import numpy as np
import pytest

from cluster.config import ClusterConfig
from cluster.errors import ClusterError
from cluster.fleet import Fleet
from cluster.local_cluster import local_cluster, local_handle
from cluster.orchestrator import Orchestrator
from cluster.request import SamplingParams
from cluster.serve_request import ServeRequest, TurnRecord
from cluster.serve_stream import ServeStream
from cluster.worker_plan import make_orchestrator, plan_workers
from tests.integration.cluster.quiet import quiet
from transceiver.testing import Fault, FaultInjector, FaultKind

BLOCK = 16
TIMEOUT_S = 1.5
CONFIG = ClusterConfig.model_validate(
    {
        "model": "hash",
        "engine": {"max_num_tokens": 128},
        "kv_cache_config": {
            "tokens_per_block": BLOCK,
            "max_tokens": 2048,
            "block_reuse_config": {"policy": "per_conversation", "max_num_turns": 5},
        },
        "cache_transceiver_config": {
            "backend": "inproc",
            "kv_transfer_timeout_ms": int(TIMEOUT_S * 1000),
            "connect_timeout_ms": 500,  # a handshake that lost a message is over before the retry
        },
    }
)
PROMPT = np.random.default_rng(1).integers(0, 256, 75).astype(np.int32)
NEXT_USER = np.random.default_rng(2).integers(0, 256, 9).astype(np.int32)
_ids = itertools.count()


async def ask(orchestrator: Orchestrator, tokens: np.ndarray) -> tuple[ServeStream, TurnRecord]:
    request = ServeRequest(f"f{next(_ids)}", tokens, SamplingParams(max_tokens=20, ignore_eos=True), "c")
    stream = await orchestrator.serve(request)
    async for _ in stream:
        pass
    record = await orchestrator.turn_record(request.request_id, 3 * TIMEOUT_S)
    assert record is not None
    return stream, record


def continued(answer: Sequence[int]) -> np.ndarray:
    return np.concatenate([PROMPT, np.asarray(answer, np.int32), NEXT_USER]).astype(np.int32)


@pytest.fixture(scope="module")
def expected() -> tuple[list[int], list[int]]:
    """The two answers of an undisturbed aggregated run."""

    async def run() -> tuple[list[int], list[int]]:
        async with local_cluster(CONFIG, aggregated=True) as orchestrator:
            first, _ = await ask(orchestrator, PROMPT)
            second, _ = await ask(orchestrator, continued(first.token_ids))
            return first.token_ids, second.token_ids

    return asyncio.run(run())


DISTURBANCES = [
    pytest.param(worker, Fault(kind, step, seconds=0.2), id=f"{worker}-{kind}-{step or 'any'}")
    for worker in ("context-0", "generation-0")
    for kind, step in [
        (FaultKind.CORRUPT, "get"),
        (FaultKind.DROP, "get"),
        (FaultKind.CUT, "get"),
        (FaultKind.DELAY, "get"),
        (FaultKind.CUT, ""),
        (FaultKind.DROP, ""),
        (FaultKind.DUPLICATE, ""),
        (FaultKind.DELAY, ""),
    ]
]


@pytest.mark.parametrize(("worker", "fault"), DISTURBANCES)
async def test_one_fault_never_gives_a_wrong_token_and_never_stops_the_cluster(
    worker: str, fault: Fault, expected: tuple[list[int], list[int]]
):
    faults = FaultInjector([fault])
    async with local_cluster(CONFIG, faults={worker: faults}) as orchestrator:
        started = time.monotonic()
        for _ in range(2):  # one fault, one retry: everything is answered
            first, _ = await ask(orchestrator, PROMPT)
            assert first.token_ids == expected[0]
            second, _ = await ask(orchestrator, continued(first.token_ids))
            assert second.token_ids == expected[1]
        assert time.monotonic() - started < 8 * TIMEOUT_S
        assert faults.fired
        faults.clear()
        again, _ = await ask(orchestrator, continued(expected[0]))
        assert again.token_ids == expected[1]
        await quiet(orchestrator, 4 * TIMEOUT_S)


async def test_damaged_blocks_of_a_hand_off_are_computed_again_and_counted(expected: tuple[list[int], list[int]]):
    faults = FaultInjector([Fault(FaultKind.CORRUPT, "get")])
    async with local_cluster(CONFIG, faults={"generation-0": faults}) as orchestrator:
        stream, record = await ask(orchestrator, PROMPT)
        assert stream.token_ids == expected[0]
        assert record.usage.repaired_tokens > 0
        assert record.usage.retries == 0
        stats = {s.info.worker_id: s for s in await orchestrator.stats()}
        assert stats["generation-0"].repaired_blocks >= 1
        assert stats["generation-0"].transceiver.digest_mismatches >= 1
        await quiet(orchestrator, 4 * TIMEOUT_S)


async def test_damaged_blocks_of_a_back_flow_are_not_published(expected: tuple[list[int], list[int]]):
    faults = FaultInjector([Fault(FaultKind.CORRUPT, "get")])
    async with local_cluster(CONFIG, faults={"context-0": faults}) as orchestrator:
        first, record = await ask(orchestrator, PROMPT)
        assert record.endpoint_tokens is not None
        assert record.endpoint_tokens < len(PROMPT) + 19
        second, record = await ask(orchestrator, continued(first.token_ids))
        assert second.token_ids == expected[1]
        assert record.usage.recomputed_tokens > len(NEXT_USER) + 1
        await quiet(orchestrator, 4 * TIMEOUT_S)


async def test_workers_with_different_secrets_refuse_each_other_and_say_so():
    specs = [
        spec
        for role, secret in (("context", b"a" * 32), ("generation", b"b" * 32))
        for spec in plan_workers(CONFIG, aggregated=False, secret=secret)
        if spec.role == role
    ]
    orchestrator = make_orchestrator(CONFIG, Fleet([local_handle(spec) for spec in specs]))
    await orchestrator.fleet.start()
    try:
        with pytest.raises(ClusterError, match="secret"):
            await ask(orchestrator, PROMPT)
        await quiet(orchestrator, 4 * TIMEOUT_S)
    finally:
        await orchestrator.close()
