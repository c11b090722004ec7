"""The agent on each node of a job: starts and stops processes as the job's first node says, and cleans up after itself.

Started by srun, one a node (`slurm_task`), or locally by `NodePool.spawn_local`. It decides nothing. When the head is
gone, silent or says stop, and when a signal's grace has passed, it kills every process that descends from it.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import platform
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from cluster.launch.errors import LinkError
from cluster.launch.node_link import BEAT_S, SILENCE_S, NodeLink, open_link
from cluster.launch.process_tree import children_of, descendants, kill_descendants, zombie_children

__all__ = ["NodeAgent", "main"]

_PR_SET_CHILD_SUBREAPER = 36
_SILENCE_AFTER_SIGNAL_S = 6.0  # Slurm signals a job whose node died, and SIGKILL follows after KillWait
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


class NodeAgent:
    """Serves one head until told to stop or left alone."""

    def __init__(
        self,
        name: str,
        link: NodeLink,
        *,
        signal_grace_s: float = 60.0,
        on_head_lost: Callable[[str], object] | None = None,
    ) -> None:
        self._name = name
        self._link = link
        self._signal_grace_s = signal_grace_s
        self._on_head_lost = on_head_lost
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._lock = threading.Lock()
        self._last_signal: int | None = None
        self._end_by: float | None = None

    def on_signal(self, signum: int, _frame: FrameType | None) -> None:
        """Signal handler: the head is told from the loop; without its order the agent ends when the grace is over."""
        self._last_signal = signum
        if self._end_by is None:
            self._end_by = time.monotonic() + self._signal_grace_s

    def serve(self) -> int:
        """Handle orders until the end; returns an exit code. Blocks."""
        self._link.send({"event": "hello", "name": self._name, **_about_this_host()})
        last_heard = time.monotonic()
        try:
            while True:
                message = self._link.receive(BEAT_S)
                now = time.monotonic()
                if message is not None:
                    last_heard = now
                    if message.get("order") == "stop":
                        self._clean_up(float(message["grace_s"]))
                        self._link.send({"event": "stopped"})
                        return 0
                    self._obey(message)
                else:
                    self._link.send({"event": "beat"})
                    self._reap_adopted()
                if self._last_signal is not None:
                    signum, self._last_signal = self._last_signal, None
                    self._link.send({"event": "signal", "signal": signum})
                silence_s = SILENCE_S if self._end_by is None else _SILENCE_AFTER_SIGNAL_S
                if now - last_heard > silence_s:
                    raise LinkError(f"nothing heard for {silence_s:g} s")
                if self._end_by is not None and now > self._end_by:
                    raise LinkError("a signal's grace is over and the head gave no order")
        except LinkError as error:
            print(f"{self._name}: lost the job's first node ({error}); ending every process here", flush=True)
            self._clean_up(2.0)
            if self._on_head_lost is not None:
                self._on_head_lost(str(error))
            return 1
        finally:
            self._link.close()

    def _obey(self, message: dict[str, Any]) -> None:
        order = message.get("order")
        if order == "run":
            self._run(message)
        elif order == "signal":
            with self._lock:
                child = self._children.get(int(message["id"]))
            if child is not None and child.poll() is None:
                _signal_group(child.pid, int(message["signal"]))
        elif order == "kill":
            self._kill_tree(int(message["id"]))
        elif order != "beat":
            raise LinkError(f"unknown order {order!r}: do both nodes run the same version of kvferry?")

    def _run(self, order: dict[str, Any]) -> None:
        env = {key: value for key, value in os.environ.items() if key not in set(order["unset"])}
        env.update(order["env"])
        # as in an activated virtual environment: `python` and `kvferry` are those that run this agent
        env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", os.defpath)])
        number = int(order["id"])
        try:
            with Path(order["log"]).open("ab") as log, self._lock:
                child = _spawn(order["argv"], env, order["cwd"], log.fileno(), bool(order["shielded"]))
                self._children[number] = child
        except OSError as error:
            self._link.send({"event": "exited", "id": number, "code": 127, "why": f"cannot start: {error}"})
            return
        threading.Thread(target=self._report_exit, args=(number, child), name=f"wait-{number}", daemon=True).start()

    def _kill_tree(self, number: int) -> None:
        """Kill a process with all it started, and daemons that outlived what started them."""
        with self._lock:
            child = self._children.get(number)
            own = {one.pid for one in self._children.values()}
        if child is not None:
            tree = [child.pid, *descendants(child.pid)]
        else:  # it ended before: what it left behind was adopted
            adopted = [pid for pid in children_of(os.getpid()) if pid not in own]
            tree = [one for pid in adopted for one in (pid, *descendants(pid))]
        for pid in tree:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _report_exit(self, number: int, child: subprocess.Popen[bytes]) -> None:
        code = child.wait()
        _signal_group(child.pid, signal.SIGKILL)  # what it left in its own session
        with self._lock:
            self._children.pop(number, None)
        try:
            self._link.send({"event": "exited", "id": number, "code": code, "why": ""})
        except LinkError as error:
            print(f"{self._name}: process {number} ended with {code}, not reported: {error}", flush=True)

    def _reap_adopted(self) -> None:
        """Collect daemons that became ours and ended; what was started here is collected by its own thread."""
        with self._lock:
            own = {child.pid for child in self._children.values()}
            for pid in zombie_children(os.getpid()):
                if pid not in own:
                    os.waitpid(pid, os.WNOHANG)

    def _clean_up(self, grace_s: float) -> None:
        with self._lock:
            children = list(self._children.values())
        for child in children:
            _signal_group(child.pid, signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        for child in children:
            try:
                child.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                print(f"{self._name}: process {child.pid} did not end within {grace_s:g} s, killed", flush=True)
        kill_descendants(os.getpid())


def _spawn(argv: Sequence[str], env: dict[str, str], cwd: str, log: int, shielded: bool) -> subprocess.Popen[bytes]:
    """Start a session of its own. A shielded one inherits a mask that keeps Slurm's warning signals away.

    Slurm sends a job's SIGTERM to every process of the job at once; without the mask Ray's daemons and workers would
    be gone before the server could finish the requests that it holds.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS if shielded else ())
    try:
        return subprocess.Popen(
            list(argv),
            env=env,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _signal_group(pid: int, signum: int) -> None:
    try:
        os.killpg(pid, signum)
    except (ProcessLookupError, PermissionError):
        return  # already gone


def _about_this_host() -> dict[str, Any]:
    return {"host": socket.gethostname(), "pid": os.getpid(), "python": platform.python_version()}


def _adopt_orphans() -> None:
    """Make orphaned descendants (daemons) children of this process, so that none escapes the clean-up."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def main(argv: Sequence[str] | None = None, on_head_lost: Callable[[str], object] | None = None) -> int:
    """`python -m cluster.launch.node_agent --name N --head HOST:PORT --token-file F`.

    `on_head_lost` is told why, after the clean-up, when a head that was joined is gone without an order to stop.
    """
    parser = argparse.ArgumentParser(prog="kvferry node agent")
    parser.add_argument("--name", required=True)
    parser.add_argument("--head", required=True)
    parser.add_argument("--token-file", required=True)
    parser.add_argument("--join-timeout", type=float, default=120.0)
    parser.add_argument("--signal-grace", type=float, default=60.0)
    options = parser.parse_args(argv)
    _adopt_orphans()
    host, _, port = options.head.rpartition(":")
    token = bytes.fromhex(Path(options.token_file).read_text().strip())
    try:
        link = open_link(host, int(port), token, options.join_timeout)
    except LinkError as error:
        print(f"{options.name}: {error}", flush=True)
        return 1
    agent = NodeAgent(options.name, link, signal_grace_s=options.signal_grace, on_head_lost=on_head_lost)
    for signum in _SIGNALS:
        signal.signal(signum, agent.on_signal)
    return agent.serve()


if __name__ == "__main__":
    sys.exit(main())
