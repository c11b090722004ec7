"""TCP between two network namespaces: transfers and raw-socket copies in turn, by a program inside one of them.

``between_hosts run NAMESPACE HOST ROUNDS SETTINGS`` measures against a holder in that namespace and prints one JSON
line; ``between_hosts sender HOST`` is the other end of the raw socket. Started by `measure_between_hosts`.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from typing import Any

import numpy as np

from cluster.bench.transfer.link import BenchLink, Measured
from cluster.bench.transfer.namespaces import two_hosts
from cluster.bench.transfer.pools import Shape
from kvcache.storage.host_memory import MappedMemory

__all__ = ["measure_between_hosts"]

_NBYTES = 64 << 20
_BUFFER = 4 << 20
_MODULE = "cluster.bench.transfer.between_hosts"
_DEADLINE_S = 240.0


def measure_between_hosts(rounds: int, settings: dict[str, Any] | None = None) -> Measured:
    """Contiguous 64 MiB; peer "socket" holds the raw copies. Raises NamespacesUnavailable, RuntimeError."""
    with two_hosts() as hosts:
        command = (
            "ip", "netns", "exec", hosts.names[1], sys.executable, "-m", _MODULE, "run", hosts.names[0], hosts.hosts[0],
            str(rounds), json.dumps(settings or {}),
        )  # fmt: skip
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_DEADLINE_S, env=environment, check=False
        )
    if done.returncode:
        raise RuntimeError(f"measuring between two namespaces: {(done.stderr.strip().splitlines() or ['failed'])[-1]}")
    return Measured(**json.loads(done.stdout.strip().splitlines()[-1]))


class _RawCopy:
    """A TCP connection to a sender in the other namespace, into memory in place."""

    def __init__(self, namespace: str, host: str) -> None:
        command = ("ip", "netns", "exec", namespace, sys.executable, "-m", _MODULE, "sender", host)
        self._sender = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._sender.stdout is not None
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
        self._socket.connect((host, int(self._sender.stdout.readline())))
        self._memory = MappedMemory(_NBYTES)

    def __call__(self, mine: Any, theirs: Any) -> float:
        view, got = self._memory.view(), 0
        started = time.perf_counter()
        self._socket.sendall(b"x")
        while got < _NBYTES:
            size = self._socket.recv_into(view[got:])
            if not size:
                raise RuntimeError("the raw sender is gone")
            got += size
        return time.perf_counter() - started

    def close(self) -> None:
        self._socket.close()
        self._sender.wait(10)


def _sender(host: str) -> None:
    memory = MappedMemory(_NBYTES)
    np.frombuffer(memory.view(), np.uint8).fill(3)
    with socket.socket() as listener:
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            listener.setsockopt(socket.SOL_SOCKET, option, _BUFFER)
        listener.bind((host, 0))
        listener.listen(1)
        print(listener.getsockname()[1], flush=True)
        connection, _ = listener.accept()
        with connection:
            while connection.recv(1):
                connection.sendall(memory.view())


def _run(namespace: str, host: str, rounds: int, settings: dict[str, Any]) -> None:
    raw = _RawCopy(namespace, host)
    with BenchLink(
        "64K", 2048, {"verify": False, "ucx_tls": "tcp", **settings}, namespace=namespace, host=host
    ) as link:
        measured = link.measure(Shape(1024, 1024), rounds, {"socket": raw})
    raw.close()
    print(json.dumps({name: getattr(measured, name) for name in Measured.__dataclass_fields__}))


if __name__ == "__main__":
    if sys.argv[1] == "sender":
        _sender(sys.argv[2])
    else:
        _run(sys.argv[2], sys.argv[3], int(sys.argv[4]), json.loads(sys.argv[5]))
