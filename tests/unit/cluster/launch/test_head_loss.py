"""The loss of a job's first node as a node that is left sees it: once, and only when nobody else has spoken."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.config import ClusterConfig
from cluster.config.slurm_config import SlurmConfig
from cluster.launch import Failure, JobFolder, JobPhase, JobState, submit_job
from cluster.launch.head_loss import report_head_loss
from cluster.launch.job_folder import RunFolder
from cluster.launch.node_pool import NodePool
from cluster.launch.slurm_client import Partition, SlurmClient


class Clock:
    """Time that passes by sleeping alone."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def report(run: RunFolder, here: str = "n2", clock: Clock | None = None) -> bool:
    clock = clock or Clock()
    return report_head_loss(run, "n1", here, "no word", clock=clock, sleep=clock.sleep)


def test_the_loss_is_written_once_for_all_nodes(tmp_path: Path) -> None:
    job = JobFolder(tmp_path, clock=lambda: 5.0)
    job.write_state(JobState(JobPhase.RUNNING, 0.0, 1, ("n1", "n2", "n3")))
    job.add_failure(Failure(0.0, 0, "n3", "running", "n3 is lost in the run before", 75))
    clock = Clock()
    assert report(job.run(1), "n2", clock)
    assert clock.now >= 3.0
    assert not report(job.run(1), "n3")
    [_, failure] = job.failures()
    assert failure == Failure(5.0, 1, "n1", "running", "n1 is lost: no word (seen by n2)", 75)


def test_two_nodes_that_see_it_at_once_write_it_once(tmp_path: Path) -> None:
    job = JobFolder(tmp_path)
    (job.run(0).path / "head_lost").touch()  # the other one is about to write
    assert not report(job.run(0))
    assert job.failures() == []


@pytest.mark.parametrize("what", ["exit code", "failure"])
def test_a_first_node_that_spoke_is_not_lost(tmp_path: Path, what: str) -> None:
    job = JobFolder(tmp_path)
    run = job.run(0)

    class LateWord(Clock):
        def sleep(self, seconds: float) -> None:
            super().sleep(seconds)
            if what == "exit code":
                run.exit_code.write_text("0\n")
            elif not job.failures():
                job.add_failure(Failure(0.0, 0, "n2", "running", "n2 is lost: silence", 75))

    assert not report(run, clock=LateWord())
    assert [failure.node for failure in job.failures()] == ([] if what == "exit code" else ["n2"])


class OneNodeSlurm(SlurmClient):
    def missing_commands(self) -> list[str]:
        return []

    def partitions(self) -> dict[str, Partition]:
        return {"p": Partition("p", nodes=2, idle=0, gpus=0)}

    def submit(self, script: Path, args: object = ()) -> int:
        return 1


def test_the_task_of_another_node_writes_the_failure_when_the_first_one_dies(tmp_path: Path) -> None:
    slurm = SlurmConfig(partition="p", work_dir=str(tmp_path))
    job = JobFolder(
        submit_job(ClusterConfig(model="hash", slurm=slurm), name="x", client=OneNodeSlurm(), on_nodes=False).folder
    )
    pool = NodePool(["n2"], bytes.fromhex(job.token.read_text().strip()))
    pool.start()
    argv = [sys.executable, "-m", "cluster.launch.slurm_task", "--folder", str(job.path)]
    env = {
        "KVFERRY_JOB_NODES": "n1 n2",
        "KVFERRY_JOB_ADDRESSES": "n1=127.0.0.1 n2=127.0.0.1",
        "SLURMD_NODENAME": "n2",
        "SLURM_RESTART_COUNT": "2",
    }
    task = subprocess.Popen([*argv, "--control-port", str(pool.port)], env={**os.environ, **env})
    try:
        assert pool.wait_joined(20.0) == []
        pool._links["n2"].close()  # what the death of the first node does
        assert task.wait(20.0) == 1
    finally:
        task.send_signal(signal.SIGKILL)
        task.wait()
        pool.stop(0.1)
    [failure] = job.failures()
    assert (failure.node, failure.attempt, failure.exit_code) == ("n1", 2, 75)
    assert failure.cause == "n1 is lost: the peer closed the connection (seen by n2)"
