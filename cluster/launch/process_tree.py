"""Finding and killing every process below one, so that a node is clean when a job leaves it.

Used by the node agent, which adopts orphans and therefore sees daemons too. Reads /proc; touches only descendants.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["children_of", "descendants", "kill_descendants", "zombie_children"]


def _processes() -> Iterator[tuple[int, int, str]]:
    """(pid, parent's pid, state letter) of every process that could be read."""
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            state, parent, *_ = Path(f"/proc/{name}/stat").read_text().rsplit(")", 1)[1].split()
        except (OSError, ValueError, IndexError):
            continue  # ended while we looked
        yield int(name), int(parent), state


def zombie_children(pid: int) -> list[int]:
    """Children of `pid` that ended and were not collected yet."""
    return [one for one, parent, state in _processes() if parent == pid and state == "Z"]


def children_of(pid: int) -> list[int]:
    """Live children of `pid`."""
    return [one for one, parent, state in _processes() if parent == pid and state != "Z"]


def descendants(pid: int) -> list[int]:
    """Live processes below `pid`, parents before their children. Zombies do not count."""
    children: dict[int, list[int]] = {}
    for one, parent, state in _processes():
        if state != "Z":
            children.setdefault(parent, []).append(one)
    found: list[int] = []
    pending = [pid]
    while pending:
        below = children.get(pending.pop(), [])
        found += below
        pending += below
    return found


def kill_descendants(pid: int, timeout_s: float = 10.0) -> list[int]:
    """SIGKILL everything below `pid` until nothing is left; returns what would not die within `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    pause = threading.Event()
    while remaining := descendants(pid):
        if time.monotonic() > deadline:
            return remaining
        for one in remaining:
            try:
                os.kill(one, signal.SIGKILL)
            except ProcessLookupError:
                continue
        pause.wait(0.05)
    return []
