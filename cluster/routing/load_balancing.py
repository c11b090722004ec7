"""The worker with the fewest requests."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.routing.round_robin import RoundRobinRouter
from cluster.routing.router import Candidate, RouteRequest

__all__ = ["LoadBalancingRouter"]


class LoadBalancingRouter:
    """Fewest active requests; ties take turns."""

    def __init__(self) -> None:
        self._ties = RoundRobinRouter()

    def choose(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Candidate:
        least = min(candidate.active_requests for candidate in candidates)
        return self._ties.choose(request, [c for c in candidates if c.active_requests == least])

    def record(self, request: RouteRequest, worker_id: str) -> None:
        return

    def remove_worker(self, worker_id: str) -> None:
        return
