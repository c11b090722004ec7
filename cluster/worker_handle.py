"""The orchestrator's view of one worker: typed calls, its state and load, and the streams of its outputs.

How a call reaches the worker is the channel's business.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Coroutine, Iterator
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cluster.channel import WorkerChannel
from cluster.errors import ClusterError, EngineBrokenError, WorkerLostError
from cluster.request import EngineRequest
from cluster.worker import (
    Admission,
    BackflowResult,
    CacheShortfall,
    OutputDelta,
    PrefillResult,
    PrefixLoan,
    TurnHandoff,
    WorkerInfo,
    WorkerRole,
    WorkerStats,
)
from transceiver import GrantTicket

__all__ = ["WorkerHandle", "WorkerState"]

log = logging.getLogger(__name__)

_WATCH_S = 5.0
_ANSWER_S = 20.0  # a live process answers a trivial call within that, also on a busy machine
_STATS_S = 5.0  # a scrape must not wait for a worker that hangs
_LAST_WORD_S = 5.0
_START_S = 120.0  # a new process is there within that: Ray holds calls back while it imports what it needs


class WorkerState(StrEnum):
    """Whether the orchestrator may use a worker."""

    STARTING = "starting"
    READY = "ready"
    LOST = "lost"


class WorkerHandle:
    """One worker. Use it on one event loop.

    `active_requests` is what the routers balance; `needs_kill`: the process lives but must not be used again.
    Streams registered with `open_stream` end with WorkerLostError the moment the worker is known to be dead.
    """

    def __init__(self, worker_id: str, role: WorkerRole, channel: WorkerChannel) -> None:
        self.worker_id = worker_id
        self.role = role
        self.channel = channel
        self.state = WorkerState.STARTING
        self.info: WorkerInfo | None = None
        self.active_requests = 0
        self.restarts = 0
        self.lost = asyncio.Event()
        self._streams: dict[str, asyncio.Queue[OutputDelta | WorkerLostError]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.needs_kill = False
        self._epoch = 0

    async def start(self) -> WorkerInfo:
        """Start the worker, or take it over again, and the tasks that watch it and collect its outputs.

        Raises WorkerLostError, StartupError. What an earlier session of this handle asked of it is given up.
        """
        info: WorkerInfo = await self.channel.call("start")
        session: int = await self.channel.call("attach")
        self.info = info
        self._epoch += 1
        self.lost.clear()
        self.state = WorkerState.READY
        self._spawn(self._watch())
        if self.role is not WorkerRole.CONTEXT:
            self._spawn(self._collect(session))
        return info

    async def make_reachable(self) -> None:
        """Make sure that a process answers: one that lives but does not answer is killed. Raises WorkerLostError."""
        try:
            async with asyncio.timeout(_START_S):
                await self.channel.call("identity")
        except TimeoutError:
            await self.channel.kill()
            raise WorkerLostError("its process did not answer and was killed") from None

    def mark_lost(self, reason: str) -> None:
        """The process is gone or cannot be trusted: end every stream of it. Idempotent."""
        if self.state is WorkerState.LOST:
            return
        log.warning("worker %s is lost: %s", self.worker_id, reason)
        self.state = WorkerState.LOST
        for queue in self._streams.values():
            queue.put_nowait(WorkerLostError(f"{self.worker_id} was lost: {reason}"))
        self._stop_tasks()
        self.lost.set()

    async def close(self) -> None:
        """Stop the tasks and end the worker. Never raises for a worker that is gone or broken already."""
        self._stop_tasks()
        self.state = WorkerState.LOST
        try:
            async with asyncio.timeout(30):
                await self.channel.call("close")
        except (ClusterError, TimeoutError) as error:
            log.info("worker %s could not be closed in order: %s", self.worker_id, error)
        finally:
            await self.channel.end()

    # --- calls ---

    async def prefill(
        self, request: EngineRequest, loan: PrefixLoan | None = None, expected_tokens: int = 0
    ) -> PrefillResult | CacheShortfall:
        result: PrefillResult | CacheShortfall = await self._call("prefill", request, loan, expected_tokens)
        return result

    async def offer(self, request: EngineRequest) -> GrantTicket | None:
        ticket: GrantTicket | None = await self._call("offer", request)
        return ticket

    async def receive(self, request: EngineRequest, ticket: GrantTicket) -> Admission:
        result: Admission = await self._call("receive", request, ticket)
        return result

    async def lend(self, request: EngineRequest) -> PrefixLoan | None:
        loan: PrefixLoan | None = await self._call("lend", request)
        return loan

    async def close_turn(self, turn: TurnHandoff) -> BackflowResult:
        result: BackflowResult = await self._call("close_turn", turn)
        return result

    async def generate(self, request: EngineRequest, ticket: GrantTicket | None) -> Admission:
        result: Admission = await self._call("generate", request, ticket)
        return result

    async def stop(self, request_id: str) -> None:
        await self._call("stop", request_id)

    async def abort(self, request_id: str) -> None:
        await self._call("abort", request_id)

    async def give_up(self, request_id: str) -> None:
        """`abort`, even while this task is being cancelled; never raises for a worker that is gone."""
        await _in_any_case(self.abort(request_id))

    async def let_go(self, request_id: str) -> None:
        """`release`, even while this task is being cancelled; never raises for a worker that is gone."""
        await _in_any_case(self.release(request_id))

    async def release(self, request_id: str) -> None:
        await self._call("release", request_id)

    async def probe(self, token_ids: NDArray[np.int32], cache_salt: str | None) -> int:
        result: int = await self._call("probe", token_ids, cache_salt)
        return result

    async def end_conversation(self, conversation_id: str, cache_salt: str | None = None) -> None:
        await self._call("end_conversation", conversation_id, cache_salt)

    async def reset_prefix_cache(self) -> None:
        await self._call("reset_prefix_cache")

    async def check_integrity(self) -> None:
        await self._call("check_integrity")

    async def stats(self) -> WorkerStats:
        async with asyncio.timeout(_STATS_S):
            result: WorkerStats = await self._call("stats")
        return result

    async def _call(self, method: str, *args: Any) -> Any:
        epoch = self._epoch
        try:
            return await self.channel.call(method, *args)
        except WorkerLostError as error:
            if epoch == self._epoch:  # an older incarnation's death says nothing of this one
                self.mark_lost(error.message)
            raise WorkerLostError(f"{self.worker_id} was lost during {method}: {error.message}") from error
        except Exception as error:
            if epoch != self._epoch or self.state is WorkerState.LOST:  # given up because the worker was taken over
                raise WorkerLostError(f"{self.worker_id} was lost during {method}") from error
            self._spawn(self._examine())
            raise

    async def _examine(self) -> None:
        """After a failed call: is the worker itself still sound?"""
        with self._verdict():
            async with asyncio.timeout(_ANSWER_S):
                await self.channel.call("ping")

    # --- outputs ---

    def open_stream(self, request_id: str) -> None:
        """Collect the outputs of a request from now on. Call before `generate`."""
        self._streams[request_id] = asyncio.Queue()

    def close_stream(self, request_id: str) -> None:
        """Forget a request's outputs. Idempotent."""
        self._streams.pop(request_id, None)

    async def outputs(self, request_id: str) -> AsyncIterator[OutputDelta]:
        """Deltas of a request, the last one with a finish reason. Raises WorkerLostError when the worker dies."""
        queue = self._streams[request_id]
        while True:
            item = await queue.get()
            if isinstance(item, WorkerLostError):
                raise item
            yield item
            if item.finish_reason is not None:
                return

    async def _collect(self, session: int) -> None:
        """Pass outputs on until the worker is lost. One call is always under way, so a death shows at once."""
        with self._verdict():
            while True:
                async with asyncio.timeout(_WATCH_S + _ANSWER_S):
                    deltas = await self.channel.call("drain_outputs", session, _WATCH_S)
                for delta in deltas:
                    queue = self._streams.get(delta.request_id)
                    if queue is not None:
                        queue.put_nowait(delta)

    async def _watch(self) -> None:
        with self._verdict():
            while True:
                async with asyncio.timeout(_WATCH_S + _ANSWER_S):
                    await self.channel.call("watch", _WATCH_S)

    @contextlib.contextmanager
    def _verdict(self) -> Iterator[None]:
        """Whatever ends a watching task unexpectedly, the worker is not usable: silence would hang every stream."""
        epoch = self._epoch
        try:
            yield
        except WorkerLostError as error:
            reason, kill = error.message, False
        except EngineBrokenError as error:
            reason, kill = error.message, True
        except TimeoutError:
            reason, kill = "it does not answer", True
        except Exception as error:
            log.exception("worker %s: an unexpected answer", self.worker_id)
            reason, kill = f"{type(error).__name__}: {error}", True
        else:
            return
        if epoch == self._epoch:
            self.needs_kill = kill
            self.mark_lost(reason)

    def _stop_tasks(self) -> None:
        current = asyncio.current_task()
        for task in list(self._tasks):
            if task is not current:
                task.cancel()

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _in_any_case(call: Coroutine[Any, Any, None]) -> None:
    """Make a call that a cancellation of this task does not stop. Waits for it, a few seconds at most."""
    with contextlib.suppress(ClusterError, TimeoutError):
        async with asyncio.timeout(_LAST_WORD_S):
            await asyncio.shield(asyncio.ensure_future(call))
