"""Grants name the worker that will pull them, where it is known; what cannot be granted or pulled is a reason."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from cluster.channel import LocalChannel
from cluster.config import ClusterConfig
from cluster.errors import NotReadyError
from cluster.local_cluster import local_cluster
from cluster.orchestrator import Orchestrator
from cluster.request import EngineRequest, FinishReason, SamplingParams
from cluster.serve_request import ServeRequest
from cluster.worker import AdmissionStatus, ContextWorker, GenerationWorker, PrefillResult, PrefixLoan, TurnHandoff
from kvcache import SequenceCache
from tests.integration.cluster.quiet import quiet
from transceiver import CacheTransceiver, Publication, TransferStatus

PROMPT = np.random.default_rng(1).integers(0, 256, 150).astype(np.int32)
OTHER = np.random.default_rng(2).integers(0, 256, 150).astype(np.int32)
_ids = itertools.count()


def config(contexts: int = 1, **transceiver: Any) -> ClusterConfig:
    return ClusterConfig.model_validate(
        {
            "model": "hash",
            "engine": {"max_num_tokens": 64, "max_seq_len": 2048},
            "kv_cache_config": {"tokens_per_block": 16, "max_tokens": 4096},
            "context_servers": {"num_instances": contexts, "router": {"type": "round_robin"}},
            "cache_transceiver_config": {
                "backend": "inproc",
                "kv_transfer_timeout_ms": 30_000,  # so long pages would be held for a receiver that died
                "connect_timeout_ms": 200,
                "kv_backflow": "eager",
                "kv_prefix_pull": "eager",
                **transceiver,
            },
        }
    )


async def ask(o: Orchestrator, tokens: np.ndarray) -> None:
    request = ServeRequest(f"b{next(_ids)}", tokens, SamplingParams(max_tokens=5, ignore_eos=True), "c")
    async for _ in await o.serve(request):
        pass
    await o.turn_record(request.request_id, 5)


def worker(o: Orchestrator, worker_id: str) -> Any:
    handle = next(handle for handle in o.fleet.handles if handle.worker_id == worker_id)
    assert isinstance(handle.channel, LocalChannel)
    return handle.channel.worker


def asked_for(tokens: np.ndarray, **changes: Any) -> EngineRequest:
    """A request of 5 tokens."""
    parameters = SamplingParams(max_tokens=5, ignore_eos=True)
    return EngineRequest(**{"request_id": f"e{next(_ids)}", "prompt_ids": tokens, "sampling": parameters, **changes})


async def prefilled(context: ContextWorker, request: EngineRequest) -> PrefillResult:
    result = await context.prefill(request)
    assert isinstance(result, PrefillResult) and result.ticket is not None
    return result


async def until(condition: Callable[[], Awaitable[bool]], seconds: float = 5) -> None:
    async with asyncio.timeout(seconds):
        while not await condition():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("pipelined", [False, True])
async def test_every_grant_of_a_turn_names_its_receiver(pipelined: bool, monkeypatch: pytest.MonkeyPatch):
    grants: set[tuple[str, str | None]] = set()
    publish = CacheTransceiver.publish

    def spy(
        self: CacheTransceiver, transfer_id: str, *args: Any, receiver: str | None = None, **rest: Any
    ) -> Publication:
        grants.add((self._ctx.worker_id, receiver))
        return publish(self, transfer_id, *args, receiver=receiver, **rest)

    monkeypatch.setattr(CacheTransceiver, "publish", spy)
    async with local_cluster(config(contexts=2, enable_pipelined_transfer=pipelined)) as o:
        await ask(o, PROMPT)
        assert grants == {("context-0", "generation-0"), ("generation-0", "context-0")}
        await ask(o, np.concatenate([PROMPT, OTHER]))  # on the other context worker, which borrows the prefix
        assert grants == {
            ("context-0", "generation-0"), ("context-1", "generation-0"),
            ("generation-0", "context-0"), ("generation-0", "context-1"),
        }  # fmt: skip
        await quiet(o)


@pytest.mark.parametrize("known", [True, False])
async def test_a_receiver_that_dies_before_it_asks_frees_the_pages_at_once_where_it_is_known(known: bool):
    async with local_cluster(config()) as o:
        await ask(o, PROMPT)  # the link stands
        context = worker(o, "context-0")
        receiver = "generation-0" if known else None
        await prefilled(context, asked_for(OTHER, kv_receiver=receiver))
        assert (await context.stats()).open_grants == 1
        transceiver = worker(o, "generation-0").transceiver
        transceiver._ctx.post(transceiver._transport.kill)
        began = time.monotonic()

        async def freed() -> bool:
            stats = await context.stats()
            return stats.open_grants == stats.cache.peer_pins == 0

        if known:
            await until(freed)
            assert time.monotonic() - began < 3  # the lease: 30 s
        else:
            await asyncio.sleep(0.6)
            assert not await freed()


async def test_nobody_else_gets_what_was_granted_to_one_worker():
    async with local_cluster(config()) as o:
        request = asked_for(PROMPT, kv_receiver="generation-1")
        result = await prefilled(worker(o, "context-0"), request)
        mine = dataclasses.replace(request, first_token_ids=(result.token_id,))
        admission = await worker(o, "generation-0").generate(mine, result.ticket)
        assert admission.status is AdmissionStatus.TRANSFER_FAILED
        assert "belongs to another worker" in admission.transfer.reason
        await worker(o, "context-0").release(request.request_id)
        await quiet(o)


DAMAGE = [{"token": "text"}, {"token": bytes(99)}, {"transfer_id": "x" * 300}, {"address": None}]


@pytest.mark.parametrize("damage", DAMAGE, ids=["type", "length", "long id", "no address"])
async def test_a_damaged_ticket_is_a_failed_transfer_with_its_reason(damage: dict[str, Any]):
    async with local_cluster(config()) as o:
        context, generation = worker(o, "context-0"), worker(o, "generation-0")
        assert isinstance(generation, GenerationWorker)
        request = asked_for(PROMPT, kv_receiver="generation-0")
        result = await prefilled(context, request)
        assert result.ticket is not None
        bad = dataclasses.replace(result.ticket, **damage)
        known = dataclasses.replace(request, first_token_ids=(result.token_id,))
        admission = await generation.generate(known, bad)
        assert admission.status is AdmissionStatus.TRANSFER_FAILED
        assert admission.transfer is not None
        assert f"the ticket's {next(iter(damage))}" in admission.transfer.reason

        turn = TurnHandoff(request.request_id, "c", None, known.known_ids, bad, len(PROMPT), FinishReason.STOP)
        closed = await context.close_turn(turn)
        assert closed.transfer is not None
        assert (closed.transfer.status, "the ticket's" in closed.transfer.reason) == (TransferStatus.FAILED, True)
        assert closed.endpoint_tokens == closed.already_cached_tokens == len(PROMPT)

        lent = await context.prefill(asked_for(OTHER), PrefixLoan("loan", 64, bad))
        assert isinstance(lent, PrefillResult)
        assert (lent.recomputed_tokens, lent.pull is not None and "the ticket's" in lent.pull.reason) == (150, True)
        for request_id in [*context._grants.ids()]:
            await context.release(request_id)
        await ask(o, PROMPT)  # both engines live
        await quiet(o)


async def test_blocks_that_no_transfer_can_bring_are_a_failed_transfer(monkeypatch: pytest.MonkeyPatch):
    async with local_cluster(config()) as o:
        request = asked_for(PROMPT)
        result = await prefilled(worker(o, "context-0"), request)
        real = SequenceCache.block_table

        def impossible(self: SequenceCache, *args: Any) -> Any:
            table = real(self, *args)
            return dataclasses.replace(table, pages=table.pages + 10_000)

        with monkeypatch.context() as patch:
            patch.setattr(SequenceCache, "block_table", impossible)
            known = dataclasses.replace(request, first_token_ids=(result.token_id,))
            admission = await worker(o, "generation-0").generate(known, result.ticket)
        assert admission.status is AdmissionStatus.TRANSFER_FAILED
        assert "a page outside the pool" in admission.transfer.reason
        await worker(o, "context-0").release(request.request_id)
        await quiet(o)


async def test_what_cannot_be_granted_is_refused_and_pins_nothing():
    async with local_cluster(config()) as o:
        context = worker(o, "context-0")
        with pytest.raises(NotReadyError, match="cannot grant its blocks: transfer_id is not text of at most 256"):
            await context.prefill(asked_for(PROMPT, request_id="x" * 300))
        with pytest.raises(NotReadyError, match="cannot grant its blocks: receiver"):
            await context.prefill(asked_for(PROMPT, kv_receiver="x" * 300))
        assert await context.lend(asked_for(PROMPT, request_id="x" * 300)) is None
        await ask(o, PROMPT)
        await quiet(o)


@pytest.mark.parametrize("last", [False, True])
async def test_chunks_that_cannot_be_granted_end_the_hand_over_ahead_only(last: bool, monkeypatch: pytest.MonkeyPatch):
    extend, refused = Publication.extend, []

    def refuse(self: Publication, tables: Any, *, last: bool, wanted: bool = last) -> None:
        if last is wanted:
            refused.append(self.transfer_id)
            raise ValueError("impossible")
        extend(self, tables, last=last)

    monkeypatch.setattr(Publication, "extend", refuse)
    async with local_cluster(config(enable_pipelined_transfer=True)) as o:
        await ask(o, PROMPT)
        assert len(refused) == 1
        await quiet(o)
