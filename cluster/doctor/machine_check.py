"""Looks at the machine: cores, memory, shared memory and the ports of the configuration.

Called by `examine`. Reads /proc and binds a port for a moment; leaves nothing behind.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

from cluster.doctor.finding import Finding, Verdict

__all__ = ["check_memory", "check_port", "check_ptrace", "check_shared_memory"]

_GIB = 1 << 30
_MIN_MEMORY_BYTES = 4 * _GIB
_MIN_SHM_BYTES = 256 << 20


def check_memory(meminfo: Path = Path("/proc/meminfo")) -> Iterator[Finding]:
    """Cores of this process and memory that is free now."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield Finding(
        "cores", Verdict.OK if cores > 1 else Verdict.WARN, str(cores), "" if cores > 1 else "expect slow runs"
    )
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        yield Finding("memory", Verdict.WARN, f"{meminfo} cannot be read")
        return
    available = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), 0)
    text = f"{available / _GIB:.1f} GiB available"
    if available < _MIN_MEMORY_BYTES:
        yield Finding("memory", Verdict.WARN, text, "lower kv_cache_config.max_tokens or use fewer workers")
    else:
        yield Finding("memory", Verdict.OK, text)


def check_shared_memory(folder: Path = Path("/dev/shm")) -> Iterator[Finding]:
    """Whether Ray's object store finds room."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError as error:
        yield Finding(str(folder), Verdict.FAIL, str(error.strerror), "Ray needs shared memory; mount it")
        return
    text = f"{usage.free / _GIB:.1f} of {usage.total / _GIB:.1f} GiB free"
    if not os.access(folder, os.W_OK):
        yield Finding(str(folder), Verdict.FAIL, "not writable", "give this user access")
    elif usage.free < _MIN_SHM_BYTES:
        yield Finding(str(folder), Verdict.WARN, text, "free some, or start the container with a larger --shm-size")
    else:
        yield Finding(str(folder), Verdict.OK, text)


def check_ptrace(setting: Path = Path("/proc/sys/kernel/yama/ptrace_scope")) -> Iterator[Finding]:
    """Whether one process of this user may read another's memory by a kernel call (cma).

    Only private pools need it: mapping a shared one takes PTRACE_MODE_READ, which Yama leaves alone.
    """
    try:
        scope = int(setting.read_text())
    except (OSError, ValueError):
        yield Finding("cma", Verdict.OK, "the kernel sets no ptrace restriction")
        return
    if scope == 0 or os.geteuid() == 0:
        yield Finding("cma", Verdict.OK, f"allowed (ptrace_scope {scope})")
    else:
        yield Finding(
            "cma",
            Verdict.OK,
            f"refused (ptrace_scope {scope}): pools must be shared (shared_pools: true, the default)",
        )


def check_port(host: str, port: int) -> Iterator[Finding]:
    """Whether the server could listen there now."""
    subject = f"port {host}:{port}"
    try:
        family, kind, proto, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, proto) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(target)
    except OSError as error:
        yield Finding(subject, Verdict.WARN, error.strerror or str(error), "choose another with --set server.port=...")
    else:
        yield Finding(subject, Verdict.OK, "free")
