"""The whole cluster in one process on the hash model: answers, reuse and books, without Ray.

Every logit of the hash model depends on every KV byte it reads, so an equal answer means that every block was right.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from cluster.config import ClusterConfig
from cluster.errors import InvalidRequestError, PromptTooLongError, QueueFullError
from cluster.local_cluster import local_cluster
from cluster.orchestrator import Orchestrator
from cluster.request import FinishReason, SamplingParams
from cluster.serve_request import ServeRequest, TurnRecord
from cluster.serve_stream import ServeStream
from tests.integration.cluster.quiet import quiet

BLOCK = 16
_ids = itertools.count()


def config(**changes: object) -> ClusterConfig:
    tree: dict[str, object] = {
        "model": "hash",
        "engine": {"max_num_tokens": 64, "max_seq_len": 2048},
        "kv_cache_config": {
            "tokens_per_block": BLOCK,
            "max_tokens": 4096,
            "block_reuse_config": {"policy": "per_conversation", "max_num_turns": 5},
        },
        "cache_transceiver_config": {"backend": "inproc", "kv_transfer_timeout_ms": 10000},
    }
    tree.update(changes)
    return ClusterConfig.model_validate(tree)


def prompt(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, length).astype(np.int32)


def extend(tokens: np.ndarray, answer: Sequence[int], user: np.ndarray) -> np.ndarray:
    return np.concatenate([tokens, np.asarray(answer, np.int32), user]).astype(np.int32)


async def ask(
    orchestrator: Orchestrator,
    tokens: np.ndarray,
    *,
    conversation: str | None = "c",
    salt: str | None = None,
    **sampling: object,
) -> tuple[ServeStream, TurnRecord]:
    parameters = SamplingParams(**{"max_tokens": 20, "ignore_eos": True, **sampling})
    request = ServeRequest(f"r{next(_ids)}", tokens, parameters, conversation, salt)
    stream = await orchestrator.serve(request)
    async for _ in stream:
        pass
    record = await orchestrator.turn_record(request.request_id, 10.0)
    assert record is not None
    return stream, record


async def reference_answers(turns: Sequence[tuple[np.ndarray, dict[str, object]]]) -> list[list[int]]:
    """The same prompts on an aggregated worker that reuses nothing."""
    plain = config(kv_cache_config={"tokens_per_block": BLOCK, "max_tokens": 8192, "enable_block_reuse": False})
    async with local_cluster(plain, aggregated=True) as orchestrator:
        return [(await ask(orchestrator, tokens, **how))[0].token_ids for tokens, how in turns]


@pytest.mark.parametrize("policy", ["all_reusable", "per_request", "per_conversation"])
async def test_five_turns_then_a_rewind_are_equal_to_an_aggregated_run_and_compute_only_what_is_new(policy: str):
    cache = {
        "tokens_per_block": BLOCK,
        "max_tokens": 4096,
        "block_reuse_config": {"policy": policy, **({"max_num_turns": 5} if policy == "per_conversation" else {})},
    }
    asked: list[tuple[np.ndarray, dict[str, object]]] = []
    got: list[list[int]] = []
    async with local_cluster(config(kv_cache_config=cache)) as orchestrator:
        tokens, history = prompt(70), []
        for turn in range(5):
            stream, record = await ask(orchestrator, tokens)
            asked.append((tokens, {}))
            got.append(stream.token_ids)
            usage = record.usage
            new = len(tokens) if turn == 0 else 11 + 1  # the user's tokens, and the last sampled one that has no KV
            assert usage.recomputed_tokens == new
            assert usage.ctx_cached_tokens + usage.ctx_pulled_tokens + usage.recomputed_tokens == len(tokens)
            gen_has = 0 if turn == 0 else len(tokens) - new
            assert usage.gen_cached_tokens == gen_has
            assert usage.ctx_to_gen_blocks == -(-len(tokens) // BLOCK) - gen_has // BLOCK
            endpoint = len(tokens) + 20 - 1
            assert record.backflow == "done" and record.endpoint_tokens == endpoint
            assert record.gen_to_ctx_blocks == -(-endpoint // BLOCK) - len(tokens) // BLOCK
            history.append((tokens, stream.token_ids))
            tokens = extend(tokens, stream.token_ids, prompt(11, seed=turn + 1))
        base, answer = history[1]
        branch = extend(base, answer, prompt(9, seed=99))
        stream, record = await ask(orchestrator, branch)
        asked.append((branch, {}))
        got.append(stream.token_ids)
        assert record.usage.recomputed_tokens == 9  # the last token of turn 2 has KV too: turn 3 went on from it
        await quiet(orchestrator, 10)
    assert got == await reference_answers(asked)


async def test_sampled_answers_do_not_depend_on_where_they_were_computed():
    how = {"temperature": 0.9, "top_p": 0.9, "seed": 7}
    tokens = prompt(40)
    async with local_cluster(config()) as orchestrator:
        first, _ = await ask(orchestrator, tokens, **how)
        again, record = await ask(orchestrator, tokens, conversation="d", **how)
        assert record.usage.recomputed_tokens == 1  # the last prompt token is always computed
        await quiet(orchestrator, 10)
    assert first.token_ids == again.token_ids == (await reference_answers([(tokens, how)]))[0]


async def test_many_conversations_at_once_with_small_pools_all_get_their_answers():
    small = {
        "tokens_per_block": BLOCK,
        "max_tokens": 24 * BLOCK,
        "block_reuse_config": {"policy": "per_conversation", "max_num_turns": 2},
    }
    prompts = [prompt(30 + 7 * i, seed=i) for i in range(12)]
    async with local_cluster(
        config(
            kv_cache_config=small,
            context_servers={"num_instances": 2},
            generation_servers={"num_instances": 2},
            engine={"max_num_tokens": 32, "max_seq_len": 256, "max_batch_size": 4},
        )
    ) as orchestrator:
        results = await asyncio.gather(
            *(ask(orchestrator, tokens, conversation=f"c{i}") for i, tokens in enumerate(prompts))
        )
        again = await asyncio.gather(
            *(ask(orchestrator, tokens, conversation=f"c{i}") for i, tokens in enumerate(prompts))
        )
        await quiet(orchestrator, 10)
    expected = await reference_answers([(tokens, {}) for tokens in prompts])
    assert [stream.token_ids for stream, _ in results] == expected
    assert [stream.token_ids for stream, _ in again] == expected


async def test_salts_do_not_share_blocks_though_the_conversation_id_is_the_same():
    tokens = prompt(64)
    async with local_cluster(config()) as orchestrator:
        await ask(orchestrator, tokens, salt="one")
        _, record = await ask(orchestrator, tokens, salt="two")
        assert record.usage.ctx_cached_tokens == 0 and record.usage.gen_cached_tokens == 0
        _, record = await ask(orchestrator, tokens, salt="one")
        assert record.usage.ctx_cached_tokens == 63


async def test_without_a_conversation_id_prefixes_still_match_and_answers_flow_back():
    tokens = prompt(50)
    async with local_cluster(config()) as orchestrator:
        stream, _ = await ask(orchestrator, tokens, conversation=None)
        _, record = await ask(orchestrator, extend(tokens, stream.token_ids, prompt(5, 3)), conversation=None)
        assert record.usage.recomputed_tokens == 6


async def test_an_answer_of_one_token_never_reaches_the_generation_side():
    async with local_cluster(config()) as orchestrator:
        stream, record = await ask(orchestrator, prompt(20), max_tokens=1)
        assert len(stream.token_ids) == 1 and stream.finish_reason is FinishReason.LENGTH
        assert record.usage.gen_worker is None and record.backflow == "off"
        await quiet(orchestrator, 10)


async def test_stop_ends_the_answer_and_keeps_the_turn():
    tokens = prompt(40)
    async with local_cluster(config()) as orchestrator:
        request = ServeRequest("stopper", tokens, SamplingParams(max_tokens=1500, ignore_eos=True), "c")
        stream = await orchestrator.serve(request)
        async for _ in stream:
            if len(stream.token_ids) >= 10:
                break
        await stream.stop(10)
        assert stream.finish_reason is FinishReason.STOP and stream.usage.completion_tokens == 10
        assert len(stream.token_ids) < 1500
        record = await orchestrator.turn_record("stopper", 10.0)
        assert record is not None and record.backflow == "done"
        _, record = await ask(orchestrator, extend(tokens, stream.token_ids, prompt(6, 5)))
        assert record.usage.recomputed_tokens == 6 + 1
        await quiet(orchestrator, 10)


@pytest.mark.parametrize("when", ["at once", "after tokens"])
async def test_cancel_gives_everything_back(when: str):
    async with local_cluster(config()) as orchestrator:
        request = ServeRequest("cancelled", prompt(500), SamplingParams(max_tokens=1500, ignore_eos=True), "c")
        stream = await orchestrator.serve(request)
        if when == "after tokens":
            async for _ in stream:
                if len(stream.token_ids) >= 5:
                    break
        await stream.cancel()
        assert stream.finish_reason is FinishReason.CANCELLED
        await quiet(orchestrator, 10)
        stream, _ = await ask(orchestrator, prompt(30))
        assert len(stream.token_ids) == 20


async def test_prompts_that_cannot_fit_are_refused_and_max_tokens_is_cut():
    async with local_cluster(config(engine={"max_seq_len": 128, "max_num_tokens": 64})) as orchestrator:
        with pytest.raises(PromptTooLongError, match="max_seq_len"):
            await ask(orchestrator, prompt(128))
        with pytest.raises(InvalidRequestError, match="empty"):
            await ask(orchestrator, prompt(0))
        stream, _ = await ask(orchestrator, prompt(120), max_tokens=100)
        assert stream.finish_reason is FinishReason.LENGTH and len(stream.token_ids) == 8
    tiny = {"tokens_per_block": BLOCK, "max_tokens": 4 * BLOCK}
    async with local_cluster(config(kv_cache_config=tiny)) as orchestrator:
        with pytest.raises(PromptTooLongError, match="KV pool"):
            await ask(orchestrator, prompt(4 * BLOCK))
        stream, _ = await ask(orchestrator, prompt(3 * BLOCK), max_tokens=BLOCK)
        assert len(stream.token_ids) == BLOCK
        await quiet(orchestrator, 10)


async def test_the_queue_is_bounded():
    async with local_cluster(config(server={"max_queued_requests": 1})) as orchestrator:
        stream = await orchestrator.serve(ServeRequest("a", prompt(20), SamplingParams(max_tokens=50, ignore_eos=True)))
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError):
            await ask(orchestrator, prompt(20))
        async for _ in stream:
            pass


async def test_a_short_rest_is_computed_on_the_generation_side_when_so_configured():
    tokens = prompt(64)
    async with local_cluster(config(conditional_disagg_config={"max_local_prefill_length": 16})) as orchestrator:
        stream, first = await ask(orchestrator, tokens)
        assert first.usage.ctx_worker == "context-0"
        longer = extend(tokens, stream.token_ids, prompt(5, 3))
        stream, second = await ask(orchestrator, longer)
        assert second.usage.ctx_worker is None and second.usage.recomputed_tokens == 6
    assert stream.token_ids == (await reference_answers([(longer, {})]))[0]


async def test_back_flow_off_computes_the_answer_again_and_says_so():
    off = {"backend": "inproc", "kv_transfer_timeout_ms": 10000, "kv_backflow": "off", "kv_prefix_pull": "off"}
    tokens = prompt(64)
    async with local_cluster(config(cache_transceiver_config=off)) as orchestrator:
        stream, record = await ask(orchestrator, tokens)
        assert record.backflow == "off" and record.gen_to_ctx_bytes == 0
        _, record = await ask(orchestrator, extend(tokens, stream.token_ids, prompt(5, 3)))
        assert record.usage.recomputed_tokens == 25
        await quiet(orchestrator, 10)
