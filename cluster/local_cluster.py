"""A whole cluster inside one process, without Ray: for tests, examples and experiments.

The workers are the real ones; only the channel differs. `cache_transceiver_config.backend` may be `inproc` (memory
copies) or `ucx` (real transport to oneself).
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping

from cluster.config import ClusterConfig
from cluster.fleet import Fleet
from cluster.orchestrator import Orchestrator
from cluster.routing import make_router
from cluster.worker_handle import LocalChannel, WorkerHandle
from cluster.worker_plan import WORKER_CLASS, cluster_secret, orchestrator_settings, plan_workers
from transceiver.testing import FaultInjector

__all__ = ["local_cluster", "make_orchestrator"]


def make_orchestrator(config: ClusterConfig, fleet: Fleet) -> Orchestrator:
    """An orchestrator with the configuration's routers and limits over a fleet."""
    tokens_per_block = config.kv_cache_config.tokens_per_block
    return Orchestrator(
        fleet,
        make_router(config.context_servers.router, tokens_per_block=tokens_per_block),
        make_router(config.generation_servers.router, tokens_per_block=tokens_per_block),
        orchestrator_settings(config),
    )


@contextlib.asynccontextmanager
async def local_cluster(
    config: ClusterConfig, *, aggregated: bool = False, faults: Mapping[str, FaultInjector] | None = None
) -> AsyncIterator[Orchestrator]:
    """A serving orchestrator while the context is open. Raises StartupError when a worker cannot start.

    faults  fault injectors by worker id ("context-0", ...), for the inproc backend
    """
    faults = faults or {}
    handles = [
        WorkerHandle(
            spec.worker_id, spec.role, LocalChannel(WORKER_CLASS[spec.role](spec, faults=faults.get(spec.worker_id)))
        )
        for spec in plan_workers(config, aggregated=aggregated, secret=cluster_secret())
    ]
    orchestrator = make_orchestrator(config, Fleet(handles))
    try:
        await orchestrator.fleet.start()
        yield orchestrator
    finally:
        await orchestrator.close()
