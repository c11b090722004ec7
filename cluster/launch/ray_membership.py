"""Which addresses are live members of the Ray cluster, kept current by a `ray_watch` child process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

__all__ = ["RayMembership"]


class RayMembership:
    """Follows one Ray cluster from `start` to `close`. `alive` may be read from any thread."""

    def __init__(self, address: str, log: Path, env: Mapping[str, str]) -> None:
        self._argv = [sys.executable, "-m", "cluster.launch.ray_watch", address]
        self._log = log
        self._env = {**os.environ, **env}
        self._process: subprocess.Popen[str] | None = None
        self._changed = threading.Condition()
        self._alive: frozenset[str] = frozenset()
        self._waiting = "ray_watch has not answered yet"

    @property
    def alive(self) -> frozenset[str]:
        """Addresses of the live members."""
        return self._alive

    @property
    def waiting(self) -> str:
        """Why the head does not answer ("" when it does)."""
        return self._waiting

    def start(self) -> None:
        """Start watching."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=self._env,
                start_new_session=True,
            )
        threading.Thread(target=self._read, args=(self._process,), name="ray-membership", daemon=True).start()

    def wait_for(self, condition: Callable[[frozenset[str]], bool], timeout_s: float) -> bool:
        """Wait until `condition(alive)` holds."""
        with self._changed:
            return self._changed.wait_for(lambda: condition(self._alive), timeout_s)

    def close(self) -> None:
        """Stop watching. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait(10)
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                with self._log.open("a") as log:
                    log.write(line)
                message = json.loads(line)
                with self._changed:
                    if "alive" in message:
                        self._alive, self._waiting = frozenset(message["alive"]), ""
                    else:
                        self._waiting = str(message["waiting"])
                    self._changed.notify_all()
        except ValueError as error:  # the pipe was closed by `close`, or the line is no JSON
            with self._changed:
                self._waiting = f"ray_watch: {error}"
