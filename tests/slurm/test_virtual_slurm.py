"""The test cluster itself: real daemons, separate machines, crash and return, nothing left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.slurm.conftest import NODES, require_slurm
from tests.slurm.virtual_nodes import PortMachines
from tests.slurm.virtual_slurm import VirtualSlurm, wait_for

pytestmark = pytest.mark.slurm


def test_every_node_has_its_own_name_address_and_processes(separate_nodes: VirtualSlurm) -> None:
    done = separate_nodes.run(["srun", f"-N{NODES}", "bash", "-c", "echo $(hostname) $(hostname -I) $(ps -e | wc -l)"])
    rows = sorted(line.split() for line in done.stdout.splitlines())
    assert [row[0] for row in rows] == separate_nodes.names, done.stderr
    assert len({row[1] for row in rows}) == NODES
    assert all(int(row[2]) < 20 for row in rows), "a node sees the processes of its host"


def test_exit_code_of_a_batch_job(slurm: VirtualSlurm) -> None:
    done = slurm.run(["sbatch", "--parsable", "-o", "/dev/null", "--wrap", "exit 3"])
    info = slurm.wait_job(int(done.stdout), ["FAILED", "COMPLETED"], 30)
    assert (info.state, info.exit_code) == ("FAILED", 3)


def test_a_crashed_node_loses_its_processes_and_comes_back(separate_nodes: VirtualSlurm) -> None:
    job = int(
        separate_nodes.run(
            ["sbatch", "--parsable", "-w", "node4", "--no-requeue", "-o", "/dev/null", "--wrap", "sleep 300"]
        ).stdout
    )
    separate_nodes.wait_job(job, ["RUNNING"], 20)
    separate_nodes.crash_and_boot("node4")
    info = separate_nodes.wait_job(job, ["NODE_FAIL", "FAILED", "CANCELLED"], 60)
    assert info.state == "NODE_FAIL"
    separate_nodes.wait_idle(60)


def test_the_ports_variant_works_and_leaves_nothing() -> None:
    require_slurm()
    with tempfile.TemporaryDirectory(prefix="kvferry-slurm-") as folder:
        root = Path(folder)
        root.chmod(0o755)
        machines = PortMachines(root, 2)
        cluster = VirtualSlurm(root, 2, machines=machines)
        cluster.start()
        try:
            done = cluster.run(["srun", "-N2", "bash", "-c", "echo $SLURMD_NODENAME"])
            assert sorted(done.stdout.split()) == ["node1", "node2"]
            sleeper = int(cluster.run(["sbatch", "--parsable", "-o", "/dev/null", "--wrap", "srun sleep 600"]).stdout)
            cluster.wait_job(sleeper, ["RUNNING"], 20)
            assert machines.left_over()
        finally:
            cluster.stop()
        wait_for(lambda: not machines.left_over(), "the daemons and jobs of the cluster are gone", 10)


def test_as_a_program_it_runs_one_command(slurm_root: Path) -> None:
    require_slurm()
    done = subprocess.run(
        [sys.executable, "tests/slurm/virtual_slurm.py", "--nodes", "2", "--", "bash", "-c", "sinfo -h -o %D; exit 5"],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": "."},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stdout.strip()) == (5, "2"), done.stderr
