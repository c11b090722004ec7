"""A Ray head with job server of its own, brought up by the product's launcher and taken down with everything in it."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from cluster.config.slurm_config import SlurmRayConfig
from cluster.launch.job_folder import JobFolder
from cluster.launch.node_pool import NodePool, make_token_file
from cluster.launch.ray_launcher import RayLauncher, ray_access

REPOSITORY = Path(__file__).parents[3]


@dataclass(frozen=True)
class RayHead:
    """Addresses of a live head, the environment that lets a process in, and where its log is."""

    gcs: str
    dashboard: str
    env: dict[str, str]


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(one.getsockname()[1]) for one in sockets]
    for one in sockets:
        one.close()
    return ports


@pytest.fixture(scope="package")
def ray_head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayHead]:
    folder = tmp_path_factory.mktemp("ray-head")
    job = JobFolder(folder)
    make_token_file(job.ray_token)
    pool = NodePool(["head"], make_token_file(job.token))
    pool.start()
    pool.spawn_local("head", job.token, folder / "agent.log")
    assert pool.wait_joined(30.0) == []
    port, dashboard, agent = free_ports(3)
    launcher = RayLauncher(
        pool,
        SlurmRayConfig(
            port=port,
            dashboard=True,
            dashboard_port=dashboard,
            agent_port=agent,
            cpus_per_node=8,
            object_store_mb=100,
            start_timeout_s=120.0,
        ),
        job.run(0),
        python=sys.executable,
        env={},
        gpus_per_node=0,
        say=print,
        check=lambda: None,
    )
    try:
        address = launcher.start({"head": "127.0.0.1"}, {})
        env = {**os.environ, **ray_access(job), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
        env.pop("RAY_ADDRESS", None)
        yield RayHead(address, f"http://127.0.0.1:{dashboard}", env)
    finally:
        launcher.close()
        assert pool.stop(2.0) == []
