"""What a review found: workers that seem lost but live, aborts at awkward moments, waiting that blocks others."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from typing import Any

import numpy as np
import pytest

from cluster.channel import LocalChannel
from cluster.config import ClusterConfig
from cluster.errors import ClusterError, NotReadyError, QueueFullError, WorkerLostError
from cluster.fleet import Fleet
from cluster.local_cluster import local_cluster, local_handle
from cluster.orchestrator import Orchestrator
from cluster.request import FinishReason, SamplingParams
from cluster.serve_request import ServeRequest
from cluster.serve_stream import ServeStream
from cluster.worker_handle import WorkerState
from cluster.worker_plan import make_orchestrator, plan_workers
from tests.integration.cluster.quiet import quiet
from transceiver.testing import Fault, FaultInjector, FaultKind

BLOCK = 16
_ids = itertools.count()


def config(**changes: Any) -> ClusterConfig:
    tree: dict[str, Any] = {
        "model": "hash",
        "engine": {"max_num_tokens": 64, "max_seq_len": 2048},
        "kv_cache_config": {
            "tokens_per_block": BLOCK,
            "max_tokens": 4096,
            "block_reuse_config": {"policy": "per_conversation", "max_num_turns": 5},
        },
        "cache_transceiver_config": {"backend": "inproc", "kv_transfer_timeout_ms": 6000, "kv_backflow": "eager"},
    }
    tree.update(changes)
    return ClusterConfig.model_validate(tree)


def prompt(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, length).astype(np.int32)


async def begin(orchestrator: Orchestrator, tokens: np.ndarray, **how: Any) -> ServeStream:
    conversation, salt = how.pop("conversation", "c"), how.pop("salt", None)
    parameters = SamplingParams(**{"max_tokens": 20, "ignore_eos": True, **how})
    return await orchestrator.serve(ServeRequest(f"s{next(_ids)}", tokens, parameters, conversation, salt))


async def finish(stream: ServeStream) -> list[int]:
    async for _ in stream:
        pass
    return stream.token_ids


async def ask(orchestrator: Orchestrator, tokens: np.ndarray, **how: Any) -> list[int]:
    return await finish(await begin(orchestrator, tokens, **how))


class ScriptedChannel(LocalChannel):
    """Fails the next call of a method as scripted; counts kills."""

    script: dict[str, list[BaseException]]
    kills: int

    @classmethod
    def around(cls, inner: LocalChannel) -> ScriptedChannel:
        channel = cls(inner._make)
        channel.worker = inner.worker
        channel.script, channel.kills = {}, 0
        return channel

    async def call(self, method: str, *args: Any) -> Any:
        if self.script.get(method):
            raise self.script[method].pop(0)
        return await super().call(method, *args)

    async def kill(self) -> None:
        self.kills += 1
        await super().kill()


def scripted_cluster(settings: ClusterConfig) -> tuple[Orchestrator, dict[str, ScriptedChannel]]:
    handles = [local_handle(spec) for spec in plan_workers(settings, aggregated=False, secret=b"s" * 32)]
    channels = {}
    for handle in handles:
        assert isinstance(handle.channel, LocalChannel)
        channels[handle.worker_id] = handle.channel = ScriptedChannel.around(handle.channel)
    return make_orchestrator(settings, Fleet(handles)), channels


async def back(orchestrator: Orchestrator, worker_id: str) -> None:
    (handle,) = [h for h in orchestrator.fleet.handles if h.worker_id == worker_id]
    async with asyncio.timeout(10):
        while handle.restarts == 0 or handle.state is not WorkerState.READY:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("worker_id", ["context-0", "generation-0"])
@pytest.mark.parametrize(
    "failure",
    [WorkerLostError("unreachable for a moment"), RuntimeError("nonsense")],
    ids=["unavailable", "unexpected"],
)
async def test_a_worker_that_only_seemed_lost_loses_no_token(worker_id: str, failure: BaseException):
    tokens = prompt(60)
    orchestrator, channels = scripted_cluster(config())
    await orchestrator.fleet.start()
    try:
        expected = await ask(orchestrator, tokens, max_tokens=60)
        channels[worker_id].script["watch"] = [failure]
        running = await begin(orchestrator, tokens, max_tokens=60, conversation="d")
        orchestrator.fleet.handles[0 if worker_id == "context-0" else 1]._spawn(
            orchestrator.fleet.handles[0 if worker_id == "context-0" else 1]._watch()
        )
        assert await finish(running) == expected
        await back(orchestrator, worker_id)
        for round_ in range(4):
            assert await ask(orchestrator, tokens, max_tokens=60, conversation=f"e{round_}") == expected
        assert channels[worker_id].kills == (0 if isinstance(failure, WorkerLostError) else 1)
        await quiet(orchestrator)
    finally:
        await orchestrator.close()


async def test_a_failed_scrape_marks_the_worker_lost_and_back_without_harm():
    tokens = prompt(60)
    orchestrator, channels = scripted_cluster(config())
    await orchestrator.fleet.start()
    try:
        expected = await ask(orchestrator, tokens)
        channels["generation-0"].script["stats"] = [WorkerLostError("unreachable")]
        assert len(await orchestrator.stats()) == 1
        assert await ask(orchestrator, tokens, conversation="d") == expected
    finally:
        await orchestrator.close()


async def test_a_prompt_that_waits_for_pages_does_not_stop_the_sequences_that_would_free_them():
    """A continuing conversation matched most of the pool and waits for the rest; the decode that needs it goes on."""
    small = {"tokens_per_block": BLOCK, "max_tokens": 40 * BLOCK}
    async with local_cluster(config(kv_cache_config=small, engine={"max_seq_len": 640, "max_num_tokens": 64})) as o:
        first = prompt(300, 1)
        answer = await ask(o, first, conversation="a")
        await quiet(o)
        decoding = await begin(o, prompt(100, 2), conversation="b", max_tokens=250)
        continued = np.concatenate([first, np.asarray(answer, np.int32), prompt(200, 3)]).astype(np.int32)
        waiting = await begin(o, continued, conversation="a", max_tokens=5)
        started = time.monotonic()
        assert len(await finish(decoding)) == 250
        assert time.monotonic() - started < 4  # not the transfer's time-out
        assert len(await finish(waiting)) == 5
        await quiet(o)


async def test_cancel_reaches_a_request_that_waits_for_pages():
    small = {"tokens_per_block": BLOCK, "max_tokens": 24 * BLOCK}
    async with local_cluster(config(kv_cache_config=small, engine={"max_seq_len": 384, "max_num_tokens": 64})) as o:
        decoding = await begin(o, prompt(250, 1), conversation="a", max_tokens=100)
        async for _ in decoding:
            break
        waiting = await begin(o, prompt(300, 2), conversation="b", max_tokens=20)
        async for _ in waiting:
            break  # its first token is there: it is on its way to the generation side, which has no room
        await asyncio.wait_for(waiting.cancel(), 2)
        assert waiting.finish_reason is FinishReason.CANCELLED
        assert len(await asyncio.wait_for(ask(o, prompt(20, 3), conversation="d", max_tokens=3), 3)) == 3
        await finish(decoding)
        await quiet(o)


async def test_a_prompt_computed_locally_leaves_no_grant_and_its_turn_reaches_the_context_side():
    tokens = prompt(64)
    async with local_cluster(config(conditional_disagg_config={"max_local_prefill_length": 64})) as o:
        answer = await ask(o, tokens)
        longer = np.concatenate([tokens, np.asarray(answer, np.int32), prompt(5, 3)]).astype(np.int32)
        stream = await begin(o, longer)
        await finish(stream)
        assert stream.usage.ctx_worker is None
        record = await o.turn_record(stream.request.request_id, 5)
        assert record is not None
        assert record.backflow == "done"
        assert record.endpoint_tokens == len(longer) + 19
        await quiet(o)


async def test_random_cancels_leak_nothing_and_spoil_no_answer():
    generator = np.random.default_rng(5)
    tokens = prompt(90)
    async with local_cluster(config()) as o:
        expected = await ask(o, tokens)
        for round_ in range(60):
            stream = await begin(o, tokens if round_ % 3 else prompt(80, round_), conversation=f"c{round_ % 4}")
            for _ in range(int(generator.integers(0, 40))):
                await asyncio.sleep(0)
            if generator.random() < 0.5:
                await asyncio.sleep(float(generator.random()) * 0.01)
            await stream.cancel()
        await quiet(o)
        assert await ask(o, tokens) == expected


async def test_the_bound_of_requests_holds_for_a_burst():
    async with local_cluster(config(server={"max_queued_requests": 3})) as o:
        results = await asyncio.gather(*(begin(o, prompt(20)) for _ in range(10)), return_exceptions=True)
        kinds = Counter(type(result) for result in results)
        assert kinds == {ServeStream: 3, QueueFullError: 7}
        for stream in results:
            if isinstance(stream, ServeStream):
                await finish(stream)


async def test_two_tenants_with_one_conversation_id_do_not_drop_each_others_turns():
    once = {
        "tokens_per_block": BLOCK,
        "max_tokens": 4096,
        "block_reuse_config": {"policy": "per_conversation", "max_num_turns": 1},
    }
    async with local_cluster(config(kv_cache_config=once)) as o:
        await ask(o, prompt(64, 1), salt="one")
        await quiet(o)
        await ask(o, prompt(64, 2), salt="two")
        await quiet(o)
        for stats in await o.stats():
            assert stats.cache.superseded_blocks == 0
            assert stats.cache.retained_turns == 2


async def test_the_same_prompt_again_does_not_wait_for_the_first_answers_way_back():
    slow = FaultInjector([Fault(FaultKind.DELAY, "get", count=0, seconds=2.0)])
    async with local_cluster(config(), faults={"context-0": slow}) as o:
        expected = await ask(o, prompt(64))
        started = time.monotonic()
        assert await ask(o, prompt(64)) == expected
        assert time.monotonic() - started < 1.5
        slow.clear()


async def test_a_complete_answer_stays_complete_when_its_worker_dies_while_it_is_stopped():
    orchestrator, channels = scripted_cluster(config(model="hash:step_ms=5"))
    await orchestrator.fleet.start()
    try:
        stream = await begin(orchestrator, prompt(40), max_tokens=1500)
        async for _ in stream:
            if len(stream.token_ids) >= 8:
                break
        channels["generation-0"].script["stop"] = [WorkerLostError("gone")]
        await asyncio.wait_for(stream.stop(8), 5)
        assert stream.finish_reason is FinishReason.STOP
        assert stream.usage.completion_tokens == 8
    finally:
        await orchestrator.close()


async def test_usage_of_a_stopped_answer_is_the_same_in_its_record():
    async with local_cluster(config()) as o:
        stream = await begin(o, prompt(40), max_tokens=1500)
        async for _ in stream:
            if len(stream.token_ids) >= 8:
                break
        await stream.stop(8)
        record = await o.turn_record(stream.request.request_id, 5)
        assert record is not None
        assert record.usage.completion_tokens == stream.usage.completion_tokens == 8


async def test_stop_tokens_end_an_answer_though_eos_is_ignored_and_min_tokens_holds_them_back():
    tokens = prompt(50)
    async with local_cluster(config()) as o:
        plain = await ask(o, tokens, conversation="a")
        stop = plain[5]
        stopped = await ask(o, tokens, conversation="b", stop_token_ids=(stop,))
        assert stopped == plain[: plain.index(stop) + 1]
        held = await ask(o, tokens, conversation="d", stop_token_ids=(stop,), min_tokens=15)
        assert len(held) >= 15
        assert stop not in held[:15]


async def test_without_block_reuse_nothing_flows_back():
    off = {"tokens_per_block": BLOCK, "max_tokens": 4096, "enable_block_reuse": False}
    async with local_cluster(config(kv_cache_config=off)) as o:
        stream = await begin(o, prompt(64))
        await finish(stream)
        record = await o.turn_record(stream.request.request_id, 5)
        assert record is not None
        assert record.gen_to_ctx_bytes == 0
        await quiet(o)


async def test_operations_on_all_workers_survive_a_dead_one():
    orchestrator, channels = scripted_cluster(config())
    await orchestrator.fleet.start()
    try:
        channels["context-0"].script["reset_prefix_cache"] = [WorkerLostError("gone")]
        await orchestrator.reset_prefix_cache()
        await back(orchestrator, "context-0")
        assert orchestrator.ready
    finally:
        await orchestrator.close()


async def test_nothing_is_ready_before_the_fleet_has_started():
    orchestrator, _ = scripted_cluster(config())
    assert not orchestrator.ready
    with pytest.raises(ClusterError, match="starting"):
        await begin(orchestrator, prompt(5))


async def test_what_an_earlier_try_computed_counts_as_computed():
    orchestrator, channels = scripted_cluster(config(model="hash:step_ms=3"))
    await orchestrator.fleet.start()
    try:
        tokens = prompt(100)
        stream = await begin(orchestrator, tokens, max_tokens=120)
        async for _ in stream:
            if len(stream.token_ids) >= 20:
                break
        orchestrator.fleet.handles[1].needs_kill = True
        orchestrator.fleet.handles[1].mark_lost("a test killed it")
        await finish(stream)
        usage = stream.usage
        assert usage.retries == 1
        assert usage.completion_tokens == 120
        assert (usage.ctx_cached_tokens, usage.recomputed_tokens) == (0, 100)
        assert usage.gen_cached_tokens + usage.transferred_tokens == 100
        assert channels["generation-0"].kills == 1
    finally:
        await orchestrator.close()


async def test_shutting_down_ends_requests_with_an_error_and_takes_no_more():
    async with local_cluster(config(model="hash:step_ms=5")) as o:
        stream = await begin(o, prompt(40), max_tokens=1500)
        async for _ in stream:
            break
        await o.end_requests(NotReadyError("the server is shutting down"))
        with pytest.raises(NotReadyError, match="shutting down"):
            await finish(stream)
        with pytest.raises(NotReadyError, match="shutting down"):
            await begin(o, prompt(5))
        await quiet(o)


async def test_a_process_that_was_not_started_yet_answers_that_what_it_was_asked_is_lost():
    handle = local_handle(plan_workers(config(), aggregated=False, secret=b"s" * 32)[0])
    for method, arguments in [("ping", ()), ("stats", ()), ("probe", (prompt(5),)), ("reset_prefix_cache", ())]:
        with pytest.raises(WorkerLostError, match="not started"):
            await handle.channel.call(method, *arguments)
    await handle.channel.call("abort", "anything")
    assert await handle.channel.call("identity")
