"""`kvferry serve` as its users run it: a process of its own, asked over HTTP, stopped with Ctrl-C."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

READY_TIMEOUT_S = 180
STOP_TIMEOUT_S = 60


def marked_processes(mark: str) -> list[str]:
    """Command lines of the processes that carry `mark` in their environment."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if mark.encode() in environment:
            found.append(f"{pid} {command.strip()[:120]}")
    return found


@dataclass
class Server:
    """A running `kvferry serve`."""

    process: subprocess.Popen[bytes]
    port: int
    mark: str
    log: Path

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait_ready(self) -> None:
        """Until /health says 200."""
        deadline = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline:
            assert self.process.poll() is None, f"the server ended:\n{self.log.read_text()}"
            try:
                if httpx.get(f"{self.base_url}/health", timeout=5).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.2)
        raise AssertionError(f"not ready within {READY_TIMEOUT_S} s:\n{self.log.read_text()}")

    def interrupt(self) -> int:
        """Ctrl-C; the exit code."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(STOP_TIMEOUT_S)

    def leftovers(self, timeout_s: float = 20) -> list[str]:
        """Processes of this server that are still there after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while (alive := marked_processes(self.mark)) and time.monotonic() < deadline:
            time.sleep(0.1)
        return alive


def start_server(log: Path, *arguments: str) -> Server:
    """Start it on a free port; does not wait."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mark = f"KVFERRY_TEST_MARK={uuid.uuid4().hex}"
    name, value = mark.split("=")
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"} | {name: value}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "cluster", "serve", "--port", str(port), *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    return Server(process, port, mark, log)


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """`launch(*arguments)` starts a server; what is still running at the end of the test is killed."""
    started: list[Server] = []

    def start(*arguments: str) -> Server:
        started.append(start_server(tmp_path / f"serve-{len(started)}.log", *arguments))
        return started[-1]

    yield start
    for server in started:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()
        assert server.leftovers() == []


@pytest.fixture(scope="module")
def real_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One context and one generation worker on the real model."""
    server = start_server(tmp_path_factory.mktemp("serve") / "serve.log", *REAL_MODEL_SETTINGS)
    try:
        server.wait_ready()
        yield server
    finally:
        if server.process.poll() is None:
            assert server.interrupt() == 0
        assert server.leftovers() == []


REAL_MODEL_SETTINGS = (
    "--set=kv_cache_config.block_reuse_config.policy=per_conversation",
    "--set=kv_cache_config.block_reuse_config.max_num_turns=5",
    "--set=kv_cache_config.max_tokens=8192",
)
