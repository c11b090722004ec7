"""Brings the workers up as Ray actors: cluster, placement, one actor a worker.

Everything beyond one process rides on Ray: a placement group reserves the resources, actors restart by themselves.
"""

from __future__ import annotations

import logging
import os
import secrets
from dataclasses import dataclass

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.config import ClusterConfig, ServerSectionConfig
from cluster.errors import StartupError
from cluster.fleet import Fleet
from cluster.ray_channel import RayChannel
from cluster.worker import ContextWorker, GenerationWorker, WorkerRole, WorkerSpec
from cluster.worker_handle import WorkerHandle

__all__ = ["Controller"]

log = logging.getLogger(__name__)

_PLACEMENT_TIMEOUT_S = 60.0
_OBJECT_STORE_BYTES = 100 * 2**20  # KV never passes through Ray's object store; control messages are small
_WORKER_CLASS = {
    WorkerRole.CONTEXT: ContextWorker,
    WorkerRole.GENERATION: GenerationWorker,
    WorkerRole.AGGREGATED: GenerationWorker,
}


@dataclass(frozen=True, slots=True)
class _Planned:
    """A worker to be placed."""

    worker_id: str
    role: WorkerRole
    section: ServerSectionConfig


class Controller:
    """Owns the Ray connection and the placement group of one kvferry cluster.

    address  Ray cluster to attach to; None = the RAY_ADDRESS environment variable, else start one on this machine
    """

    def __init__(self, config: ClusterConfig, *, aggregated: bool = False, address: str | None = None) -> None:
        self._config = config
        self._address = address or os.environ.get("RAY_ADDRESS")
        self._aggregated = aggregated
        self._started_ray = False
        self._group: PlacementGroup | None = None

    @property
    def starts_ray(self) -> bool:
        """Whether `connect` will start a Ray cluster on this machine."""
        return not self._address and not ray.is_initialized()

    def connect(self) -> None:
        """Attach to Ray or start it. Blocks (seconds). Raises StartupError."""
        if ray.is_initialized():
            return
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_DEDUP_LOGS", "0")
        try:
            if self._address:
                ray.init(address=self._address, log_to_driver=False, logging_level=logging.WARNING)
            else:
                ray.init(
                    num_cpus=max(os.cpu_count() or 1, len(self._plan())),
                    include_dashboard=False,
                    object_store_memory=_OBJECT_STORE_BYTES,
                    log_to_driver=False,
                    logging_level=logging.WARNING,
                    _node_ip_address="127.0.0.1",
                )
        except Exception as error:
            where = f"at {self._address}" if self._address else "on this machine"
            raise StartupError(f"cannot reach or start Ray {where}: {error}") from error
        self._started_ray = True

    def create_fleet(self) -> Fleet:
        """Reserve resources and create the actors. Blocks (seconds). The fleet still has to be started.

        Raises StartupError when the cluster has not the resources for all workers.
        """
        planned = self._plan()
        bundles = [self._resources() for _ in planned]
        self._group = placement_group(bundles, strategy="SPREAD")
        if not self._group.wait(_PLACEMENT_TIMEOUT_S):
            wanted = {name: sum(b.get(name, 0) for b in bundles) for name in ("CPU", "GPU")}
            self._remove_group()
            raise StartupError(
                f"{len(planned)} workers need {wanted}, but the Ray cluster offers {ray.available_resources()}: "
                "start more nodes or lower num_instances"
            )
        secret = _cluster_secret()
        reachable_from = ray.util.get_node_ip_address() if self._address else "127.0.0.1"
        return Fleet(
            self._create(worker, index, secret, reachable_from) for index, worker in enumerate(planned)
        )

    def close(self) -> None:
        """Give the placement group back and leave Ray (stopping it if it was started here). Idempotent."""
        if not ray.is_initialized():
            return
        self._remove_group()
        if self._started_ray:
            ray.shutdown()
            self._started_ray = False

    def _plan(self) -> list[_Planned]:
        config = self._config
        if self._aggregated:
            count = config.generation_servers.num_instances
            return [
                _Planned(f"aggregated-{i}", WorkerRole.AGGREGATED, config.generation_servers) for i in range(count)
            ]
        sections = ((WorkerRole.CONTEXT, config.context_servers), (WorkerRole.GENERATION, config.generation_servers))
        return [
            _Planned(f"{role}-{i}", role, section) for role, section in sections for i in range(section.num_instances)
        ]

    def _resources(self) -> dict[str, float]:
        if self._config.engine.device.startswith("cuda"):
            return {"CPU": 1.0, "GPU": 1.0}
        return {"CPU": 1.0}

    def _create(self, worker: _Planned, bundle: int, secret: bytes, reachable_from: str) -> WorkerHandle:
        section = worker.section
        spec = WorkerSpec(
            worker_id=worker.worker_id,
            role=worker.role,
            model=self._config.model,
            kv_cache=section.kv_cache_config,
            transceiver=section.cache_transceiver_config,
            secret=secret,
            device=section.engine.device,
            dtype=section.engine.dtype,
            max_batch_size=section.engine.max_batch_size,
            max_num_tokens=section.engine.max_num_tokens,
            max_seq_len=section.engine.max_seq_len,
            enable_chunked_prefill=section.engine.enable_chunked_prefill,
            reachable_from=reachable_from,
        )
        resources = self._resources()
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        actor = (
            ray.remote(_WORKER_CLASS[worker.role])
            .options(
                num_cpus=resources["CPU"],
                num_gpus=resources.get("GPU", 0),
                max_restarts=-1,
                max_concurrency=4096,
                scheduling_strategy=strategy,
            )
            .remote(spec)
        )
        return WorkerHandle(worker.worker_id, worker.role, RayChannel(actor))

    def _remove_group(self) -> None:
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None


def _cluster_secret() -> bytes:
    """The secret of this cluster: KVFERRY_CLUSTER_SECRET when set, else a new random one."""
    given = os.environ.get("KVFERRY_CLUSTER_SECRET")
    return given.encode() if given else secrets.token_bytes(32)
