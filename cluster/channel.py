"""How calls reach a worker: the contract, and the channel to a worker in this very process.

`RayChannel` (in `ray_channel`) is the one that clusters use.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from cluster.errors import WorkerLostError
from cluster.worker.base_worker import BaseWorker

__all__ = ["LocalChannel", "WorkerChannel"]


class WorkerChannel(Protocol):
    """Carries calls to a worker. Giving a call up does not end what it started: that is what `abort` is for."""

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
    """A worker in this process (tests, single-process examples). `make` builds it, and a new one after each `kill`."""

    def __init__(self, make: Callable[[], BaseWorker]) -> None:
        self._make = make
        self.worker = make()
        self._calls: set[asyncio.Task[Any]] = set()

    async def call(self, method: str, *args: Any) -> Any:
        """As an actor does, the worker finishes a call that its caller has given up."""
        task = asyncio.ensure_future(getattr(self.worker, method)(*args))
        self._calls.add(task)
        task.add_done_callback(self._forget)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():  # not the caller gave up: the worker was ended
                raise WorkerLostError("its worker was ended") from None
            raise

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._calls.discard(task)
        if not task.cancelled():
            task.exception()  # its caller may be gone: nobody else looks

    async def kill(self) -> None:
        await self.end()
        self.worker = self._make()

    async def end(self) -> None:
        await self.worker.close()
        for task in list(self._calls):
            task.cancel()
