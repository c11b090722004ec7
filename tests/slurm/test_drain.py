"""A Slurm job that is told to end lets its requests finish, then ends in order."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from tests.slurm.jobs import submit, write_config
from tests.slurm.virtual_slurm import VirtualSlurm, wait_for

pytestmark = [pytest.mark.slurm, pytest.mark.ray, pytest.mark.ucx, pytest.mark.slow, pytest.mark.timeout(300)]

MODEL = "hash:step_ms=20"
BODY = {"model": MODEL, "prompt": "hello", "max_tokens": 250, "ignore_eos": True, "temperature": 0, "stream": True}


def test_a_request_in_progress_finishes_when_the_job_is_told_to_end(slurm: VirtualSlurm, slurm_root: Path) -> None:
    if not slurm.machines.separate_addresses:
        pytest.skip("needs root and network namespaces: Ray needs an address of its own on every node")
    folder = slurm_root / "drained"
    folder.mkdir()
    section = {
        "nodes": 1,
        "ranks_per_node": 2,
        "drain_s": 30.0,
        "ray": {"cpus_per_node": 4, "object_store_mb": 80, "start_timeout_s": 75.0},
        "ready_timeout_s": 180.0,
    }
    config = write_config(folder, "drained", section, model=MODEL, server={"host": "0.0.0.0", "port": 8000})
    job = submit(slurm, config, "--no-preflight")
    state = job.folder / "state.json"
    wait_for(lambda: state.exists() and job.state()["phase"] == "ready", "the job to serve", 200)
    node = job.state()["nodes"][0]
    answer: list[str] = []

    def ask() -> None:
        url = "http://127.0.0.1:8000/v1/completions"
        command = ["curl", "-sN", "-m", "60", url, "-H", "Content-Type: application/json", "-d", json.dumps(BODY)]
        answer.append(slurm.run(command, on_node=node, timeout_s=80).stdout)

    client = threading.Thread(target=ask)
    client.start()
    wait_for(lambda: b"in_flight 1.0" in metrics(slurm, node), "the request to be served", 20)
    slurm.run(["scancel", "--batch", "--signal=TERM", str(job.job_id)])
    client.join()
    lines = [line for line in answer[0].splitlines() if line]
    assert lines[-1] == "data: [DONE]"
    assert not any('"error"' in line for line in lines)
    info = slurm.wait_job(job.job_id, ["COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"], 90)
    assert (info.state, info.exit_code) == ("COMPLETED", 0), job.failures()
    assert "draining: 1 requests" in job.log("serve")


def metrics(slurm: VirtualSlurm, node: str) -> bytes:
    done = slurm.run(["curl", "-s", "-m", "10", "http://127.0.0.1:8000/metrics"], on_node=node, timeout_s=20)
    return done.stdout.encode()
