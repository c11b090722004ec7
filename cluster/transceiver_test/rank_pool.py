"""The coordinator's side of the rank processes: starts them, calls them with deadlines, kills them.

One pool a sweep. Ranks run on this host or, inside a Slurm job, on a named node through srun. A call past its deadline
dumps the rank's stacks into its log and raises; the pool is then good for nothing but `kill`.
"""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from typing import Any

from cluster.launch.errors import LaunchError, LinkError
from cluster.launch.node_link import NodeLink, accept_link

__all__ = ["RankCallError", "RankHungError", "RankPool", "RankSpec"]

_STACKS_S = 3.0

RankSpec = tuple[str, str | None]  # name of the rank, node of the Slurm job or None for this host


class RankCallError(LaunchError):
    """A command failed in its rank; `timed_out` when it waited in vain for a transfer's end."""

    def __init__(self, rank: str, command: str, message: str, timed_out: bool) -> None:
        super().__init__(f"{rank} {command}: {message}")
        self.timed_out = timed_out


class RankHungError(LaunchError):
    """A rank did not answer in time, or is gone: nothing is known of its memory."""


class RankPool:
    """Ranks by name."""

    def __init__(self, token: bytes, token_file: Path, logs: Path, *, bind: str, advertise: str, watchdog_s: float):
        self._token = token
        self._token_file = token_file
        self._logs = logs
        self._advertise = advertise
        self._watchdog_s = watchdog_s
        self._server = socket.create_server((bind, 0), backlog=64)
        self._links: dict[str, NodeLink] = {}
        self._pids: dict[str, int] = {}
        self._hosts: dict[str, str] = {}
        self._dead: dict[str, str] = {}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._calls: dict[int, tuple[str, Future[dict[str, Any]]]] = {}
        self._numbers = itertools.count(1)
        self._changed = threading.Condition()
        self._closing = False

    def start(self, ranks: Sequence[RankSpec], env: Mapping[str, str], unset: Sequence[str], timeout_s: float) -> None:
        """Start the ranks with `env`, without the variables `unset`, and wait for them. Raises RankHungError."""
        clean = {key: value for key, value in os.environ.items() if key not in set(unset)}
        clean |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **env}
        threading.Thread(target=self._accept, name="ranks", daemon=True).start()
        port = self._server.getsockname()[1]
        for name, node in ranks:
            argv = [sys.executable, "-m", "cluster.transceiver_test.rank_process", "--name", name]
            argv += ["--coordinator", f"{self._advertise}:{port}", "--token-file", str(self._token_file)]
            argv += ["--watchdog-s", str(self._watchdog_s)]
            if node is not None:
                srun = ["srun", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={node}", "--input=none"]
                argv = [*srun, *argv]
            with (self._logs / f"{name}.log").open("ab") as log:
                self._processes[name] = subprocess.Popen(
                    argv, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=clean,
                    start_new_session=True,
                )  # fmt: skip
        deadline = time.monotonic() + timeout_s
        while missing := [name for name, _ in ranks if name not in self._links]:
            ended = [name for name in missing if self._processes[name].poll() is not None]
            if ended or time.monotonic() > deadline:
                why = "ended at once" if ended else f"did not report within {timeout_s:g} s"
                raise RankHungError(f"{', '.join(ended or missing)} {why}: see {self._logs}")
            with self._changed:
                self._changed.wait(0.2)

    def call(self, rank: str, command: str, deadline_s: float, /, **arguments: Any) -> Any:
        """Run a command in a rank. Raises RankCallError (it failed there) and RankHungError (no answer)."""
        return self.wait(self.begin(rank, command, **arguments), rank, command, deadline_s)

    def begin(self, rank: str, command: str, /, **arguments: Any) -> Future[dict[str, Any]]:
        """Send a command; `wait` takes its answer. Commands of one rank run one after the other."""
        number = next(self._numbers)
        future: Future[dict[str, Any]] = Future()
        with self._changed:
            if rank in self._dead or rank not in self._links:
                raise RankHungError(f"{rank} is gone: {self._dead.get(rank, 'never started')}")
            self._calls[number] = (rank, future)
        try:
            self._links[rank].send({"id": number, "command": command, "arguments": arguments})
        except LinkError as error:
            raise RankHungError(f"{rank} is gone: {error}") from error
        return future

    def wait(self, future: Future[dict[str, Any]], rank: str, command: str, timeout_s: float) -> Any:
        """The answer of a command begun before."""
        try:
            message = future.result(max(0.0, timeout_s))
        except FutureTimeoutError:
            stacks = self._dump_stacks(rank)
            raise RankHungError(f"{rank} {command}: no answer within {timeout_s:.1f} s ({stacks})") from None
        if "gone" in message:
            raise RankHungError(f"{rank} is gone during {command}: {message['gone']}")
        if "error" in message:
            raise RankCallError(rank, command, message["error"], bool(message["timed_out"]))
        return message["answer"]

    def host(self, rank: str) -> str:
        """Host name of a rank."""
        return self._hosts[rank]

    def quit(self, timeout_s: float = 10.0) -> None:
        """End the ranks in order; kill what does not end."""
        for name in list(self._links):
            if name not in self._dead:
                try:
                    self.call(name, "quit", timeout_s)
                except (RankCallError, RankHungError):
                    continue  # killed below
        for process in self._processes.values():
            try:
                process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                continue
        self.kill()

    def kill(self) -> None:
        """SIGKILL every rank, free nothing, close the links. Ranks on other nodes end with their link."""
        self._closing = True
        for link in self._links.values():
            link.close()
        self._server.close()
        for process in self._processes.values():
            if process.poll() is None:
                try:
                    os.killpg(process.pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
        for process in self._processes.values():
            process.wait(10)

    def _dump_stacks(self, rank: str) -> str:
        """Get the rank's stacks into its log, wherever it runs; says in words whether they are there."""
        log = self._logs / f"{rank}.log"
        try:
            message = self.begin(rank, "stacks").result(_STACKS_S)
        except (FutureTimeoutError, RankHungError):  # no thread of it answers
            return self._signal_stacks(rank, log)
        if "answer" not in message:
            return f"no stacks: {message.get('gone', 'it refused')}"
        try:
            with log.open("ab") as file:
                file.write(f"\n{rank} does not answer; its stacks:\n{message['answer']}\n".encode())
        except OSError as error:
            return f"no stacks: {log} cannot be written: {error}"
        return "stacks in its log"

    def _signal_stacks(self, rank: str, log: Path) -> str:
        """Have a rank of this host write its stacks by a signal, which needs none of its threads."""
        process = self._processes[rank]
        if self._pids.get(rank) != process.pid or process.poll() is not None:
            return "no stacks: none of its threads answers"
        before = log.stat().st_size
        os.kill(process.pid, signal.SIGUSR1)  # faulthandler writes every thread's stack
        deadline = time.monotonic() + _STACKS_S
        while log.stat().st_size == before:
            if time.monotonic() > deadline:
                return "no stacks: it does not react to a signal"
            threading.Event().wait(0.05)
        threading.Event().wait(0.3)  # the rest of the text
        return "stacks in its log"

    def _accept(self) -> None:
        while not self._closing:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return  # closed by `kill`
            threading.Thread(target=self._serve, args=(connection,), name="rank", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            link = accept_link(connection, self._token)
            hello = link.receive(10.0) or {}
        except LinkError as error:
            print(f"transceiver test: refused a connection: {error}", file=sys.stderr, flush=True)
            return
        name = str(hello.get("name"))
        with self._changed:
            self._links[name] = link
            self._pids[name] = int(hello.get("pid", 0))
            self._hosts[name] = str(hello.get("host", ""))
            self._changed.notify_all()
        while not self._closing:
            try:
                message = link.receive(1.0)
            except LinkError as error:
                self._bury(name, str(error))
                return
            if message is not None:
                with self._changed:
                    _, future = self._calls.pop(int(message["id"]))
                future.set_result(message)

    def _bury(self, name: str, why: str) -> None:
        with self._changed:
            self._dead[name] = why
            waiting = [(number, future) for number, (rank, future) in self._calls.items() if rank == name]
            for number, _ in waiting:
                del self._calls[number]
        for _, future in waiting:
            future.set_result({"gone": why})
