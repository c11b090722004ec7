"""Routing policies: which worker serves which request."""

from cluster.routing.conversation import ConversationRouter
from cluster.routing.kv_cache_aware import KvCacheAwareRouter
from cluster.routing.load_balancing import LoadBalancingRouter
from cluster.routing.prefix_index import PrefixIndex
from cluster.routing.round_robin import RoundRobinRouter
from cluster.routing.router import Candidate, Router, RouteRequest, make_router

__all__ = [
    "Candidate",
    "ConversationRouter",
    "KvCacheAwareRouter",
    "LoadBalancingRouter",
    "PrefixIndex",
    "RoundRobinRouter",
    "RouteRequest",
    "Router",
    "make_router",
]
