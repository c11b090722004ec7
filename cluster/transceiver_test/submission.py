"""Runs a transceiver test as a Slurm job: a cluster's job without Ray, with the test as its command."""

from __future__ import annotations

from pathlib import Path

from cluster.config import ClusterConfig, ConfigProblem
from cluster.launch import LaunchConfigError, SlurmClient, Submission, submit_job
from cluster.transceiver_test.config import TransceiverTestConfig

__all__ = ["submit_test"]


def submit_test(
    config: TransceiverTestConfig, path: Path, *, client: SlurmClient, arguments: tuple[str, ...] = (),
    dry_run: bool = False, on_nodes: bool = True,
) -> Submission:  # fmt: skip
    """Submit the test of `path` over two nodes (or `slurm.nodes`). Raises LaunchConfigError with every problem."""
    if config.slurm is None:
        problem = ConfigProblem("slurm", "the section is missing", "add `slurm:` with at least `partition:`")
        raise LaunchConfigError([problem])
    command = ("python", "-m", "cluster", "transceiver-test", "-c", str(path.resolve()), "--nodes", "job", *arguments)
    slurm = config.slurm.model_copy(
        update={
            "command": command,
            "clients": (),
            "nodes": config.slurm.nodes or 2,
            "ray": config.slurm.ray.model_copy(update={"enabled": False}),
        }
    )
    cluster = ClusterConfig(model="hash", slurm=slurm)
    return submit_job(cluster, name=path.stem, client=client, dry_run=dry_run, on_nodes=on_nodes)
