"""The orchestrator's view of one worker: typed calls, its state and load, and the streams of its outputs.

How a call reaches the worker (an actor call, or a plain method call in tests) is the channel's business.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from enum import StrEnum
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cluster.errors import EngineFailedError, WorkerLostError
from cluster.request import EngineRequest
from cluster.worker import (
    Admission,
    BackflowResult,
    OutputDelta,
    PrefillResult,
    TurnHandoff,
    WorkerInfo,
    WorkerRole,
    WorkerStats,
)
from transceiver import GrantTicket

__all__ = ["LocalChannel", "WorkerChannel", "WorkerHandle", "WorkerState"]

log = logging.getLogger(__name__)

_WATCH_S = 5.0


class WorkerChannel(Protocol):
    """Carries calls to a worker."""

    async def call(self, method: str, *args: Any) -> Any:
        """Call a method of the worker. Raises WorkerLostError when its process is gone, and what the method raises."""
        ...

    async def kill(self) -> None:
        """End the worker's process now, so that it is started anew where the channel restarts processes."""
        ...

    async def end(self) -> None:
        """End the worker's process for good. Idempotent."""
        ...


class LocalChannel:
    """A worker in this very process (tests, single-process examples)."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker

    async def call(self, method: str, *args: Any) -> Any:
        return await getattr(self._worker, method)(*args)

    async def kill(self) -> None:
        await self._worker.close()

    async def end(self) -> None:
        await self._worker.close()


class WorkerState(StrEnum):
    """Whether the orchestrator may use a worker."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    LOST = "lost"


class WorkerHandle:
    """One worker. Use it on one event loop.

    `active_requests` is what the routers balance. Streams registered with `open_stream` end with WorkerLostError the
    moment the worker is known to be dead.
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
        self._replacing = False

    async def start(self) -> WorkerInfo:
        """Start (or start again) the worker and the tasks that watch it and collect its outputs."""
        info: WorkerInfo = await self.channel.call("start")
        self.info = info
        self.lost.clear()
        self.state = WorkerState.READY
        self._spawn(self._watch())
        if self.role is not WorkerRole.CONTEXT:
            self._spawn(self._collect())
        return info

    def mark_lost(self, reason: str) -> None:
        """The process is gone: end every stream of it. Idempotent."""
        if self.state is WorkerState.LOST:
            return
        log.warning("worker %s is lost: %s", self.worker_id, reason)
        self.state = WorkerState.LOST
        for queue in self._streams.values():
            queue.put_nowait(WorkerLostError(f"{self.worker_id} was lost: {reason}"))
        self._stop_tasks()
        self.lost.set()

    async def close(self) -> None:
        """Stop the tasks and close the worker. Never raises for a worker that is gone already."""
        self._stop_tasks()
        self.state = WorkerState.LOST
        try:
            await asyncio.wait_for(self.channel.call("close"), 30)
        except (WorkerLostError, TimeoutError) as error:
            log.info("worker %s was gone before it could be closed: %s", self.worker_id, error)
        await self.channel.end()

    # --- calls ---

    async def prefill(self, request: EngineRequest) -> PrefillResult:
        result: PrefillResult = await self._call("prefill", request)
        return result

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

    async def release(self, request_id: str) -> None:
        await self._call("release", request_id)

    async def probe(self, token_ids: NDArray[np.int32], cache_salt: str | None) -> int:
        result: int = await self._call("probe", token_ids, cache_salt)
        return result

    async def end_conversation(self, conversation_id: str) -> None:
        await self._call("end_conversation", conversation_id)

    async def reset_prefix_cache(self) -> None:
        await self._call("reset_prefix_cache")

    async def check_integrity(self) -> None:
        await self._call("check_integrity")

    async def stats(self) -> WorkerStats:
        result: WorkerStats = await self._call("stats")
        return result

    async def _call(self, method: str, *args: Any) -> Any:
        try:
            return await self.channel.call(method, *args)
        except WorkerLostError as error:
            self.mark_lost(error.message)
            raise WorkerLostError(f"{self.worker_id} was lost during {method}: {error.message}") from error
        except Exception:
            self._spawn(self._examine())
            raise

    async def _examine(self) -> None:
        """After a failed call: is the worker itself still sound?"""
        try:
            await self.channel.call("ping")
        except WorkerLostError as error:
            self.mark_lost(error.message)
        except EngineFailedError as error:
            await self._replace(error.message)

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

    async def _collect(self) -> None:
        """Pass outputs on until the worker is lost. One call is always under way, so a death shows at once."""
        try:
            while True:
                for delta in await self.channel.call("drain_outputs", _WATCH_S):
                    queue = self._streams.get(delta.request_id)
                    if queue is not None:
                        queue.put_nowait(delta)
        except WorkerLostError as error:
            self.mark_lost(error.message)
        except EngineFailedError as error:
            await self._replace(error.message)

    async def _watch(self) -> None:
        try:
            while True:
                await self.channel.call("watch", _WATCH_S)
        except WorkerLostError as error:
            self.mark_lost(error.message)
        except EngineFailedError as error:
            await self._replace(error.message)

    async def _replace(self, reason: str) -> None:
        """The engine inside is broken for good: end the process, its supervisor starts another one."""
        if self._replacing or self.state is WorkerState.LOST:
            return
        self._replacing = True
        try:
            await self.channel.kill()
        finally:
            self._replacing = False
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
