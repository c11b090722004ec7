"""The workers of a cluster: which exist, which can take a request, and bringing lost ones back."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Sequence

from cluster.errors import ClusterError, NotReadyError, StartupError
from cluster.worker import WorkerRole
from cluster.worker_handle import WorkerHandle, WorkerState

__all__ = ["Fleet"]

log = logging.getLogger(__name__)

_RESTART_POLL_S = 0.2
_RESTART_POLL_MAX_S = 5.0


class Fleet:
    """Starts handles, watches them, restarts the lost ones through their channels.

    recovery_s  how long one attempt to start a lost worker may take (loading its model included)
    """

    def __init__(self, handles: Iterable[WorkerHandle], *, recovery_s: float = 120.0) -> None:
        self.handles: tuple[WorkerHandle, ...] = tuple(handles)
        self.started = False
        self._recovery_s = recovery_s
        self._changed = asyncio.Condition()
        self._supervisors: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start every worker at once. Raises StartupError (with each worker's cause) unless all come up alike."""
        results = await asyncio.gather(*(handle.start() for handle in self.handles), return_exceptions=True)
        failures = [result for result in results if isinstance(result, BaseException)]
        if failures:
            causes = "; ".join(f.message if isinstance(f, ClusterError) else repr(f) for f in failures)
            raise StartupError(f"{len(failures)} of {len(self.handles)} workers did not start: {causes}")
        layouts = {handle.info.layout_fingerprint for handle in self.handles if handle.info is not None}
        if len(layouts) > 1:
            raise StartupError("the workers' KV layouts differ: model, dtype and tokens_per_block must be equal on all")
        self.started = True
        self._supervisors = [asyncio.create_task(self._supervise(handle)) for handle in self.handles]
        await self._notify()

    async def close(self) -> None:
        """Stop supervising and close every worker."""
        for task in self._supervisors:
            task.cancel()
        await asyncio.gather(*self._supervisors, return_exceptions=True)
        for result in await asyncio.gather(*(handle.close() for handle in self.handles), return_exceptions=True):
            if isinstance(result, Exception):
                log.warning("a worker did not close: %r", result)

    def ready(self, role: WorkerRole) -> list[WorkerHandle]:
        """Workers of a role that can take a request now."""
        return [handle for handle in self.handles if handle.role is role and handle.state is WorkerState.READY]

    def of_role(self, role: WorkerRole) -> list[WorkerHandle]:
        """All workers of a role, in whatever state."""
        return [handle for handle in self.handles if handle.role is role]

    @property
    def serving(self) -> bool:
        """Whether every role that exists has a ready worker, once all have been started."""
        roles = {handle.role for handle in self.handles}
        return self.started and bool(roles) and all(self.ready(role) for role in roles)

    async def wait_ready(self, role: WorkerRole, timeout_s: float) -> Sequence[WorkerHandle]:
        """The ready workers of a role, waiting for one to come back. Raises NotReadyError after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        async with self._changed:
            while not (candidates := self.ready(role)):
                left = deadline - time.monotonic()
                if left <= 0 or not self.of_role(role):
                    raise NotReadyError(f"no {role} worker is up; waited {timeout_s:.0f} s for one to come back")
                try:
                    async with asyncio.timeout(left):
                        await self._changed.wait()
                except TimeoutError:
                    continue
            return candidates

    async def _supervise(self, handle: WorkerHandle) -> None:
        while True:
            await handle.lost.wait()
            await self._notify()
            await self._bring_back(handle)
            await self._notify()

    async def _bring_back(self, handle: WorkerHandle) -> None:
        """Try until the worker is back, ever more slowly; a worker is never given up."""
        started = time.monotonic()
        pause, reported = _RESTART_POLL_S, False
        while True:
            try:
                if handle.needs_kill:
                    handle.needs_kill = False
                    await handle.channel.kill()
                await handle.make_reachable()
                async with asyncio.timeout(self._recovery_s):
                    await handle.start()
                handle.restarts += 1
                log.warning("worker %s is back after %.1f s", handle.worker_id, time.monotonic() - started)
                return
            except (ClusterError, TimeoutError) as error:  # its process is being started, or cannot build its model
                log.debug("worker %s is not back yet: %s", handle.worker_id, error)
            except Exception:
                log.exception("bringing worker %s back failed", handle.worker_id)
            if not reported and time.monotonic() - started > self._recovery_s:
                reported = True
                log.error("worker %s did not come back within %.0f s; trying on", handle.worker_id, self._recovery_s)
            await asyncio.sleep(pause)
            pause = min(_RESTART_POLL_MAX_S, pause * 1.2)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
