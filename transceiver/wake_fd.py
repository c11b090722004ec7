"""How another thread makes a waiting loop return: an eventfd in the loop's epoll. Used by the transports."""

from __future__ import annotations

import os
import threading

__all__ = ["WakeFd"]


class WakeFd:
    """`wake` from any thread, everything else in the loop's thread. After `close` a wake does nothing."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()

    def fileno(self) -> int:
        """The descriptor to wait for; -1 after `close`."""
        return self._fd

    def wake(self) -> None:
        """Make the descriptor readable. Never blocks."""
        with self._lock:
            if self._fd >= 0:
                os.eventfd_write(self._fd, 1)

    def drain(self) -> None:
        """It was readable: take the wakes."""
        os.eventfd_read(self._fd)

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
            self._fd = -1
