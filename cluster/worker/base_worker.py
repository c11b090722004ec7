"""What every worker is: a model, a cache manager, an engine and a transceiver that belong together.

`ContextWorker` and `GenerationWorker` add the two halves of a request. A worker knows nothing of Ray: the controller
runs it as an actor, tests run it in their own event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import uuid
from collections.abc import Coroutine
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cluster.engine import free_memory_bytes, load_runner, make_storage
from cluster.engine_loop import EngineLoop
from cluster.errors import EngineBrokenError, NotReadyError, StartupError, WorkerLostError
from cluster.log import configure_logging
from cluster.request import EngineRequest, FinishReason, conversation_key
from cluster.scheduler import Scheduler, SequenceEvent
from cluster.sequence import Sequence
from cluster.worker.grants import Grants
from cluster.worker.kv_fetch import KvFetch
from cluster.worker.live_requests import LiveRequests
from cluster.worker.messages import PrefixLoan, WorkerInfo, WorkerRole, WorkerStats
from cluster.worker.pool_size import pool_pages
from cluster.worker.spec import WorkerSpec
from kvcache import BlockOrigin, KvCacheManager, ReuseScope, SequenceCache
from transceiver import CacheTransceiver, Pull, TransceiverError
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
        self._pulls: dict[str, Pull] = {}
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
        runner = load_runner(
            spec.model, tokens_per_block=spec.kv_cache.tokens_per_block, device=spec.device, dtype=spec.dtype
        )
        free_bytes = int(free_memory_bytes(spec.device) * spec.memory_share)
        num_pages = pool_pages(spec.kv_cache, runner.layout, free_bytes)
        self.storage = make_storage(runner, num_pages, shared=spec.transceiver.wants_shared_pools)
        runner.bind(self.storage)
        self.manager = KvCacheManager(runner.layout, spec.kv_cache, self.storage, worker_id=spec.worker_id)
        self.max_seq_len = min(spec.max_seq_len, runner.max_position)
        self.eos_token_ids = runner.eos_token_ids
        scheduler = Scheduler(
            self.manager,
            max_batch_size=spec.max_batch_size,
            max_num_tokens=spec.max_num_tokens,
            enable_chunked_prefill=spec.enable_chunked_prefill,
            max_suspended_bytes=spec.kv_cache.host_cache_size,
        )
        self.engine = EngineLoop(runner, self.manager, scheduler, self._deliver, name=f"{spec.worker_id}-engine")
        self.transceiver: CacheTransceiver | None = None
        if spec.role is not WorkerRole.AGGREGATED:
            self.transceiver = CacheTransceiver(
                worker_id=spec.worker_id,
                storage=self.storage,
                config=spec.transceiver,
                secret=spec.secret,
                host=own_address(spec.reachable_from),
                faults=self._faults,
            )
            try:
                self.transceiver.start()
            except BaseException:
                self.storage.close()
                raise
        lease_s = spec.transceiver.kv_transfer_timeout_ms / 1000
        self._grants = Grants(spec.worker_id, self.engine, self.transceiver, lease_s, self._spawn)
        return WorkerInfo(
            worker_id=spec.worker_id,
            role=spec.role,
            incarnation=self.incarnation,
            pid=os.getpid(),
            host=socket.gethostname(),
            transceiver_address=self.transceiver.address if self.transceiver else "",
            layout_fingerprint=runner.layout.fingerprint(),
            tokens_per_block=runner.layout.tokens_per_block,
            page_bytes=runner.layout.page_bytes(),
            capacity_tokens=num_pages[0] * runner.layout.tokens_per_block,
            max_seq_len=self.max_seq_len,
        )

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
        pull = self._pulls.get(request_id)
        if pull is not None:
            pull.cancel()
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

    def _fetch(self, cache: SequenceCache, origin: BlockOrigin) -> KvFetch:
        """A pull into `cache`, not begun yet."""
        assert self.transceiver is not None
        return KvFetch(self.engine, self.transceiver, cache, origin=origin)

    def _register_pull(self, request_id: str, pull: Pull) -> None:
        """An abort of the request must reach its pull."""
        self._pulls[request_id] = pull
        if self._live.is_aborted(request_id):
            pull.cancel()

    def _close_when_idle(self, cache: SequenceCache, fetch: KvFetch) -> None:
        """Close a cache once no transfer can touch its pages any more; until then they stay quarantined."""

        async def close() -> None:
            await fetch.memory_idle()
            with self.engine.lock:
                cache.close()
            self.engine.wake()

        self._spawn(close())

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


def own_address(peer: str) -> str:
    """This machine's address on the route to `peer`. Sends nothing."""
    family = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, 9))
        return str(probe.getsockname()[0])
