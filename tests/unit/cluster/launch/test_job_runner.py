"""Exit codes of the runner: what a shell would say of a driver's end, also where a signal killed the server."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from cluster.config import ClusterConfig
from cluster.config.slurm_config import SlurmConfig
from cluster.launch import JobFolder, allocate
from cluster.launch.job_runner import JobNodes, JobRunner
from cluster.launch.remote_process import RemoteProcess


class KilledServerPool:
    """Stands in for the nodes: the server is killed by a signal, whatever else is started runs until it is told."""

    def __init__(self) -> None:
        self.losses: SimpleQueue[Any] = SimpleQueue()
        self.signals: SimpleQueue[Any] = SimpleQueue()
        self.server: RemoteProcess | None = None

    def wait_joined(self, _timeout_s: float) -> list[str]:
        return []

    def run(self, node: str, argv: list[str], *, log: Path, env: object) -> RemoteProcess:
        process = RemoteProcess(node, 1, tuple(argv), log, lambda *_: process.set_ended(-signal.SIGTERM, ""))
        if "serve" in argv:
            self.server = process
        return process

    def stop(self, grace_s: float) -> list[str]:
        return []

    def kill_server(self) -> bool:
        assert self.server is not None
        self.server.set_ended(-signal.SIGKILL, "")
        return True


def runner_of(folder: Path, pool: KilledServerPool, **slurm: Any) -> JobRunner:
    section = SlurmConfig(partition="p", **slurm)
    config = ClusterConfig(model="hash", slurm=section)
    allocation, _ = allocate(config, section)
    nodes = JobNodes({"node1": "127.0.0.1"})
    return JobRunner(config, section, allocation, nodes, pool, JobFolder(folder).run(0))  # type: ignore[arg-type]


@pytest.mark.parametrize("when", ["before it is ready", "while a client runs"])
def test_a_server_killed_by_a_signal_ends_the_job_as_a_shell_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    pool = KilledServerPool()
    healthy: Callable[[str], bool] = lambda _url: True  # noqa: E731
    if when == "before it is ready":
        healthy = lambda _url: not pool.kill_server()  # noqa: E731
    monkeypatch.setattr("cluster.launch.job_runner._healthy", healthy)
    monkeypatch.setattr("cluster.launch.job_runner._port_taken", lambda _port: "")
    monkeypatch.setattr(JobRunner, "_start_ray", lambda _self: "")
    runner = runner_of(tmp_path, pool, clients=(("client",),))
    if when == "while a client runs":
        check = JobRunner._check

        def kill_then_check(self: JobRunner) -> None:
            check(self)
            if self._state.phase == "ready":
                pool.kill_server()

        monkeypatch.setattr(JobRunner, "_check", kill_then_check)
    assert runner.run() == 137
    assert (tmp_path / "run-0" / "exit_code").read_text() == "137\n"
    [failure] = JobFolder(tmp_path).failures()
    assert (failure.step, failure.exit_code) == ("serve", 137)
