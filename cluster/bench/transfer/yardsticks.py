"""What the transceiver is compared with: ucx_perftest of the installed libucx and Ray's object store.

Each function measures one round and returns bytes per second, or None when that peer is not there.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

__all__ = ["perftest_bandwidth", "ray_store"]

_WAIT_S = 60.0


def perftest_bandwidth(nbytes: int, iterations: int, warm_up: int) -> float | None:
    """`ucx_perftest` tag_bw between two processes of this machine at `nbytes`, transport of its own choice."""
    spec = importlib.util.find_spec("libucx")
    if spec is None or spec.origin is None:
        return None
    root = Path(spec.origin).parent
    program = root / "bin" / "ucx_perftest"
    if not program.exists():
        return None
    environment = {**os.environ, "LD_LIBRARY_PATH": str(root / "lib"), "UCX_WARN_UNUSED_ENV_VARS": "n"}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    server = subprocess.Popen(
        (program, "-p", port), env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    command = (
        program, "127.0.0.1", "-p", port, "-t", "tag_bw", "-s", str(nbytes), "-n", str(iterations),
        "-w", str(warm_up), "-f",
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 10
        while True:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=_WAIT_S, check=False
            )
            if done.returncode == 0 or time.monotonic() > deadline:
                break
            time.sleep(0.1)  # the server is not listening yet
    except subprocess.TimeoutExpired:
        return None
    finally:
        server.kill()
        server.wait()
    numbers = re.findall(r"[-+]?\d+\.?\d*", done.stdout.strip().splitlines()[-1]) if done.stdout.strip() else []
    # columns: iterations, percentile, average, overall (us), bandwidth average, overall (MB/s), message rates
    return float(numbers[5]) * 2**20 if len(numbers) >= 8 else None


@contextlib.contextmanager
def ray_store() -> Iterator[Callable[[int], float] | None]:
    """A function of bytes -> bytes per second through Ray's object store, or None without Ray."""
    try:
        from cluster.bench.transfer.ray_store import open_ray_store
    except ImportError:
        yield None
        return
    with open_ray_store() as measure:
        yield measure
