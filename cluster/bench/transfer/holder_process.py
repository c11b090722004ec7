"""The holding side of the benchmark in a process of its own: publishes what the benchmark asks for."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cluster.bench.transfer.pools import PAGE_LAYOUTS, block_table, filled_storage
from transceiver import CacheTransceiver, CacheTransceiverConfig, GrantTicket
from transceiver.parallel_layout import RankShare

__all__ = ["HolderProcess"]

_WAIT_S = 60.0
SECRET = b"benchmark secret of one run"


def _serve(pipe: Connection, layout: str, pages: int, settings: dict[str, Any], share: RankShare | None) -> None:
    storage = filled_storage(PAGE_LAYOUTS[layout], pages, 7)
    transceiver = CacheTransceiver(
        worker_id="bench-holder", storage=storage, config=CacheTransceiverConfig(**settings), secret=SECRET,
        shares=(share,) if share else None,
    )  # fmt: skip
    with transceiver:
        pipe.send(None)
        while (command := pipe.recv()) is not None:
            name, wanted = command
            table = (block_table(wanted),)
            if settings.get("verify", True):
                transceiver._ctx.digests.compute(  # as a worker does when it commits a block
                    (0, int(page), 1, int(valid)) for page, valid in zip(wanted, table[0].valid_tokens, strict=True)
                )
            publication = transceiver.publish(name, table, conversation_id=None, scope=b"", lease_s=_WAIT_S)
            pipe.send(publication.ticket)
            pipe.send(publication.future.result(_WAIT_S).status.value)
    storage.close()


class HolderProcess:
    """Starts and ends the process; a context manager."""

    def __init__(self, layout: str, pages: int, settings: dict[str, Any], share: RankShare | None = None) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, layout, pages, settings, share), daemon=True)
        self.process.start()
        theirs.close()
        self._receive()

    def _receive(self) -> Any:
        if not self._pipe.poll(_WAIT_S):
            raise TimeoutError("the benchmark's holder process does not answer")
        return self._pipe.recv()

    def offer(self, name: str, pages: NDArray[np.int32]) -> GrantTicket:
        """Publish pages there."""
        self._pipe.send((name, pages))
        ticket: GrantTicket = self._receive()
        return ticket

    def outcome(self) -> str:
        """How the last offer ended."""
        status: str = self._receive()
        return status

    def __enter__(self) -> HolderProcess:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.is_alive():
            self._pipe.send(None)
        self.process.join(10)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self._pipe.close()
