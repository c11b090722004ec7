"""A process that an agent runs on a node, as seen from the job's first node."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

__all__ = ["RemoteProcess"]


class RemoteProcess:
    """Handle of a process started through `NodePool.run`. Thread-safe; `code` is set once."""

    def __init__(
        self, node: str, number: int, argv: tuple[str, ...], log: Path, send: Callable[[str, int], None]
    ) -> None:
        self.node = node
        self.number = number
        self.argv = argv
        self.log = log
        self._send = send
        self._ended = threading.Event()
        self._code: int | None = None
        self._why = ""

    @property
    def running(self) -> bool:
        """Whether no end was reported yet."""
        return not self._ended.is_set()

    @property
    def code(self) -> int | None:
        """Exit code, negative for a signal; None while it runs or when its node was lost."""
        return self._code

    @property
    def why(self) -> str:
        """Why there is no proper exit code ("" when there is one)."""
        return self._why

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end; True when it has ended (or its node was lost)."""
        return self._ended.wait(timeout_s)

    def signal(self, signum: int) -> None:
        """Send a signal to the process and its group. Does nothing after the end."""
        if self.running:
            self._send("signal", signum)

    def kill_tree(self) -> None:
        """Kill the process, all it started, and daemons of its that outlived it. Also allowed after its end."""
        self._send("kill", 0)

    def set_ended(self, code: int | None, why: str) -> None:
        """Called by the pool, once."""
        if not self._ended.is_set():
            self._code, self._why = code, why
            self._ended.set()

    def tail(self, lines: int = 15) -> str:
        """The last lines of its log."""
        try:
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
        except OSError as error:
            return f"(no log: {error})"
