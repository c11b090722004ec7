"""The process of one rank of a transceiver test: obeys the coordinator's commands, one at a time.

`python -m cluster.transceiver_test.rank_process`. A sweep's processes are started anew because transport variables
count only at a process's start. It ends at once, freeing nothing, when the coordinator is gone or a command runs past
its watchdog: memory that a transport may still touch must not be reused.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import queue
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cluster.launch.errors import LinkError
from cluster.launch.node_link import NodeLink, open_link
from cluster.transceiver_test.rank_end import (
    RankEnd,
    outcome_to_dict,
    shares_from_lists,
    ticket_from_dict,
    ticket_to_dict,
)
from cluster.transceiver_test.raw_fabric import RawFabric
from cluster.transceiver_test.turn_end import TurnEnd
from kvcache.config import ReusePolicy
from kvcache.layout import KvLayout
from transceiver import CacheTransceiverConfig

__all__ = ["RankProcess", "main"]


class RankProcess:
    """Ends by name, and the commands on them."""

    def __init__(self, name: str, secret: bytes, host: str) -> None:
        self._name = name
        self._secret = secret
        self._host = host
        self._ends: dict[str, RankEnd] = {}
        self._turns: dict[str, TurnEnd] = {}
        self._raw = RawFabric(host)

    def obey(self, command: str, arguments: dict[str, Any]) -> Any:
        """Run one command; what it returns or raises goes back to the coordinator."""
        return getattr(self, f"_do_{command}")(**arguments)

    def _do_open(
        self,
        end: str,
        layout: dict[str, Any],
        shares: list[list[int]] | None,
        first_heads: list[int],
        pages: list[int],
        config: dict[str, Any],
    ) -> str:
        self._ends[end] = RankEnd(
            f"{self._name}.{end}",
            KvLayout.from_dict(layout),
            shares_from_lists(shares),
            tuple(first_heads),
            pages,
            CacheTransceiverConfig.model_validate(config),
            self._secret,
            self._host,
        )
        return self._ends[end].transceiver.address

    def _do_close(self, end: str) -> None:
        self._ends.pop(end).close()

    def _do_fill(self, end: str, request: int, wanted: list[list[tuple[int, int]]]) -> None:
        self._ends[end].fill(request, wanted)

    def _do_erase(self, end: str) -> None:
        self._ends[end].erase()

    def _do_publish(
        self, end: str, transfer: str, wanted: list[list[tuple[int, int]]], lease_s: float
    ) -> dict[str, Any]:
        return ticket_to_dict(self._ends[end].publish(transfer, wanted, lease_s))

    def _do_published(self, end: str, timeout_s: float) -> dict[str, Any]:
        return outcome_to_dict(self._ends[end].published(timeout_s))

    def _do_pull(
        self, end: str, tickets: list[dict[str, Any]], wanted: list[list[tuple[int, int]]], timeout_s: float
    ) -> dict[str, Any]:
        found = [ticket_from_dict(ticket) for ticket in tickets]
        outcomes, seconds = self._ends[end].pull(found, wanted, timeout_s)
        return {"outcomes": [outcome_to_dict(outcome) for outcome in outcomes], "seconds": seconds}

    def _do_cancel_at_once(
        self, end: str, ticket: dict[str, Any], wanted: list[list[tuple[int, int]]], timeout_s: float
    ) -> str:
        return self._ends[end].cancel_at_once(ticket_from_dict(ticket), wanted, timeout_s)

    def _do_verify(self, end: str, request: int, wanted: list[list[tuple[int, int]]]) -> list[str]:
        return self._ends[end].verify(request, wanted)

    def _do_damage(self, end: str, wanted: list[list[tuple[int, int]]]) -> None:
        self._ends[end].damage(wanted)

    def _do_hang(self) -> None:
        threading.Event().wait()  # --force-hang: what the layers against hangs are for

    def _do_turn_open(
        self, end: str, layout: dict[str, Any], pages: int, policy: str, max_num_turns: int, config: dict[str, Any]
    ) -> str:
        self._turns[end] = TurnEnd(
            f"{self._name}.{end}",
            KvLayout.from_dict(layout),
            pages,
            ReusePolicy(policy),
            max_num_turns,
            CacheTransceiverConfig.model_validate(config),
            self._secret,
            self._host,
        )
        return self._turns[end].transceiver.address

    def _do_turn_close(self, end: str) -> None:
        self._turns.pop(end).close()

    def _do_turn_begin(self, end: str, request: str, tokens: list[int]) -> int:
        return self._turns[end].begin(request, tokens)

    def _do_turn_compute(self, end: str, upto: int, end_of_prompt: bool) -> None:
        self._turns[end].compute(upto, end_of_prompt)

    def _do_turn_extend(self, end: str, tokens: list[int]) -> None:
        self._turns[end].extend(tokens)

    def _do_turn_publish(self, end: str, transfer: str, start: int, upto: int, lease_s: float) -> dict[str, Any]:
        return ticket_to_dict(self._turns[end].publish(transfer, start, upto, lease_s))

    def _do_turn_published(self, end: str, timeout_s: float) -> str:
        return self._turns[end].published(timeout_s)

    def _do_turn_pull(
        self, end: str, ticket: dict[str, Any], start: int, upto: int, timeout_s: float, end_of_prompt: bool
    ) -> dict[str, Any]:
        return self._turns[end].pull(ticket_from_dict(ticket), start, upto, timeout_s, end_of_prompt)

    def _do_turn_damage(self, end: str) -> None:
        self._turns[end].damage()

    def _do_turn_end(self, end: str) -> list[int]:
        return self._turns[end].end()

    def _do_raw_listen(self, nbytes: int) -> tuple[str, int]:
        return self._host, self._raw.listen(nbytes)

    def _do_raw_receive(self, host: str, port: int, nbytes: int, count: int) -> list[float]:
        return self._raw.receive(host, port, nbytes, count)


def main(argv: Sequence[str] | None = None) -> int:
    """Connect to the coordinator and obey until it hangs up."""
    parser = argparse.ArgumentParser(prog="kvferry transceiver-test rank")
    parser.add_argument("--name", required=True)
    parser.add_argument("--coordinator", required=True)
    parser.add_argument("--token-file", required=True)
    parser.add_argument("--watchdog-s", type=float, required=True)
    options = parser.parse_args(argv)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    token = bytes.fromhex(Path(options.token_file).read_text().strip())
    host, _, port = options.coordinator.rpartition(":")
    link = open_link(host, int(port), token, 30.0)
    link.send({"event": "hello", "name": options.name, "pid": os.getpid(), "host": socket.gethostname()})
    rank = RankProcess(options.name, token, _address_towards(host, int(port)))
    orders: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(link, orders), name="coordinator", daemon=True).start()
    while True:
        order = orders.get()
        if order["command"] == "quit":
            link.send({"id": order["id"], "answer": None})
            return 0
        faulthandler.dump_traceback_later(options.watchdog_s, exit=True)
        link.send({"id": order["id"], **_answer(rank, order)})
        faulthandler.cancel_dump_traceback_later()


def _answer(rank: RankProcess, order: dict[str, Any]) -> dict[str, Any]:
    began = time.perf_counter()
    try:
        return {"answer": rank.obey(order["command"], order["arguments"])}
    except Exception as error:  # whatever it is, it is this cell's result: the coordinator must hear of it
        after = time.perf_counter() - began
        print(f"{order['command']} failed after {after:.1f} s: {type(error).__name__}: {error}", flush=True)
        return {"error": f"{type(error).__name__}: {error}", "timed_out": isinstance(error, TimeoutError)}


def _read(link: NodeLink, orders: queue.SimpleQueue[dict[str, Any]]) -> None:
    try:
        while True:
            message = link.receive(5.0)
            if message is None or "command" not in message:
                continue
            if message["command"] == "stacks":  # answered here: it is the main thread that does not answer
                link.send({"id": message["id"], "answer": _stacks()})
            else:
                orders.put(message)
    except LinkError as error:
        print(f"coordinator gone: {error}", file=sys.stderr, flush=True)
        os._exit(3)  # nothing is freed: a transport may still write


def _stacks() -> str:
    """The stacks of every thread, as text of at most 200,000 characters."""
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read(200_000).decode(errors="replace")


def _address_towards(host: str, port: int) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


if __name__ == "__main__":
    sys.exit(main())
