"""The nodes of a job as its first node sees them: who joined, who was lost, and processes run on them.

Made by `JobRunner` (Slurm) and by the transceiver test (Slurm or local processes). Listens for agents that prove the
job's token. Decides nothing about what a loss means; it reports.
"""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from cluster.launch.errors import LinkError, NodeLostError
from cluster.launch.node_link import BEAT_S, SILENCE_S, NodeLink, accept_link
from cluster.launch.remote_process import RemoteProcess

__all__ = ["NodePool", "make_token_file"]


class NodePool:
    """Agents by node name. `start`, `wait_joined`, `run` ..., `stop`."""

    def __init__(self, names: Sequence[str], token: bytes, *, host: str = "127.0.0.1", port: int = 0) -> None:
        self.names = tuple(names)
        self._token = token
        self._bind = (host, port)
        self._server: socket.socket | None = None
        self._links: dict[str, NodeLink] = {}
        self._hosts: dict[str, str] = {}
        self._lost: dict[str, str] = {}
        self._stopped: set[str] = set()
        self._processes: dict[int, RemoteProcess] = {}
        self._numbers = itertools.count(1)
        self._changed = threading.Condition()
        self._closing = False
        self._local: list[subprocess.Popen[bytes]] = []
        self.signals: SimpleQueue[tuple[str, int]] = SimpleQueue()
        self.losses: SimpleQueue[NodeLostError] = SimpleQueue()

    @property
    def port(self) -> int:
        """Port that agents connect to (after `start`)."""
        if self._server is None:
            raise LinkError("the pool is not started")
        return int(self._server.getsockname()[1])

    def start(self) -> None:
        """Listen. Raises OSError when the port is taken."""
        server = socket.create_server(self._bind, backlog=128)
        server.settimeout(0.5)
        self._server = server
        threading.Thread(target=self._accept, args=(server,), name="node-pool", daemon=True).start()

    def spawn_local(self, name: str, token_file: Path, log: Path) -> None:
        """Start the agent of `name` as a child process of this one."""
        argv = [sys.executable, "-m", "cluster.launch.node_agent", "--name", name]
        argv += ["--head", f"127.0.0.1:{self.port}", "--token-file", str(token_file)]
        with log.open("ab") as out:
            self._local.append(
                subprocess.Popen(
                    argv, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
                )
            )

    def wait_joined(self, timeout_s: float) -> list[str]:
        """Wait until every node has joined; returns the names of those that have not."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._links) == len(self.names) or bool(self._lost), timeout_s)
            return [name for name in self.names if name not in self._links]

    def host(self, name: str) -> str:
        """Host name that a node told of itself."""
        return self._hosts.get(name, name)

    def lost(self, name: str) -> str | None:
        """Why a node was lost, or None."""
        return self._lost.get(name)

    def run(
        self,
        node: str,
        argv: Sequence[str],
        *,
        log: Path,
        env: Mapping[str, str] | None = None,
        unset: Iterable[str] = (),
        cwd: Path | None = None,
        shielded: bool = False,
    ) -> RemoteProcess:
        """Start a process on a node; its output goes to `log`. Raises NodeLostError.

        `shielded` keeps SIGTERM and other warning signals from it (see `NodeAgent`).
        """
        number = next(self._numbers)

        def send(order: str, signum: int) -> None:
            self._send(node, {"order": order, "id": number, "signal": int(signum)})

        process = RemoteProcess(node, number, tuple(argv), log, send)
        with self._changed:
            self._processes[number] = process
        order = {
            "order": "run",
            "id": number,
            "argv": list(argv),
            "env": dict(env or {}),
            "unset": sorted(unset),
            "log": str(log),
            "cwd": str(cwd if cwd is not None else Path.cwd()),
            "shielded": shielded,
        }
        if not self._send(node, order):
            raise NodeLostError(node, self._lost.get(node, "it never joined"))
        return process

    def stop(self, grace_s: float = 5.0) -> list[str]:
        """Tell every agent to end what it runs and itself; returns the nodes that did not confirm. Idempotent."""
        if self._closing:
            return []
        live = [name for name in self._links if name not in self._lost]
        for name in live:
            self._send(name, {"order": "stop", "grace_s": grace_s})
        deadline = time.monotonic() + grace_s + 15.0
        with self._changed:
            self._changed.wait_for(
                lambda: all(name in self._stopped or name in self._lost for name in live), deadline - time.monotonic()
            )
            silent = [name for name in live if name not in self._stopped]
            self._closing = True
        if self._server is not None:
            self._server.close()
        for link in self._links.values():
            link.close()
        for agent in self._local:
            try:
                agent.wait(10)
            except subprocess.TimeoutExpired:
                agent.kill()
                agent.wait(10)
        return silent

    def _send(self, node: str, message: dict[str, Any]) -> bool:
        link = self._links.get(node)
        if link is None or node in self._lost:
            return False
        try:
            link.send(message)
        except LinkError as error:
            self._lose(node, str(error))
            return False
        return True

    def _accept(self, server: socket.socket) -> None:
        while not self._closing:
            try:
                connection, peer = server.accept()
            except TimeoutError:
                continue
            except OSError:
                return  # closed by `stop`
            threading.Thread(target=self._welcome, args=(connection, peer), name="node-join", daemon=True).start()

    def _welcome(self, connection: socket.socket, peer: tuple[str, int]) -> None:
        try:
            link = accept_link(connection, self._token)
            hello = link.receive(10.0) or {}
        except LinkError as error:
            print(f"node pool: refused {peer[0]}: {error}", file=sys.stderr, flush=True)
            return
        name = str(hello.get("name"))
        with self._changed:
            if name not in self.names or name in self._links:
                print(f"node pool: refused {peer[0]}: {name!r} is unknown or here already", file=sys.stderr, flush=True)
                link.close()
                return
            self._links[name] = link
            self._hosts[name] = str(hello.get("host", name))
            self._changed.notify_all()
        self._listen(name, link)

    def _listen(self, name: str, link: NodeLink) -> None:
        heard = beat = time.monotonic()
        while not self._closing:
            try:
                message = link.receive(BEAT_S)
                now = time.monotonic()
                if now - beat > BEAT_S:
                    link.send({"order": "beat"})
                    beat = now
                if message is None and now - heard > SILENCE_S:
                    raise LinkError(f"nothing heard for {SILENCE_S:g} s")
            except LinkError as error:
                self._lose(name, str(error))
                return
            if message is not None:
                heard = now
                self._take(name, message)
                if message.get("event") == "stopped":
                    return

    def _take(self, name: str, message: dict[str, Any]) -> None:
        event = message.get("event")
        if event == "exited":
            with self._changed:
                process = self._processes.pop(int(message["id"]), None)
            if process is not None:
                process.set_ended(int(message["code"]), str(message.get("why", "")))
        elif event == "signal":
            self.signals.put((name, int(message["signal"])))
        elif event == "stopped":
            with self._changed:
                self._stopped.add(name)
                self._changed.notify_all()

    def _lose(self, name: str, why: str) -> None:
        with self._changed:
            if name in self._lost or name in self._stopped or self._closing:
                return
            self._lost[name] = why
            orphans = [process for process in self._processes.values() if process.node == name]
            self._changed.notify_all()
        for process in orphans:
            process.set_ended(None, f"{name} is lost: {why}")
        self.losses.put(NodeLostError(name, why))


def make_token_file(path: Path) -> bytes:
    """Write a fresh token that only this user can read; returns it."""
    token = os.urandom(32)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(token.hex())
    return token
