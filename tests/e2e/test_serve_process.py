"""The life of the `kvferry serve` process: ready, stopped, refused; nothing of it stays behind."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = [pytest.mark.ray, pytest.mark.ucx]


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_and_leaves_nothing(launch: Callable[..., Any], number: int):
    before = shared_memory()
    server = launch("--model", "hash")
    server.wait_ready()
    with httpx.stream(
        "POST",
        f"{server.base_url}/v1/completions",
        json={"model": "hash", "prompt": "x", "max_tokens": 4000, "ignore_eos": True, "stream": True},
        timeout=60,
    ) as response:
        next(response.iter_lines())  # a stream is open while the signal comes
        server.process.send_signal(number)
        server.process.send_signal(number)  # the second one does not let it finish
        assert server.process.wait(60) == 0
    assert server.leftovers() == []
    assert shared_memory() <= before
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", server.port))
    assert "Traceback" not in server.log.read_text()


def test_requests_in_progress_may_finish_and_new_ones_are_refused(launch: Callable[..., Any]):
    server = launch("--model", "hash:step_ms=20", "--set", "server.drain_s=30")
    server.wait_ready()
    body = {"model": "hash:step_ms=20", "prompt": "x", "max_tokens": 100, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.base_url}/v1/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 5
        while (health := httpx.get(f"{server.base_url}/health")).status_code == 200 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert health.status_code == 503
        refused = httpx.post(f"{server.base_url}/v1/completions", json=body, timeout=10)
        assert refused.status_code == 503
        assert "shutting down" in refused.json()["error"]["message"]
        rest = list(lines)
    assert rest[-2:] == ["data: [DONE]", ""]
    assert not any("error" in line for line in rest)
    assert server.process.wait(60) == 0
    assert "draining: 1 requests" in server.log.read_text()
    assert server.leftovers() == []


def test_a_signal_during_start_up_ends_it_too(launch: Callable[..., Any]):
    server = launch("--model", "hash")
    deadline = time.monotonic() + 60
    while "starting" not in server.log.read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(90) == 0
    assert server.leftovers() == []
    assert "Traceback" not in server.log.read_text()


def test_a_port_in_use_is_one_clear_error(launch: Callable[..., Any]):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        server = launch("--model", "hash", "--port", port)
        assert server.process.wait(60) == 1
    text = server.log.read_text()
    assert f"cannot listen on 127.0.0.1:{port}" in text
    assert "server.port" in text
    assert "Traceback" not in text


def test_an_unreadable_model_file_is_one_clear_error(launch: Callable[..., Any], tmp_path: Path):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF but not really")
    server = launch("--model", str(broken))
    assert server.process.wait(60) == 2
    text = server.log.read_text()
    assert "broken.gguf" in text
    assert "Traceback" not in text
