"""Takes requests, serves each in attempts (`attempt.py` is the life of a request), and tells how they went.

The orchestrator holds no KV and computes nothing; it runs in the frontend's event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from cluster.attempt import Attempt, AttemptContext
from cluster.dispatcher import Dispatcher
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
from cluster.request import FinishReason
from cluster.routing import Router
from cluster.serve_metrics import ServeMetrics
from cluster.serve_request import ServeRequest, TurnRecord
from cluster.serve_stream import ServeStream
from cluster.turns import Turns
from cluster.worker import WorkerRole, WorkerStats

__all__ = ["Orchestrator", "OrchestratorSettings"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OrchestratorSettings:
    """Limits of the orchestrator, from the configuration.

    recovery_s   how long a request waits for a worker of a role to come back before it is refused
    backflow_wait_s  how long a continuing turn waits for the blocks of the last answer
    tokens_per_block, prefix_pull  block size of every worker, and whether a prefill may pull from whoever holds blocks
    pipeline_from  prompts of more tokens (one prefill step) are handed over while they are computed; None = never
    """

    max_queued_requests: int = 256
    max_retries: int = 1
    max_local_prefill_length: int = 0
    recovery_s: float = 60.0
    backflow_wait_s: float = 5.0
    tokens_per_block: int = 32
    prefix_pull: bool = True
    pipeline_from: int | None = None


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
        self._attempts = itertools.count()
        self._context = AttemptContext(
            dispatcher=Dispatcher(fleet, context_router, generation_router, self.loans, settings.recovery_s),
            loans=self.loans,
            turns=self.turns,
            metrics=self.metrics,
            aggregated=bool(fleet.of_role(WorkerRole.AGGREGATED)),
            max_local_prefill_length=settings.max_local_prefill_length,
            pipeline_from=settings.pipeline_from,
            release=lambda worker, request_id: self._spawn(worker.let_go(request_id)),
        )
        self._streams: dict[asyncio.Task[None], ServeStream] = {}
        self._closing: ClusterError | None = None
        self._chores: set[asyncio.Task[None]] = set()

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
                await self.turns.wait_for_prefix(request.prompt_ids, request.cache_salt, self.settings.backflow_wait_s)
                await Attempt(f"{request.request_id}#{next(self._attempts)}", request, stream, self._context).run()
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
