"""What can happen to a process and to its network, done by the process itself or by its peer: signals and sockets."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transceiver.errors import LinkClosedError

__all__ = ["cut_connections", "fill_queue", "has_stopped", "is_gone", "send_signal", "set_link_up", "wait_until"]

_WAIT_S = 10.0
_GET_FLAGS, _SET_FLAGS, _IFF_UP = 0x8913, 0x8914, 1


def wait_until(condition: Callable[[], bool], what: str, seconds: float = _WAIT_S) -> None:
    """Poll, a thousand times a second. Raises AssertionError with `what` when the time is over."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.001)


def _states(pid: int) -> str:
    """One letter a thread, as in /proc; empty when the process is gone."""
    letters = []
    gone = (FileNotFoundError, ProcessLookupError)
    with contextlib.suppress(*gone):  # the process has just been waited for
        for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
            with contextlib.suppress(*gone):  # this thread has just ended
                letters.append(stat.read_text().rpartition(")")[2].split()[0])
    return "".join(letters)


def has_stopped(pid: int) -> bool:
    """True when every thread stands still after SIGSTOP."""
    return set(_states(pid)) == {"T"}


def is_gone(pid: int) -> bool:
    """True when no thread runs any more, whether the process was waited for or not."""
    return set(_states(pid)) <= {"Z", "X"}


def send_signal(pid: int, number: signal.Signals) -> None:
    """SIGKILL or SIGSTOP a process, this one too; returns when it has taken effect (here: when it was undone)."""
    if pid == os.getpid():
        signal.pthread_kill(threading.get_ident(), number)  # this thread, so that it does not run a step further
        return
    os.kill(pid, number)
    if number == signal.SIGKILL:
        wait_until(lambda: is_gone(pid), "the process does not die")
    elif number == signal.SIGSTOP:
        wait_until(lambda: has_stopped(pid), "the process does not stop")


def cut_connections() -> int:
    """Shut every TCP connection of this process, as something between the two hosts would; returns how many."""
    cut = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            kind = os.readlink(f"/proc/self/fd/{name}")
            if not kind.startswith("socket:"):
                continue
            connection = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # closed by now
            continue
        with connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                try:
                    connection.getpeername()
                    connection.shutdown(socket.SHUT_RDWR)
                    cut += 1
                except OSError:  # a listener, or over already
                    continue
    return cut


def set_link_up(interface: str, up: bool) -> None:
    """`ip link set INTERFACE up|down`, in one call. Needs root."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        answer = fcntl.ioctl(any_socket, _GET_FLAGS, struct.pack("16sh14x", interface.encode(), 0))
        flags: int = struct.unpack("16sh14x", answer)[1]
        flags = flags | _IFF_UP if up else flags & ~_IFF_UP
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sh14x", interface.encode(), flags))


def fill_queue(send: Callable[[Any, bytes], None], link: Any, payload: bytes) -> int:
    """Repeat a message to a peer that does not read until the link refuses it; returns how many went into it."""
    for count in range(2_000_000):
        try:
            send(link, payload)
        except LinkClosedError:
            return count
    raise AssertionError("the queue of a link is never full")
