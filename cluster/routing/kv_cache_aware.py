"""The worker that was sent most of this prompt before, weighed against its load."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.routing.load_balancing import LoadBalancingRouter
from cluster.routing.prefix_index import PrefixIndex
from cluster.routing.router import Candidate, RouteRequest

__all__ = ["KvCacheAwareRouter"]


class KvCacheAwareRouter:
    """Scores matched blocks minus `load_weight` times active requests; ties go to the least loaded.

    The score is the reference system's (TensorRT-LLM's kv_cache_aware router, load weight 0.25).
    """

    def __init__(self, tokens_per_block: int, load_weight: float = 0.25) -> None:
        self._index = PrefixIndex(tokens_per_block)
        self._load_weight = load_weight
        self._ties = LoadBalancingRouter()

    def choose(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Candidate:
        matched = self._index.matched_blocks(self._index.keys(request.token_ids, request.cache_salt))

        def score(candidate: Candidate) -> float:
            return matched.get(candidate.worker_id, 0) - self._load_weight * candidate.active_requests

        best = max(score(candidate) for candidate in candidates)
        return self._ties.choose(request, [c for c in candidates if score(c) == best])

    def record(self, request: RouteRequest, worker_id: str) -> None:
        self._index.add(self._index.keys(request.token_ids, request.cache_salt), worker_id)

    def remove_worker(self, worker_id: str) -> None:
        self._index.remove_worker(worker_id)
