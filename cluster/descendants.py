"""Makes this process answer for every process that comes of it, so that none outlives it (Linux).

Ray starts daemons that start others; one that loses its parent during start-up would run on for a while. A child
subreaper inherits such orphans instead of init, and can end them. Only a command's own process may do this.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from pathlib import Path

__all__ = ["adopt_orphans", "descendants", "end_descendants"]

_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """From now on orphaned descendants become children of this process. Without effect where the kernel has no such."""
    if hasattr(signal, "SIGCHLD") and os.uname().sysname == "Linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants() -> list[int]:
    """Process ids of all living descendants."""
    parents: dict[int, int] = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            after_name = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
            if after_name[0] != "Z":
                parents[int(entry)] = int(after_name[1])
    found: list[int] = []
    frontier = {os.getpid()}
    while frontier:
        frontier = {pid for pid, parent in parents.items() if parent in frontier}
        found.extend(frontier)
    return found


def end_descendants(grace_s: float = 0.0, timeout_s: float = 10.0) -> None:
    """Kill every descendant that is still there after `grace_s`, and reap the children. Blocks until they are gone."""
    deadline = time.monotonic() + grace_s
    while descendants() and time.monotonic() < deadline:
        _reap()
        time.sleep(0.05)
    deadline = time.monotonic() + timeout_s
    while (alive := descendants()) and time.monotonic() < deadline:
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _reap()
        time.sleep(0.02)
    _reap()


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            continue
