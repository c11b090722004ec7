"""A transceiver in a process of its own, driven over a pipe by a test.

The process is spawned, serves one command at a time from a thread that is not the main one (as in a Ray actor), and
ends when the pipe closes.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.unit.transceiver.rig import SCOPE, SECRET, make_layout, make_storage, table
from transceiver import CacheTransceiver, CacheTransceiverConfig, Publication, Pull, RankShare

WAIT_S = 30.0
START_S = 90.0  # a new interpreter with its libraries, on a machine that may be busy with many


def serve(pipe: Connection, options: dict[str, Any]) -> None:
    """Body of the process."""
    thread = threading.Thread(target=_serve, args=(pipe, options), name="commands")
    thread.start()
    thread.join()


def _serve(pipe: Connection, options: dict[str, Any]) -> None:
    if options["uid"] is not None:
        import encodings.idna  # noqa: F401

        import ucxx._lib.libucxx  # noqa: F401 (both before the files may be out of reach)

        os.setresuid(*[options["uid"]] * 3)
    config = CacheTransceiverConfig(**options["config"])
    storage = make_storage(
        make_layout(**options["layout"]), (options["pages"],), fill=options["fill"], shared=config.wants_shared_pools
    )
    transceiver = CacheTransceiver(
        worker_id=options["name"], storage=storage, config=config, secret=options["secret"], shares=options["shares"]
    )
    transceiver.start()
    pipe.send((os.getpid(), transceiver.address))
    publications: dict[str, Publication] = {}
    pulls: dict[str, Pull] = {}
    while True:
        try:
            command, arguments = pipe.recv()
        except EOFError:
            break
        answer: Any = None
        match command:
            case "publish":
                name, pages, lease_s = arguments
                publications[name] = transceiver.publish(
                    name, (table(pages),), conversation_id="c", scope=SCOPE, lease_s=lease_s
                )
                answer = publications[name].ticket
            case "published":
                answer = publications[arguments].future.result(WAIT_S)
            case "cancel_publication":
                answer = publications[arguments].cancel()
            case "pull":
                ticket, pages, timeout_s = arguments
                pulls[ticket.transfer_id] = transceiver.pull(
                    ticket, (table(pages),), conversation_id="c", scope=SCOPE, timeout_s=timeout_s
                )
            case "pulled":
                answer = pulls[arguments].future.result(WAIT_S)
            case "pages":
                answer = [bytes(storage.page(page)) for page in arguments]
            case "links":
                answer = (transceiver.links(), [link.detail for link in transceiver.stats().links.values()])
            case "stats":
                answer = transceiver.stats()
            case "close":
                transceiver.close()
                storage.close()
                answer = sorted(t.name for t in threading.enumerate())
        pipe.send(answer)
        if command == "close":
            break


class PeerProcess:
    """Starts the process, sends commands. A context manager: leaves no process behind."""

    def __init__(
        self, name: str, *, secret: bytes = SECRET, fill: int | None = 1, pages: int = 64,
        layout: dict[str, Any] | None = None,
        shares: tuple[RankShare, ...] | None = None, uid: int | None = None, **config: Any,
    ) -> None:  # fmt: skip
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        options = {
            "name": name, "secret": secret, "fill": fill, "pages": pages, "layout": layout or {}, "config": config,
            "shares": shares, "uid": uid,
        }  # fmt: skip
        self._process = context.Process(target=serve, args=(theirs, options), daemon=True)
        self._process.start()
        theirs.close()
        self.pid, self.address = self._receive(START_S)

    def _receive(self, wait_s: float = WAIT_S) -> Any:
        assert self._pipe.poll(wait_s), "the peer process does not answer"
        return self._pipe.recv()

    def ask(self, command: str, arguments: Any = None) -> Any:
        """Run a command there and return its answer."""
        self.tell(command, arguments)
        return self._receive()

    def tell(self, command: str, arguments: Any = None) -> None:
        """Send a command whose answer nobody waits for."""
        self._pipe.send((command, arguments))

    def freeze(self) -> None:
        """SIGSTOP, and wait until every thread stands still."""
        os.kill(self.pid, signal.SIGSTOP)
        deadline = time.monotonic() + WAIT_S
        while not all(
            stat.read_text().rpartition(")")[2].split()[0] == "T"
            for stat in Path(f"/proc/{self.pid}/task").glob("*/stat")
        ):
            assert time.monotonic() < deadline, "the process does not stop"
            time.sleep(0.002)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self._process.kill()
        self._process.join(WAIT_S)

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        self._process.join(10)
        if self._process.is_alive():
            self.kill()
