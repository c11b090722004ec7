"""The transceiver test over two nodes with addresses of their own, as a Slurm job."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.slurm.jobs import REPOSITORY, Job, kvferry
from tests.slurm.virtual_slurm import VirtualSlurm

pytestmark = [pytest.mark.slurm, pytest.mark.ucx, pytest.mark.slow, pytest.mark.timeout(200)]


def run_test(slurm: VirtualSlurm, folder: Path, *args: str, **changes: Any) -> tuple[int, Job]:
    """Exit code of the job, and the job."""
    config = {
        "request_lengths": [100, 1000],
        "requests_per_length": 2,
        "layouts": [{"name": "full"}, {"name": "tp2-tp1", "context": {"tp": 2}}, {"name": "hybrid", "kind": "hybrid"}],
        "policies": ["per_conversation"],
        "max_num_turns": [5],
        "ucx_env_sweep": [{"name": "tcp", "env": {"UCX_TLS": "tcp,cma"}, "expect_transport": "ucx/tcp"}],
        "run": {"timeout_per_cell_s": 30.0, "max_sweep_s": 120.0},
        "slurm": {
            "partition": "debug",
            "time": "4",
            "work_dir": str(REPOSITORY),
            "log_dir": str(folder / "logs"),
            "drain_s": 5.0,
            "signal_before_end_s": 0,
        },
        **changes,
    }
    path = folder / "ctt.yaml"
    path.write_text(yaml.safe_dump(config))
    done = kvferry(slurm, "transceiver-test", "-c", str(path), "--submit", *args)
    assert done.returncode == 0, done.stderr
    found = re.search(r"job (\d+)\nfolder (.*)\n", done.stdout)
    assert found is not None
    job = Job(int(found.group(1)), Path(found.group(2)))
    info = slurm.wait_job(job.job_id, ["COMPLETED", "FAILED", "TIMEOUT", "CANCELLED"], 180)
    return info.exit_code, job


def results_of(job: Job) -> dict[str, Any]:
    results: dict[str, Any] = json.loads((job.folder / "results" / "results.json").read_text())
    return results


def test_two_nodes_pass_over_tcp(separate_nodes: VirtualSlurm, tmp_path: Path) -> None:
    code, job = run_test(separate_nodes, tmp_path, "--host-transfer")
    assert code == 0, job.log("command")
    cells = [cell for row in results_of(job)["by_combination"] for cell in row["cells"]]
    assert len(cells) == 3 * 2 * 2 + 1
    assert {(cell["status"], cell["selected_transport"]) for cell in cells} == {("PASS", "ucx/tcp")}
    assert results_of(job)["host_transfer"][0]["median_GBps"] > 0


def test_a_mismatch_is_the_jobs_exit_code(separate_nodes: VirtualSlurm, tmp_path: Path) -> None:
    layouts = [{"name": "full"}]
    code, job = run_test(separate_nodes, tmp_path, "--force-mismatch", "tcp/ucx/full/gen_to_ctx/1000", layouts=layouts)
    assert code == 1
    assert results_of(job)["verdicts"]["MISMATCH"] == 1
    assert job.failures()[0]["step"] == "command"
