"""Speed and memory of the cache manager, and of its peers on the same prompts."""

from __future__ import annotations

from cluster.bench.cache.command import run_cache_bench
from cluster.bench.cache.growth import GrowthRow, measure_growth
from cluster.bench.cache.own import OwnFigures, measure_own
from cluster.bench.cache.peers import PeerUnavailable, measure_peer

__all__ = [
    "GrowthRow",
    "OwnFigures",
    "PeerUnavailable",
    "measure_growth",
    "measure_own",
    "measure_peer",
    "run_cache_bench",
]
