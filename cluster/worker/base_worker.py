"""What every worker is: a model, a cache manager, an engine and a transceiver that belong together.

`ContextWorker` and `GenerationWorker` add the two halves of a request. A worker knows nothing of Ray: the controller
runs it as an actor, tests run it in their own event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Coroutine
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cluster.errors import EngineBrokenError, NotReadyError, StartupError, WorkerLostError
from cluster.log import configure_logging
from cluster.request import EngineRequest, FinishReason, conversation_key
from cluster.scheduler import SequenceEvent
from cluster.sequence import Sequence
from cluster.worker.grants import Grants
from cluster.worker.live_requests import LiveRequests
from cluster.worker.messages import PrefixLoan, WorkerInfo, WorkerStats
from cluster.worker.parts import build_parts
from cluster.worker.pulls import Pulls
from cluster.worker.spec import WorkerSpec
from kvcache import ReuseScope, SequenceCache
from transceiver import TransceiverError
from transceiver.testing import FaultInjector

__all__ = ["BaseWorker"]

log = logging.getLogger(__name__)

_STUCK_STEP_S = 300.0  # a forward pass that takes longer will never end: the device or the kernel hangs


class BaseWorker:
    """Start, stop, probe, abort and report. All methods run on one event loop; none blocks it for long.

    `faults` disturbs the transceiver, for tests of what happens then (backend inproc only).
    """

    def __init__(self, spec: WorkerSpec, *, faults: FaultInjector | None = None) -> None:
        self.spec = spec
        self._faults = faults
        self.incarnation = uuid.uuid4().hex
        self.repaired_blocks = 0
        self._info: WorkerInfo | None = None
        self._live = LiveRequests()
        self._session = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> WorkerInfo:
        """Load the model, map the pools, open the transceiver. Idempotent. Raises StartupError with the cause."""
        if self._info is None:
            if self.spec.log_level is not None:
                configure_logging(self.spec.log_level)
            self._loop = asyncio.get_running_loop()
            try:
                self._info = await asyncio.to_thread(self._build)
            except StartupError:
                raise
            except Exception as error:
                log.exception("worker %s cannot start", self.spec.worker_id)
                raise StartupError(f"{self.spec.worker_id} cannot start: {type(error).__name__}: {error}") from error
            self.engine.start()
        return self._info

    def _build(self) -> WorkerInfo:
        spec = self.spec
        parts = build_parts(spec, self._deliver, self._faults)
        self.storage, self.manager, self.engine = parts.storage, parts.manager, parts.engine
        self.transceiver = parts.transceiver
        self.eos_token_ids, self.max_seq_len = parts.eos_token_ids, parts.max_seq_len
        limit_s = spec.transceiver.kv_transfer_timeout_ms / 1000
        self._grants = Grants(spec.worker_id, self.engine, self.transceiver, limit_s, self._spawn)
        self._pulls = Pulls(self.engine, self.transceiver, self._live, limit_s, self._spawn)
        return parts.info(spec, self.incarnation)

    async def attach(self) -> int:
        """An orchestrator takes the worker over, for the first time or after it lost sight of it.

        Whatever was asked before is given up, and calls of the sessions before get no outputs any more. Returns the
        new session's number, for `drain_outputs`.
        """
        self._session += 1
        for request_id in {*self._live.ids(), *self._grants.ids()}:
            await self.abort(request_id)
        return self._session

    async def close(self) -> None:
        """Stop the engine, end every grant, release memory and ports. Idempotent. Every step is tried.

        Memory that the model or a transfer may still touch is left to the end of the process.
        """
        if self._info is None:
            return
        self._info = None
        idle = await asyncio.to_thread(self.engine.close)
        self._grants.withdraw_all()
        if self.transceiver is not None:
            try:
                await asyncio.to_thread(self.transceiver.close)
            except TransceiverError as error:
                log.warning("%s: the transceiver did not close: %s", self.spec.worker_id, error)
                idle = False
        await self._join_tasks()
        if idle:
            self.manager.close()
            self.storage.close()

    async def _join_tasks(self) -> None:
        if self._tasks:
            _, late = await asyncio.wait(set(self._tasks), timeout=10)
            for task in late:
                task.cancel()

    async def identity(self) -> str:
        """The incarnation: a sign of life of the process, whatever state its engine is in."""
        return self.incarnation

    async def ping(self) -> str:
        """The incarnation, as a sign of health. Raises EngineBrokenError when the worker must be replaced."""
        self._check_engine()
        return self.incarnation

    async def watch(self, seconds: float) -> str:
        """`ping`, after `seconds`: a call that fails the moment this process dies."""
        await asyncio.sleep(seconds)
        return await self.ping()

    async def probe(self, token_ids: NDArray[np.int32], cache_salt: str | None = None) -> int:
        """Tokens of `token_ids` whose KV this worker holds. Changes nothing."""
        self._check_engine()
        with self.engine.lock:
            return self.manager.probe_reuse(token_ids, ReuseScope(cache_salt=cache_salt))

    async def abort(self, request_id: str) -> None:
        """End a request without publishing its turn, whatever it is doing. Unknown ids are ignored."""
        if self._info is None:
            return
        self._live.abort(request_id)
        self.engine.request_stop(request_id, FinishReason.CANCELLED)
        self._pulls.cancel(request_id)
        await self.release(request_id)

    async def release(self, request_id: str) -> None:
        """Withdraw the grant of a request that nobody will fetch. Unknown ids are ignored."""
        if self._info is not None:
            self._grants.withdraw(request_id)

    async def lend(self, request: EngineRequest) -> PrefixLoan | None:
        """Grant the full blocks that this worker holds of a request's known tokens, for a peer that computes the rest.

        The grant's id is the request's. None when it holds none, or cannot grant now. Computes nothing.
        """
        self._check_engine()
        if self.transceiver is None or not self.manager.tree.shape.plain:
            return None  # windows and recurrent state end where their own request ended
        block = self.manager.layout.tokens_per_block
        with self.engine.lock:
            cache = self.manager.create(
                request.request_id, request.known_ids, scope=ReuseScope(cache_salt=request.cache_salt)
            )
            try:
                whole = cache.num_reused_tokens - cache.num_reused_tokens % block
                if whole == 0:
                    return None
                return PrefixLoan(request.request_id, whole, self._grants.give(request, cache, whole))
            except NotReadyError as error:
                log.info("%s lends nothing: %s", self.spec.worker_id, error.message)
                return None
            finally:
                cache.close()

    async def end_conversation(self, conversation_id: str, cache_salt: str | None = None) -> None:
        """Forget which turns of a conversation are retained; their blocks become ordinary cached ones."""
        self._check_engine()
        key = conversation_key(conversation_id, cache_salt)
        assert key is not None
        with self.engine.lock:
            self.manager.end_conversation(key)

    async def reset_prefix_cache(self) -> None:
        """Drop every cached block that nobody uses now."""
        self._check_engine()
        with self.engine.lock:
            self.manager.clear()

    async def check_integrity(self) -> None:
        """Raise CorruptedCacheError when the cache's books do not balance."""
        with self.engine.lock:
            self.manager.check_integrity()

    async def stats(self) -> WorkerStats:
        """Counters now."""
        if self._info is None:
            raise WorkerLostError("its process is a new one and was not started yet")
        with self.engine.lock:
            return WorkerStats(
                info=self._info,
                cache=self.manager.stats(),
                scheduler=self.engine.scheduler.snapshot(),
                transceiver=self.transceiver.stats() if self.transceiver is not None else None,
                repaired_blocks=self.repaired_blocks,
                open_grants=len(self._grants),
                busy_s=self.engine.busy_s,
            )

    # --- for the two halves ---

    def _new_sequence(
        self,
        request: EngineRequest,
        *,
        decode_limit: int | None = None,
        cache: SequenceCache | None = None,
        prefilled: bool = False,
        reports_chunks: bool = False,
    ) -> Sequence:
        return Sequence(
            request,
            eos_token_ids=self.eos_token_ids,
            max_position=self.max_seq_len,
            decode_limit=decode_limit,
            cache=cache,
            prefilled=prefilled,
            reports_chunks=reports_chunks,
        )

    def _close_cache(self, sequence: Sequence) -> None:
        """Give a sequence's pages back, unless the books are broken: then the whole worker is about to go."""
        if self._broken is None:
            with self.engine.lock:
                sequence.close_cache()

    def _deliver(self, events: list[SequenceEvent]) -> None:
        """Called in the engine's thread: hand the events to the event loop."""
        with contextlib.suppress(RuntimeError):  # the loop is gone: the worker is being torn down
            self._loop.call_soon_threadsafe(self._on_events, events)

    def _on_events(self, events: list[SequenceEvent]) -> None:
        """Called on the event loop with what the engine did; each half decides what that means."""
        raise NotImplementedError

    @property
    def _broken(self) -> str | None:
        """Why nothing that this worker holds can be trusted any more."""
        if self.engine.step_s > _STUCK_STEP_S:
            return f"a forward pass has not ended for {self.engine.step_s:.0f} s"
        return self.engine.fatal or self.manager.poison_reason

    def _check_engine(self) -> None:
        """Raises EngineBrokenError when the worker must be replaced, WorkerLostError before it was started.

        A restarted process answers calls before its worker was started: what they ask for died with the last process.
        """
        if self._info is None:
            raise WorkerLostError("its process is a new one and was not started yet")
        reason = self._broken
        if reason is not None:
            raise EngineBrokenError(f"{self.spec.worker_id} must be replaced: {reason}")

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
