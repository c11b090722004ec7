"""The holding side of the benchmark in a process of its own: publishes what the benchmark asks for."""

from __future__ import annotations

import contextlib
import multiprocessing
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cluster.bench.transfer.pools import PAGE_LAYOUTS, block_table, filled_storage
from transceiver import CacheTransceiver, CacheTransceiverConfig, GrantTicket
from transceiver.parallel_layout import RankShare

__all__ = ["HolderProcess"]

_WAIT_S = 60.0
_EXEC_S = 1.0
SECRET = b"benchmark secret of one run"


def _serve(
    pipe: Connection, layout: str, pages: int, settings: dict[str, Any], share: RankShare | None, host: str
) -> None:
    config = CacheTransceiverConfig(**settings)
    storage = filled_storage(PAGE_LAYOUTS[layout], pages, 7, shared=config.wants_shared_pools)
    transceiver = CacheTransceiver(
        worker_id="bench-holder", storage=storage, config=config, secret=SECRET,
        shares=(share,) if share else None, host=host,
    )  # fmt: skip
    with transceiver:
        pipe.send(None)
        while (command := pipe.recv()) is not None:
            publications = []
            for name, wanted in command:
                table = (block_table(wanted),)
                if settings.get("verify", True):
                    transceiver._ctx.digests.compute(  # as a worker does when it commits a block
                        (0, int(page), 1, int(valid)) for page, valid in zip(wanted, table[0].valid_tokens, strict=True)
                    )
                publications.append(transceiver.publish(name, table, conversation_id=None, scope=b"", lease_s=_WAIT_S))
            pipe.send([publication.ticket for publication in publications])
            pipe.send([publication.future.result(_WAIT_S).status.value for publication in publications])
    storage.close()


@contextlib.contextmanager
def _python_of(context: SpawnContext, namespace: str | None) -> Iterator[None]:
    """Processes that start meanwhile run in that network namespace."""
    if namespace is None:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="kvferry-bench-") as folder:
        wrapper = Path(folder) / "python"
        wrapper.write_text(f'#!/bin/sh\nexec ip netns exec {namespace} {shlex.quote(sys.executable)} "$@"\n')
        wrapper.chmod(0o700)
        context.set_executable(str(wrapper))
        try:
            yield
            time.sleep(_EXEC_S)  # the wrapper is read by the new process
        finally:
            context.set_executable(sys.executable)


class HolderProcess:
    """Starts and ends the process, in another network namespace if told; a context manager."""

    def __init__(
        self, layout: str, pages: int, settings: dict[str, Any], share: RankShare | None = None, *,
        namespace: str | None = None, host: str = "127.0.0.1",
    ) -> None:  # fmt: skip
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, layout, pages, settings, share, host), daemon=True)
        with _python_of(context, namespace):
            self.process.start()
        theirs.close()
        self._receive()

    def _receive(self) -> Any:
        if not self._pipe.poll(_WAIT_S):
            raise TimeoutError("the benchmark's holder process does not answer")
        return self._pipe.recv()

    def offer(self, offers: Sequence[tuple[str, NDArray[np.int32]]]) -> list[GrantTicket]:
        """Publish pages there, under these names."""
        self._pipe.send(offers)
        tickets: list[GrantTicket] = self._receive()
        return tickets

    def outcomes(self) -> list[str]:
        """How the last offers ended; blocks until they have."""
        statuses: list[str] = self._receive()
        return statuses

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
