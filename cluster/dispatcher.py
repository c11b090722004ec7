"""Which worker gets a request: routers by role, what they learn from turns, and how many requests each worker has."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence

from cluster.fleet import Fleet
from cluster.prefix_loans import PrefixLoans
from cluster.routing import Router, RouteRequest
from cluster.serve_request import ServeRequest
from cluster.worker import TurnHandoff, WorkerRole
from cluster.worker_handle import WorkerHandle

__all__ = ["Dispatcher"]


class Dispatcher:
    """Lives on the orchestrator's event loop.

    recovery_s  how long `worker` waits for a worker of a role to come back
    """

    def __init__(
        self,
        fleet: Fleet,
        context_router: Router,
        generation_router: Router,
        loans: PrefixLoans,
        recovery_s: float,
    ) -> None:
        self._fleet = fleet
        self._routers = {
            WorkerRole.CONTEXT: context_router,
            WorkerRole.GENERATION: generation_router,
            WorkerRole.AGGREGATED: generation_router,
        }
        self._loans = loans
        self._recovery_s = recovery_s
        self._incarnations: dict[str, str] = {}

    @contextlib.asynccontextmanager
    async def worker(self, role: WorkerRole, request: ServeRequest) -> AsyncIterator[WorkerHandle]:
        """A ready worker of a role, counted as busy while in use; waits for one to come back if none is up.

        Raises NotReadyError when none comes.
        """
        worker = self._choose(role, request, await self._fleet.wait_ready(role, self._recovery_s))
        worker.active_requests += 1
        try:
            yield worker
        finally:
            worker.active_requests -= 1

    def context_for_turn(self, request: ServeRequest) -> WorkerHandle | None:
        """Who keeps the turn of a request that no context worker has seen; None when there is none."""
        candidates = self._fleet.ready(WorkerRole.CONTEXT)
        return self._choose(WorkerRole.CONTEXT, request, candidates) if candidates else None

    def turn_ended(self, turn: TurnHandoff, generation_id: str | None, context_id: str | None) -> None:
        """Remember who has the turn's KV: the generation worker now, the context worker soon (see `Turns`)."""
        route = RouteRequest(turn.token_ids, turn.conversation_id, turn.cache_salt)
        if generation_id is not None:
            self._routers[WorkerRole.GENERATION].record(route, generation_id)
            self._loans.holds(generation_id, turn.token_ids[:-1], turn.cache_salt)
        if context_id is not None:
            self._routers[WorkerRole.CONTEXT].record(route, context_id)

    def _choose(self, role: WorkerRole, request: ServeRequest, candidates: Sequence[WorkerHandle]) -> WorkerHandle:
        router = self._routers[role]
        for handle in candidates:
            incarnation = handle.info.incarnation if handle.info is not None else ""
            if self._incarnations.setdefault(handle.worker_id, incarnation) != incarnation:
                self._incarnations[handle.worker_id] = incarnation
                router.remove_worker(handle.worker_id)  # it came back with an empty cache
                self._loans.lost(handle.worker_id)
        route = RouteRequest(request.prompt_ids, request.conversation_id, request.cache_salt)
        chosen = router.choose(route, candidates)
        return next(handle for handle in candidates if handle.worker_id == chosen.worker_id)
