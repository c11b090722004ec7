"""Serves a request, top to bottom. Read `_attempt` first: it is the life of a request in one function.

The orchestrator owns the hand-off: whatever a worker grants and nobody fetches is released here. It holds no KV and
computes nothing; it runs in the frontend's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cluster.errors import (
    ClusterError,
    EngineFailedError,
    NotReadyError,
    QueueFullError,
    TransferFailedError,
    WorkerLostError,
)
from cluster.fitting import fitted
from cluster.fleet import Fleet
from cluster.prefix_loans import PrefixLoans
from cluster.request import EngineRequest, FinishReason
from cluster.routing import Router, RouteRequest
from cluster.serve_metrics import ServeMetrics
from cluster.serve_request import ServeRequest, TurnRecord
from cluster.serve_stream import ServeStream
from cluster.turns import Turns
from cluster.worker import Admission, AdmissionStatus, TurnHandoff, WorkerRole, WorkerStats
from cluster.worker_handle import WorkerHandle
from transceiver import GrantTicket

__all__ = ["Orchestrator", "OrchestratorSettings"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OrchestratorSettings:
    """Limits of the orchestrator, from the configuration.

    recovery_s   how long a request waits for a worker of a role to come back before it is refused
    backflow_wait_s  how long a continuing turn waits for the blocks of the last answer
    tokens_per_block, prefix_pull  block size of every worker, and whether a prefill may pull from whoever holds blocks
    """

    max_queued_requests: int = 256
    max_retries: int = 1
    max_local_prefill_length: int = 0
    recovery_s: float = 60.0
    backflow_wait_s: float = 5.0
    tokens_per_block: int = 32
    prefix_pull: bool = True


class Orchestrator:
    """Routes requests to workers, moves them from the context to the generation side, retries after a death."""

    def __init__(
        self, fleet: Fleet, context_router: Router, generation_router: Router, settings: OrchestratorSettings
    ) -> None:
        self.fleet = fleet
        self.settings = settings
        self.metrics = ServeMetrics()
        self.loans = PrefixLoans(fleet, settings.tokens_per_block, enabled=settings.prefix_pull)
        self.turns = Turns(self.metrics, on_kept=self.loans.holds)
        self._routers = {WorkerRole.CONTEXT: context_router, WorkerRole.GENERATION: generation_router}
        self._routers[WorkerRole.AGGREGATED] = generation_router
        self._sequence = itertools.count()
        self._aggregated = bool(fleet.of_role(WorkerRole.AGGREGATED))
        self._streams: dict[asyncio.Task[None], ServeStream] = {}
        self._closing: ClusterError | None = None
        self._chores: set[asyncio.Task[None]] = set()
        self._incarnations: dict[str, str] = {}

    @property
    def ready(self) -> bool:
        """Whether a request can be served now."""
        return self._closing is None and self.fleet.serving

    async def close(self) -> None:
        """Cancel what is being served, let closing turns end, close the workers."""
        await self.end_requests(NotReadyError("the server is shutting down"))
        await self.turns.drain(timeout_s=5.0)
        await self.fleet.close()

    async def serve(self, request: ServeRequest) -> ServeStream:
        """Start serving.

        Raises PromptTooLongError, InvalidRequestError, QueueFullError, or NotReadyError while the workers start, before
        anything is sent. A request that arrives while a lost worker comes back waits for it.
        """
        if self._closing is not None:
            raise self._closing
        if not self.fleet.started:
            raise NotReadyError("the workers are starting; wait until GET /health answers 200")
        if self.in_flight >= self.settings.max_queued_requests:
            raise QueueFullError(
                f"{self.in_flight} requests are in flight, which is the limit; try again later, or raise "
                "server.max_queued_requests"
            )
        request = fitted(request, [handle.info for handle in self.fleet.handles if handle.info is not None])
        stream = ServeStream(request, self.metrics.inter_token.observe)
        task = asyncio.create_task(self._serve(request, stream))
        stream.attach(task)
        self._streams[task] = stream
        task.add_done_callback(self._streams.pop)
        return stream

    async def drain(self, timeout_s: float) -> None:
        """Take no more requests, and wait until those being served and their back-flows have ended, or `timeout_s`."""
        self._closing = NotReadyError("the server is shutting down")
        deadline = time.monotonic() + timeout_s
        if self._streams:
            await asyncio.wait(list(self._streams), timeout=timeout_s)
        await self.turns.settle(max(0.0, deadline - time.monotonic()))

    async def end_requests(self, error: ClusterError) -> None:
        """Take no more requests, and end those being served with `error`. Waits until they have let go of all."""
        self._closing = error
        tasks = list(self._streams)
        for task, stream in list(self._streams.items()):
            if stream.finish_reason is None:
                stream.fail(error)
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def in_flight(self) -> int:
        """Requests being served."""
        return len(self._streams)

    async def _serve(self, request: ServeRequest, stream: ServeStream) -> None:
        try:
            await self._serve_with_retries(request, stream)
        except ClusterError as error:
            stream.fail(error)
        except asyncio.CancelledError:
            if stream.finish_reason is None:
                stream.finish(FinishReason.CANCELLED)
            raise
        except Exception as error:
            log.exception("request %s failed", request.request_id)
            stream.fail(EngineFailedError(f"internal error: {type(error).__name__}"))
        finally:
            record = TurnRecord(request.request_id, request.conversation_id, stream.finish_reason, stream.usage)
            self.metrics.request_ended(record)
            if stream.finish_reason in (FinishReason.ERROR, FinishReason.CANCELLED):
                self.turns.keep(record)

    async def _serve_with_retries(self, request: ServeRequest, stream: ServeStream) -> None:
        for attempt in itertools.count():
            try:
                await self._attempt(request, stream)
                return
            except (WorkerLostError, TransferFailedError) as error:
                if stream.stop_requested:  # the client has its answer; only the turn's reuse is lost
                    stream.finish(FinishReason.STOP)
                    return
                if attempt >= self.settings.max_retries:
                    raise
                log.warning("request %s is tried again: %s", request.request_id, error.message)
                self.metrics.retries.inc()
                stream.note(retries=attempt + 1)

    async def _attempt(self, request: ServeRequest, stream: ServeStream) -> None:
        """One try from prompt to last token. Tokens that the client already has are given along, never sent again."""
        await self.turns.wait_for_prefix(request.prompt_ids, request.cache_salt, self.settings.backflow_wait_s)
        engine_request = EngineRequest(
            request_id=f"{request.request_id}#{next(self._sequence)}",
            prompt_ids=request.prompt_ids,
            sampling=request.sampling,
            conversation_id=request.conversation_id,
            cache_salt=request.cache_salt,
            first_token_ids=tuple(stream.token_ids),
        )
        role = WorkerRole.AGGREGATED if self._aggregated else WorkerRole.GENERATION
        async with self._worker(role, request) as generation:
            if self._aggregated or await self._prefers_local_prefill(generation, request):
                await self._decode(request, stream, engine_request, generation, None, None)
                return
            async with self._worker(WorkerRole.CONTEXT, request) as context:
                token, ticket = await self._prefill(request, stream, engine_request, context)
            if ticket is None:
                return
            engine_request = replace(engine_request, first_token_ids=(*engine_request.first_token_ids, token))
            try:
                await self._decode(request, stream, engine_request, generation, context, ticket)
            except BaseException:
                await _give_up(context, engine_request.request_id)
                raise

    async def _prefill(
        self, request: ServeRequest, stream: ServeStream, engine_request: EngineRequest, context: WorkerHandle
    ) -> tuple[int, GrantTicket | None]:
        """The prompt's KV and the first token, on a context worker. No ticket = the answer ended with that token."""
        try:
            prefill = await self.loans.prefill(context, engine_request)
        except asyncio.CancelledError:
            await _give_up(context, engine_request.request_id)
            raise
        prompt_tokens = len(request.prompt_ids)
        cached = min(prefill.cached_tokens, prompt_tokens)
        pulled = min(prefill.pulled_tokens, prompt_tokens - cached)
        if stream.usage.retries and stream.usage.ctx_worker is not None:  # what an earlier try computed was computed
            cached = min(cached, stream.usage.ctx_cached_tokens)
            pulled = min(pulled, stream.usage.ctx_pulled_tokens)
        self.loans.holds(context.worker_id, request.prompt_ids, request.cache_salt)
        stream.note(
            ctx_cached_tokens=cached,
            ctx_pulled_tokens=pulled,
            recomputed_tokens=prompt_tokens - cached - pulled,
            ctx_worker=context.worker_id,
        )
        self.metrics.prefills.labels("context").inc()
        stream.emit((prefill.token_id,))
        if prefill.ticket is None:
            self._close_turn(request, stream, engine_request, context, None, None, prefill.finish_reason)
        return prefill.token_id, prefill.ticket

    async def _decode(
        self,
        request: ServeRequest,
        stream: ServeStream,
        engine_request: EngineRequest,
        generation: WorkerHandle,
        context: WorkerHandle | None,
        ticket: GrantTicket | None,
    ) -> None:
        """The rest of the answer on a generation worker, which pulls the blocks it lacks under `ticket` first."""
        request_id = engine_request.request_id
        stream.note(gen_worker=generation.worker_id)
        generation.open_stream(request_id)
        try:
            started = time.monotonic()
            admission = await generation.generate(engine_request, ticket)
            if ticket is not None:
                self._note_transfer(request, stream, generation, admission, time.monotonic() - started)
            stream.on_stop(lambda: generation.stop(request_id))
            if stream.stop_requested:
                await generation.stop(request_id)
            await self._relay(request, stream, engine_request, generation, context)
        except (asyncio.CancelledError, TransferFailedError):
            await _give_up(generation, request_id)
            raise
        finally:
            stream.on_stop(None)
            generation.close_stream(request_id)

    def _note_transfer(
        self,
        request: ServeRequest,
        stream: ServeStream,
        generation: WorkerHandle,
        admission: Admission,
        seconds: float,
    ) -> None:
        """Enter a hand-off into the request's usage. Raises TransferFailedError when the KV did not arrive."""
        usage, moved = stream.usage, admission.transfer
        prompt_tokens = len(request.prompt_ids)  # a retry also moves the tokens that the client has: not the prompt's
        cached = min(admission.cached_tokens, prompt_tokens)
        stream.note(
            gen_cached_tokens=cached,
            transferred_tokens=min(admission.transferred_tokens, prompt_tokens - cached),
            repaired_tokens=admission.repaired_tokens,
            ctx_to_gen_blocks=usage.ctx_to_gen_blocks + (moved.blocks if moved else 0),
            ctx_to_gen_bytes=usage.ctx_to_gen_bytes + (moved.bytes if moved else 0),
            transport=moved.transport if moved else None,
        )
        if admission.status is AdmissionStatus.TRANSFER_FAILED:
            self.metrics.transfer_failures.labels("ctx_to_gen").inc()
            reason = moved.reason if moved else "unknown"
            raise TransferFailedError(f"{generation.worker_id} could not fetch the prompt's KV: {reason}")
        self.metrics.handoff.observe(seconds)

    async def _relay(
        self,
        request: ServeRequest,
        stream: ServeStream,
        engine_request: EngineRequest,
        generation: WorkerHandle,
        context: WorkerHandle | None,
    ) -> None:
        async for delta in generation.outputs(engine_request.request_id):
            stream.emit(delta.token_ids)
            if delta.finish_reason is None:
                continue
            if delta.finish_reason is FinishReason.ERROR:
                raise EngineFailedError(f"{generation.worker_id}: {delta.error}")
            if context is None:
                prompt_tokens = len(request.prompt_ids)
                cached = min(delta.cached_tokens or 0, prompt_tokens)
                stream.note(ctx_cached_tokens=cached, recomputed_tokens=prompt_tokens - cached)
                self.metrics.prefills.labels("local").inc()
                context = self._context_for_turn(request)
            self._close_turn(request, stream, engine_request, context, generation, delta.ticket, delta.finish_reason)

    def _close_turn(
        self,
        request: ServeRequest,
        stream: ServeStream,
        engine_request: EngineRequest,
        context: WorkerHandle | None,
        generation: WorkerHandle | None,
        ticket: GrantTicket | None,
        reason: FinishReason,
    ) -> None:
        """The answer is complete: tell the client, then let the context side take what it lacks of the turn."""
        stream.finish(reason)
        record = TurnRecord(request.request_id, request.conversation_id, reason, stream.usage)
        turn = TurnHandoff(
            request_id=engine_request.request_id,
            conversation_id=request.conversation_id,
            cache_salt=request.cache_salt,
            token_ids=np.concatenate([request.prompt_ids, np.asarray(stream.token_ids, np.int32)]),
            ticket=ticket,
            prompt_tokens=len(request.prompt_ids),
            finish_reason=reason,
        )
        route = RouteRequest(turn.token_ids, request.conversation_id, request.cache_salt)
        if stream.usage.gen_worker is not None:
            self._routers[WorkerRole.GENERATION].record(route, stream.usage.gen_worker)
            self.loans.holds(stream.usage.gen_worker, turn.token_ids[:-1], request.cache_salt)
        if context is not None:
            self._routers[WorkerRole.CONTEXT].record(route, context.worker_id)
            self.turns.close(context, generation, turn, record)
            return
        self.turns.keep(record)
        if ticket is not None and generation is not None:  # nobody will fetch it
            self._spawn(_release(generation, turn.request_id))

    def _context_for_turn(self, request: ServeRequest) -> WorkerHandle | None:
        """Who keeps the turn of a request that no context worker has seen; None when there is none."""
        candidates = self.fleet.ready(WorkerRole.CONTEXT)
        if not candidates:
            return None
        return self._choose(WorkerRole.CONTEXT, request, candidates)

    @contextlib.asynccontextmanager
    async def _worker(self, role: WorkerRole, request: ServeRequest) -> AsyncIterator[WorkerHandle]:
        """A ready worker of a role, counted as busy while in use; waits for one to come back if none is up."""
        worker = self._choose(role, request, await self.fleet.wait_ready(role, self.settings.recovery_s))
        worker.active_requests += 1
        try:
            yield worker
        finally:
            worker.active_requests -= 1

    def _choose(self, role: WorkerRole, request: ServeRequest, candidates: Sequence[WorkerHandle]) -> WorkerHandle:
        router = self._routers[role]
        for handle in candidates:
            incarnation = handle.info.incarnation if handle.info is not None else ""
            if self._incarnations.setdefault(handle.worker_id, incarnation) != incarnation:
                self._incarnations[handle.worker_id] = incarnation
                router.remove_worker(handle.worker_id)  # it came back with an empty cache
                self.loans.lost(handle.worker_id)
        chosen = router.choose(
            RouteRequest(request.prompt_ids, request.conversation_id, request.cache_salt), candidates
        )
        return next(handle for handle in candidates if handle.worker_id == chosen.worker_id)

    async def _prefers_local_prefill(self, generation: WorkerHandle, request: ServeRequest) -> bool:
        """Conditional disaggregation: the generation side has most of the prompt, the rest is short."""
        limit = self.settings.max_local_prefill_length
        if limit == 0:
            return False
        cached = await generation.probe(request.prompt_ids[:-1], request.cache_salt)
        return cached > 0 and len(request.prompt_ids) - cached <= limit

    # --- operations ---

    async def turn_record(self, request_id: str, wait_s: float = 0.0) -> TurnRecord | None:
        """How a request was served, waiting up to `wait_s` for its back-flow. None = unknown or forgotten."""
        return await self.turns.record(request_id, wait_s)

    async def end_conversation(self, conversation_id: str, cache_salt: str | None = None) -> None:
        """Forget a conversation's retained turns on every worker."""
        await self._on_every_worker("end_conversation", conversation_id, cache_salt)

    async def reset_prefix_cache(self) -> None:
        """Drop all cached blocks that nobody uses, on every worker."""
        await self._on_every_worker("reset_prefix_cache")

    async def stats(self) -> list[WorkerStats]:
        """Counters of every worker that answers."""
        ready = [handle for role in WorkerRole for handle in self.fleet.ready(role)]
        results = await asyncio.gather(*(handle.stats() for handle in ready), return_exceptions=True)
        return [result for result in results if isinstance(result, WorkerStats)]

    async def _on_every_worker(self, method: str, *args: object) -> None:
        ready = [handle for role in WorkerRole for handle in self.fleet.ready(role)]
        results = await asyncio.gather(*(getattr(handle, method)(*args) for handle in ready), return_exceptions=True)
        for handle, result in zip(ready, results, strict=True):
            if isinstance(result, Exception):
                log.warning("%s on %s: %s", method, handle.worker_id, result)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._chores.add(task)
        task.add_done_callback(self._chores.discard)


async def _give_up(worker: WorkerHandle, request_id: str) -> None:
    """Abort a request on a worker even while this task is being cancelled."""
    with contextlib.suppress(ClusterError, TimeoutError):
        async with asyncio.timeout(5.0):
            await asyncio.shield(asyncio.ensure_future(worker.abort(request_id)))


async def _release(worker: WorkerHandle, request_id: str) -> None:
    """Withdraw a grant that nobody will use."""
    with contextlib.suppress(ClusterError):
        await worker.release(request_id)
