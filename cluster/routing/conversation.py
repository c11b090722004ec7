"""A conversation stays on its worker; without an id, a prompt follows its longest known prefix."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from cluster.routing.load_balancing import LoadBalancingRouter
from cluster.routing.prefix_index import PrefixIndex
from cluster.routing.router import Candidate, RouteRequest

__all__ = ["ConversationRouter"]


class ConversationRouter:
    """Sticky by conversation id, in a bounded least-recently-used table; re-pins when the worker is not available.

    A request without an id goes where at least `match_threshold` of its blocks were sent before, else to the least
    loaded worker (the reference system's rule; threshold 0.75).
    """

    def __init__(self, tokens_per_block: int, *, max_sessions: int = 100_000, match_threshold: float = 0.75) -> None:
        self._index = PrefixIndex(tokens_per_block)
        self._sessions: OrderedDict[tuple[str | None, str], str] = OrderedDict()
        self._max_sessions = max_sessions
        self._match_threshold = match_threshold
        self._least_loaded = LoadBalancingRouter()

    def choose(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Candidate:
        by_id = {candidate.worker_id: candidate for candidate in candidates}
        if request.conversation_id is not None:
            return self._choose_pinned(request, by_id)
        keys = self._index.keys(request.token_ids, request.cache_salt)
        matched = {worker: n for worker, n in self._index.matched_blocks(keys).items() if worker in by_id}
        deepest = max(matched.values(), default=0)
        if keys and deepest / len(keys) >= self._match_threshold:
            return self._least_loaded.choose(request, [by_id[w] for w, n in matched.items() if n == deepest])
        return self._least_loaded.choose(request, candidates)

    def record(self, request: RouteRequest, worker_id: str) -> None:
        if request.conversation_id is None:
            self._index.add(self._index.keys(request.token_ids, request.cache_salt), worker_id)

    def remove_worker(self, worker_id: str) -> None:
        self._index.remove_worker(worker_id)
        for session in [session for session, pinned in self._sessions.items() if pinned == worker_id]:
            del self._sessions[session]

    def _choose_pinned(self, request: RouteRequest, by_id: dict[str, Candidate]) -> Candidate:
        assert request.conversation_id is not None
        session = (request.cache_salt, request.conversation_id)
        chosen = by_id.get(self._sessions.get(session, ""))
        if chosen is None:
            chosen = self._least_loaded.choose(request, list(by_id.values()))
        self._sessions[session] = chosen.worker_id
        self._sessions.move_to_end(session)
        while len(self._sessions) > self._max_sessions:
            self._sessions.popitem(last=False)
        return chosen
