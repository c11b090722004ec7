"""Choosing a worker for a request: one policy object a role, named in the configuration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["Candidate", "RouteRequest", "Router", "RouterSettings", "make_router"]


class Candidate(Protocol):
    """What a policy may know of a worker."""

    @property
    def worker_id(self) -> str: ...

    @property
    def active_requests(self) -> int: ...


@dataclass(frozen=True, slots=True, eq=False)
class RouteRequest:
    """What a policy may know of a request."""

    token_ids: NDArray[np.int32]
    conversation_id: str | None = None
    cache_salt: str | None = None


class Router(Protocol):
    """A routing policy. Not thread-safe; lives on the orchestrator's event loop. Never blocks."""

    def choose(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Candidate:
        """One of `candidates` (never empty). May remember the choice."""
        ...

    def record(self, request: RouteRequest, worker_id: str) -> None:
        """The worker now holds the KV of these tokens."""
        ...

    def remove_worker(self, worker_id: str) -> None:
        """The worker lost its cache."""
        ...


class RouterSettings(Protocol):
    """What the configuration says of a router."""

    @property
    def type(self) -> str: ...

    @property
    def load_weight(self) -> float: ...

    @property
    def max_sessions(self) -> int: ...


def make_router(settings: RouterSettings, *, tokens_per_block: int) -> Router:
    """The policy that the configuration names. Raises ValueError that lists the names."""
    from cluster.routing.conversation import ConversationRouter
    from cluster.routing.kv_cache_aware import KvCacheAwareRouter
    from cluster.routing.load_balancing import LoadBalancingRouter
    from cluster.routing.round_robin import RoundRobinRouter

    policies: dict[str, Callable[[], Router]] = {
        "conversation": lambda: ConversationRouter(tokens_per_block, max_sessions=settings.max_sessions),
        "kv_cache_aware": lambda: KvCacheAwareRouter(tokens_per_block, settings.load_weight),
        "load_balancing": LoadBalancingRouter,
        "round_robin": RoundRobinRouter,
    }
    if settings.type not in policies:
        raise ValueError(f"unknown router type {settings.type!r}: use one of {', '.join(sorted(policies))}")
    return policies[settings.type]()
