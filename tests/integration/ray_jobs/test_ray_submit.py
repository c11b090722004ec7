"""`kvferry ray submit` and `kvferry serve --address` against a live head with a job server.

The head runs under the tests' own interpreter, which may have kvferry installed: these tests do not show that a job
brings all of kvferry with its working directory.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.integration.ray_jobs.conftest import REPOSITORY, RayHead, free_ports

pytestmark = [pytest.mark.ray, pytest.mark.ucx, pytest.mark.slow, pytest.mark.timeout(300)]

HASH = "model: hash\nengine: {max_seq_len: 2048}\nkv_cache_config: {max_tokens: 16384}\n"


def kvferry(head: RayHead, *args: str, timeout_s: float = 200.0) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "cluster", *args]
    return subprocess.run(
        argv, cwd=REPOSITORY, env=head.env, capture_output=True, text=True, timeout=timeout_s, check=False
    )


def wait_healthy(port: int, timeout_s: float = 90.0) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as response:
                if response.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            pass
        assert time.monotonic() < deadline, "the server is not ready"
        threading.Event().wait(0.3)


def chat(port: int) -> dict[str, Any]:
    body = {
        "model": "hash",
        "messages": [{"role": "user", "content": "hello there"}],
        "max_tokens": 8,
        "temperature": 0,
    }
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        answer: dict[str, Any] = json.load(response)
        return answer


def config_file(tmp_path: Path, port: int) -> str:
    path = tmp_path / "cluster.yaml"
    path.write_text(HASH + f"server: {{port: {port}}}\n")
    return str(path)


def test_the_drivers_exit_code_comes_back(ray_head: RayHead) -> None:
    script = (
        "import os, cluster, sys; print('in', os.path.basename(cluster.__file__), os.environ['COLOUR']); sys.exit(5)"
    )
    args = ["--address", ray_head.dashboard, "--env", "COLOUR=blue", "--", "python", "-c", script]
    done = kvferry(ray_head, "ray", "submit", *args)
    assert done.returncode == 5, done.stdout + done.stderr
    assert "in __init__.py blue" in done.stdout
    assert "FAILED" in done.stdout


def test_a_job_serves_and_stops(ray_head: RayHead, tmp_path: Path) -> None:
    [port] = free_ports(1)
    address = ["--address", ray_head.dashboard]
    done = kvferry(ray_head, "ray", "submit", *address, "-c", config_file(tmp_path, port), "--no-wait")
    found = re.search(r"^job (\S+)$", done.stdout, re.MULTILINE)
    assert found is not None, done.stdout + done.stderr
    try:
        wait_healthy(port)
        answer = chat(port)
        assert answer["kvferry"]["transport"].startswith("ucx/")
        assert "RUNNING" in kvferry(ray_head, "ray", "status", *address, found.group(1)).stdout
    finally:
        print(kvferry(ray_head, "ray", "logs", *address, found.group(1)).stdout)
        stopped = kvferry(ray_head, "ray", "stop", *address, found.group(1))
    assert "STOPPED" in stopped.stdout
    assert "kvferry: ready" in kvferry(ray_head, "ray", "logs", *address, found.group(1)).stdout


def test_serve_joins_a_running_cluster(ray_head: RayHead, tmp_path: Path) -> None:
    [port] = free_ports(1)
    argv = [sys.executable, "-m", "cluster", "serve", "-c", config_file(tmp_path, port), "--address", ray_head.gcs]
    with subprocess.Popen(argv, cwd=REPOSITORY, env=ray_head.env, stderr=subprocess.PIPE, text=True) as server:
        try:
            wait_healthy(port)
            assert chat(port)["usage"]["completion_tokens"] == 8
        finally:
            server.send_signal(signal.SIGINT)
            try:
                server.wait(60)
            finally:
                server.kill()
        assert server.stderr is not None
        said = server.stderr.read()
    assert server.returncode == 0, said
    assert "connecting to Ray" in said


def test_no_job_server_is_one_clear_error(ray_head: RayHead) -> None:
    [port] = free_ports(1)
    done = kvferry(ray_head, "ray", "status", "--address", f"http://127.0.0.1:{port}", "some-job")
    assert done.returncode == 1
    assert "no job server at" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_unknown_job_is_one_clear_error(ray_head: RayHead) -> None:
    done = kvferry(ray_head, "ray", "status", "--address", ray_head.dashboard, "no-such-job")
    assert done.returncode == 1
    assert "no-such-job" in done.stderr
    assert "Traceback" not in done.stderr
