"""All ranks of a holding side, in a process of their own or in this one, driven by the receiving side's test."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any, Protocol, Self

from tests.integration.transceiver.layout_sides import Side
from tests.integration.transceiver.layout_values import Model, Request
from transceiver import CacheTransceiverConfig, GrantTicket, TransferStatus
from transceiver.parallel_layout import ParallelLayout

__all__ = ["HolderProcess", "Holders", "LocalHolders", "Offer", "Remote"]

#: (rank, request, transfer id)
Offer = tuple[int, Request, str]
_WAIT_S = 90.0  # also for a new interpreter on a busy machine


class Holders(Protocol):
    """The holding side, wherever it runs."""

    def start(self, model: Model, server: ParallelLayout, layer_major: bool, pages: int) -> None:
        """Make the ranks of a server; those before are closed."""
        ...

    def prepare(self, seed: int, offers: Sequence[Offer]) -> list[GrantTicket]:
        """A new round: fill the pools anew and write the requests' KV; the tickets of the grants to come."""
        ...

    def publish(self, offers: Sequence[Offer]) -> list[GrantTicket]:
        """Publish what was prepared, once an offer."""
        ...

    def go_on(self) -> None:
        """Publish what is left of grants that grow."""
        ...

    def parked(self) -> int:
        """Requests that wait for their publication."""
        ...

    def finish(self) -> tuple[set[TransferStatus], bool]:
        """How the publications ended, and whether no byte of the holders' pools was changed."""
        ...


class LocalHolders:
    """In this process; closed with `stack`."""

    def __init__(self, stack: ExitStack, config: dict[str, Any]) -> None:
        self._stack = stack.enter_context(ExitStack())
        self._config = CacheTransceiverConfig(**config)
        self._side: Side | None = None

    @property
    def side(self) -> Side:
        """The ranks. Only after `start`."""
        assert self._side is not None
        return self._side

    def start(self, model: Model, server: ParallelLayout, layer_major: bool, pages: int) -> None:
        self._stack.close()
        self._side = Side(self._stack, "ctx", model, server, self._config, layer_major=layer_major, pages=pages)

    def prepare(self, seed: int, offers: Sequence[Offer]) -> list[GrantTicket]:
        self.side.new_round(seed)
        for rank, request, _ in offers:
            self.side.hold(rank, request)
        self.side.note()
        return [self.side.ticket(rank, name) for rank, _, name in offers]

    def publish(self, offers: Sequence[Offer]) -> list[GrantTicket]:
        return [self.side.publish(*offer) for offer in offers]

    def go_on(self) -> None:
        self.side.go_on()

    def parked(self) -> int:
        return self.side.parked()

    def finish(self) -> tuple[set[TransferStatus], bool]:
        return set(self.side.settled()), self.side.untouched()


def _serve(pipe: Connection, make: Callable[[ExitStack, dict[str, Any]], Any], config: dict[str, Any]) -> None:
    """Body of the process: calls of methods until the pipe closes."""
    with ExitStack() as stack:
        served = make(stack, config)
        while True:
            try:
                command, arguments = pipe.recv()
            except EOFError:
                return
            try:
                pipe.send((True, getattr(served, command)(*arguments)))
            except Exception as error:
                pipe.send((False, repr(error)))


class Remote:
    """An object in a process of its own; a context manager that leaves no process behind."""

    def __init__(self, make: Callable[[ExitStack, dict[str, Any]], Any], config: dict[str, Any]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, make, config), daemon=True)
        self._process.start()
        theirs.close()

    def ask(self, command: str, *arguments: Any) -> Any:
        """Call a method there; an exception there fails the test here."""
        self._pipe.send((command, arguments))
        assert self._pipe.poll(_WAIT_S), "the other process does not answer"
        done, answer = self._pipe.recv()
        assert done, f"the other process failed: {answer}"
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        self._process.join(20)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


class HolderProcess(Remote):
    """Holders in a process of their own."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(LocalHolders, config)

    def start(self, model: Model, server: ParallelLayout, layer_major: bool, pages: int) -> None:
        self.ask("start", model, server, layer_major, pages)

    def prepare(self, seed: int, offers: Sequence[Offer]) -> list[GrantTicket]:
        tickets: list[GrantTicket] = self.ask("prepare", seed, offers)
        return tickets

    def publish(self, offers: Sequence[Offer]) -> list[GrantTicket]:
        tickets: list[GrantTicket] = self.ask("publish", offers)
        return tickets

    def go_on(self) -> None:
        self.ask("go_on")

    def parked(self) -> int:
        return int(self.ask("parked"))

    def finish(self) -> tuple[set[TransferStatus], bool]:
        answer: tuple[set[TransferStatus], bool] = self.ask("finish")
        return answer
