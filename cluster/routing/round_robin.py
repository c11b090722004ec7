"""Each worker in turn."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.routing.router import Candidate, RouteRequest

__all__ = ["RoundRobinRouter"]


class RoundRobinRouter:
    """Cycles through the candidates by worker id, so a worker that comes or goes does not shift the others' turns."""

    def __init__(self) -> None:
        self._last = ""

    def choose(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Candidate:
        ordered = sorted(candidates, key=lambda candidate: candidate.worker_id)
        chosen = next((c for c in ordered if c.worker_id > self._last), ordered[0])
        self._last = chosen.worker_id
        return chosen

    def record(self, request: RouteRequest, worker_id: str) -> None:
        return

    def remove_worker(self, worker_id: str) -> None:
        return
