"""All ranks of a holding server in a process of their own, for transfers between unlike layouts over a real fabric."""

from __future__ import annotations

import multiprocessing
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any

from tests.unit.transceiver.servers import Model, Server
from transceiver import CacheTransceiverConfig, GrantTicket
from transceiver.parallel_layout import ParallelLayout

_WAIT_S = 60.0


def serve(pipe: Connection, config: dict[str, Any]) -> None:
    """Body of the process: one server after the other, until the pipe closes."""
    with ExitStack() as stack:
        server: Server | None = None
        while True:
            try:
                command, arguments = pipe.recv()
            except EOFError:
                return
            answer: Any = None
            if command == "start":
                stack.close()  # the one before
                model, layout, layer_major = arguments
                server = Server(
                    stack, "ctx", Model(**model), layout, filled=True,
                    config=CacheTransceiverConfig(**config), layer_major=layer_major,
                )  # fmt: skip
            elif server is not None and command == "publish":
                answer = server.publish(*arguments)
            elif server is not None and command == "released":
                answer = server.all_released()
            pipe.send(answer)


class ServerProcess:
    """Starts the process and sends commands. A context manager: leaves no process behind."""

    def __init__(self, config: dict[str, Any]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, config), daemon=True)
        self._process.start()
        theirs.close()

    def _ask(self, command: str, *arguments: Any) -> Any:
        self._pipe.send((command, arguments))
        assert self._pipe.poll(_WAIT_S), "the server process does not answer"
        return self._pipe.recv()

    def start(self, model: dict[str, Any], layout: ParallelLayout, layer_major: bool) -> None:
        """Make a server of this model (keywords of `Model`); the one before is closed."""
        self._ask("start", model, layout, layer_major)

    def publish(self, rank: int, name: str) -> GrantTicket:
        """Three blocks of a rank."""
        ticket: GrantTicket = self._ask("publish", rank, name)
        return ticket

    def all_released(self) -> bool:
        """True when every publication was acknowledged."""
        return bool(self._ask("released"))

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        self._process.join(20)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
