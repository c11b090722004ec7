"""Brings the workers up as Ray actors: cluster, placement, one actor a worker.

Everything beyond one process rides on Ray: a placement group reserves the resources, actors restart by themselves.
"""

from __future__ import annotations

import logging
import os
import socket
from dataclasses import replace
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.config import ClusterConfig
from cluster.errors import StartupError
from cluster.fleet import Fleet
from cluster.launch.allocation import CONTEXT_RESOURCE, GENERATION_RESOURCE
from cluster.ray_channel import RayChannel
from cluster.worker import WorkerRole, WorkerSpec
from cluster.worker_handle import WorkerHandle
from cluster.worker_plan import WORKER_CLASS, cluster_secret, plan_workers

__all__ = ["Controller"]

log = logging.getLogger(__name__)

_PLACEMENT_TIMEOUT_S = 60.0
_PLACED_BY = {WorkerRole.CONTEXT: CONTEXT_RESOURCE, WorkerRole.GENERATION: GENERATION_RESOURCE}
_OBJECT_STORE_BYTES = 100 * 2**20  # KV never passes through Ray's object store; control messages are small


class Controller:
    """Owns the Ray connection and the placement group of one kvferry cluster.

    worker_log_level  what the workers log, shown in this process's output; None shows nothing of them
    address  Ray cluster to attach to; None = the RAY_ADDRESS environment variable, else start one on this machine
    """

    def __init__(
        self,
        config: ClusterConfig,
        *,
        aggregated: bool = False,
        address: str | None = None,
        worker_log_level: str | None = None,
    ) -> None:
        self._config = config
        self._address = address or os.environ.get("RAY_ADDRESS")
        self._aggregated = aggregated
        self._worker_log_level = worker_log_level
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
        os.environ.setdefault("RAY_COLOR_PREFIX", "0")
        try:
            if self._address:
                _require_reachable(self._address)
                ray.init(
                    address=self._address, log_to_driver=self._worker_log_level is not None, logging_level=logging.ERROR
                )
            else:
                ray.init(
                    address="local",  # never somebody else's cluster that happens to run on this machine
                    num_cpus=max(os.cpu_count() or 1, len(self._plan())),
                    include_dashboard=False,
                    object_store_memory=_OBJECT_STORE_BYTES,
                    log_to_driver=self._worker_log_level is not None,
                    logging_level=logging.ERROR,
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
        reachable_from = "127.0.0.1"
        if self._address:
            reachable_from = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        num_nodes = sum(bool(node["Alive"]) for node in ray.nodes())  # type: ignore[no-untyped-call]
        specs = self._plan(cluster_secret(), reachable_from, num_nodes)
        offered = ray.cluster_resources()  # type: ignore[no-untyped-call]
        specs = [_on_its_device(spec, offered) for spec in specs]
        bundles = [_resources(spec, offered) for spec in specs]
        self._group = placement_group(bundles, strategy="SPREAD")
        if not self._group.wait(_PLACEMENT_TIMEOUT_S):
            wanted = {name: sum(b.get(name, 0) for b in bundles) for name in ("CPU", "GPU")}
            left = ray.available_resources()  # type: ignore[no-untyped-call]
            self._remove_group()
            raise StartupError(
                f"{len(specs)} workers need {wanted}, but the Ray cluster has {left} to offer: "
                "start more nodes or lower num_instances"
            )
        return Fleet(self._create(spec, index, bundles[index]) for index, spec in enumerate(specs))

    def close(self) -> None:
        """Give the placement group back and leave Ray (stopping it if it was started here). Idempotent."""
        if not ray.is_initialized():
            return
        self._remove_group()
        if self._started_ray:
            ray.shutdown()
            self._started_ray = False

    def _plan(self, secret: bytes = b"", reachable_from: str = "127.0.0.1", num_nodes: int = 1) -> list[WorkerSpec]:
        return plan_workers(
            self._config,
            aggregated=self._aggregated,
            secret=secret,
            reachable_from=reachable_from,
            log_level=self._worker_log_level,
            num_nodes=num_nodes,
        )

    def _environment(self, role: WorkerRole) -> dict[str, str]:
        slurm = self._config.slurm
        if slurm is None:
            return {}
        return slurm.context_env if role is WorkerRole.CONTEXT else slurm.generation_env

    def _create(self, spec: WorkerSpec, bundle: int, resources: dict[str, float]) -> WorkerHandle:
        assert self._group is not None
        custom = {name: amount for name, amount in resources.items() if name not in ("CPU", "GPU")}
        environment = self._environment(spec.role)
        actor: Any = (
            ray.remote(WORKER_CLASS[spec.role])
            .options(
                num_cpus=resources["CPU"],
                num_gpus=resources.get("GPU", 0),
                resources=custom,
                runtime_env={"env_vars": environment} if environment else None,
                max_restarts=-1,
                max_concurrency=4096,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle),
            )
            .remote(spec)
        )
        return WorkerHandle(spec.worker_id, spec.role, RayChannel(actor))

    def _remove_group(self) -> None:
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None


def _require_reachable(address: str) -> None:
    """Raises OSError at once when nobody listens at host:port; Ray would try for a long while."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()


def _on_its_device(spec: WorkerSpec, offered: dict[str, float]) -> WorkerSpec:
    """A worker that wants a GPU gets one of its own from Ray, which shows it that one only: it is its `cuda` then."""
    if spec.device.startswith("cuda") or (spec.device == "auto" and offered.get("GPU", 0) > 0):
        return replace(spec, device="cuda", memory_share=1.0)
    return replace(spec, device="cpu") if spec.device == "auto" else spec


def _resources(spec: WorkerSpec, offered: dict[str, float]) -> dict[str, float]:
    """What a worker's bundle reserves. A launcher can mark the nodes of a role with a custom resource."""
    resources = {"CPU": 1.0}
    if spec.device == "cuda":
        resources["GPU"] = 1.0
    placed = _PLACED_BY.get(spec.role)
    if placed is not None and placed in offered:
        resources[placed] = 1.0
    return resources
