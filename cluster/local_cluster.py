"""A whole cluster inside one process, without Ray: for tests, examples and experiments.

The workers are the real ones; only the channel differs. `cache_transceiver_config.backend` may be `inproc` (memory
copies) or `ucx` (real transport to oneself).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncIterator, Mapping

from cluster.channel import LocalChannel
from cluster.config import ClusterConfig
from cluster.fleet import Fleet
from cluster.orchestrator import Orchestrator
from cluster.worker import WorkerSpec
from cluster.worker_handle import WorkerHandle
from cluster.worker_plan import WORKER_CLASS, cluster_secret, make_orchestrator, plan_workers
from transceiver.testing import FaultInjector

__all__ = ["local_cluster", "local_handle"]


def local_handle(spec: WorkerSpec, faults: FaultInjector | None = None) -> WorkerHandle:
    """A handle on a worker in this process."""
    make = functools.partial(WORKER_CLASS[spec.role], spec, faults=faults)
    return WorkerHandle(spec.worker_id, spec.role, LocalChannel(make))


@contextlib.asynccontextmanager
async def local_cluster(
    config: ClusterConfig, *, aggregated: bool = False, faults: Mapping[str, FaultInjector] | None = None
) -> AsyncIterator[Orchestrator]:
    """A serving orchestrator while the context is open. Raises StartupError when a worker cannot start.

    faults  fault injectors by worker id ("context-0", ...), for the inproc backend
    """
    faults = faults or {}
    handles = [
        local_handle(spec, faults.get(spec.worker_id))
        for spec in plan_workers(config, aggregated=aggregated, secret=cluster_secret())
    ]
    orchestrator = make_orchestrator(config, Fleet(handles))
    try:
        await orchestrator.fleet.start()
        yield orchestrator
    finally:
        await orchestrator.close()
