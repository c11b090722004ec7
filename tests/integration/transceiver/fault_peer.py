"""Handle of a `fault_side` process in the process that drives the matrix, and the fork server that they come from."""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import time
from multiprocessing import forkserver
from typing import Any

from tests.integration.transceiver import real_faults
from tests.integration.transceiver.fault_side import NEVER, WAIT_S, serve

__all__ = ["NEVER", "FaultPeer", "start_fork_server", "stop_fork_server"]


def start_fork_server() -> None:
    """Before the first `FaultPeer`."""
    multiprocessing.set_forkserver_preload(["tests.integration.transceiver.fault_peer_imports"])
    forkserver.ensure_running()


def stop_fork_server() -> None:
    """Leave no process behind."""
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    server._stop()


class FaultPeer:
    """Handle of a process. `close` leaves nothing behind."""

    def __init__(
        self, name: str, config: dict[str, Any], *, namespace: str = "", host: str = "127.0.0.1"
    ) -> None:  # fmt: skip
        self.options = {"name": name, "config": config, "namespace": namespace, "host": host}
        context = multiprocessing.get_context("forkserver")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, self.options), daemon=True)
        self._process.start()
        theirs.close()
        self.pid, self.worker_id = self._answer(3 * WAIT_S)
        self._pidfd = os.pidfd_open(self.pid)

    def _answer(self, wait_s: float) -> Any:
        assert self._pipe.poll(wait_s), f"{self.options['name']} does not answer"
        try:
            error, answer = self._pipe.recv()
        except (EOFError, OSError) as broken:
            raise AssertionError(f"{self.options['name']} is gone") from broken
        assert not error, f"{self.options['name']}: {error}"
        return answer

    def ask(self, command: str, *arguments: Any, wait_s: float = 2 * WAIT_S) -> Any:
        """Run a command there. Raises AssertionError with what went wrong there."""
        self.tell(command, *arguments)
        return self._answer(wait_s)

    def tell(self, command: str, *arguments: Any) -> None:
        """Send a command without waiting; `catch_up` must follow before the next `ask`."""
        try:
            self._pipe.send((command, arguments))
        except OSError as error:
            raise AssertionError(f"{self.options['name']} is gone before {command}") from error

    def catch_up(self) -> Any:
        """The answer to a `tell`."""
        return self._answer(WAIT_S)

    def wait_dead(self, wait_s: float) -> float:
        """Wait until the process has ended; returns when (`time.monotonic`). Raises AssertionError."""
        poller = select.poll()
        poller.register(self._pidfd, select.POLLIN)
        assert poller.poll(wait_s * 1000), f"{NEVER}: {self.options['name']} lives"
        return time.monotonic()

    def wait_stopped(self, wait_s: float) -> None:
        """Wait until every thread stands still."""
        real_faults.wait_until(lambda: real_faults.has_stopped(self.pid), NEVER, wait_s)

    def wake(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    @property
    def alive(self) -> bool:
        return not real_faults.is_gone(self.pid)

    def close(self) -> None:
        """Kill it and wait until it is gone. Idempotent."""
        if self._pidfd >= 0:
            self._process.kill()
            self.wait_dead(WAIT_S)
            os.close(self._pidfd)
            self._pidfd = -1
            self._pipe.close()
            self._process.join(WAIT_S)
            self._process.close()
