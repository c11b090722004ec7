"""One Ray cluster for all tests here; each test brings its own kvferry cluster up in it and takes it down."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator

import pytest

from cluster.descendants import descendants


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A Ray cluster on this machine with room for eight workers."""
    import ray

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(
        address="local",
        num_cpus=8,
        include_dashboard=False,
        object_store_memory=100 * 2**20,
        log_to_driver=False,
        logging_level="ERROR",
        _node_ip_address="127.0.0.1",
    )
    yield
    ray.shutdown()


@pytest.fixture
def no_leftovers(ray_cluster: None) -> Iterator[None]:
    """After the test no worker process of it is alive."""
    before = set(worker_processes())
    yield
    deadline = time.monotonic() + 20
    while (alive := set(worker_processes()) - before) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not alive, f"worker processes outlived the test: {alive}"


@pytest.fixture
def live_workers() -> Callable[[], list[str]]:
    """`worker_processes`, for tests."""
    return worker_processes


def worker_processes() -> list[str]:
    """Command lines of live kvferry worker actors that this test run started."""
    found = []
    for pid in descendants():
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                command = file.read().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if "ray::ContextWorker" in command or "ray::GenerationWorker" in command:
            found.append(f"{pid} {command.strip()}")
    return found
