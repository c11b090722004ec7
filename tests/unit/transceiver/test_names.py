"""Names of hosts are looked up outside the loop: a name server that is silent stops nobody else, and no deadline."""

from __future__ import annotations

import dataclasses
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests.unit.transceiver.rig import SCOPE, Pair, eventually, pair, table
from transceiver import TransceiverBackend, TransferStatus
from transceiver.host_port import with_host

pytestmark = pytest.mark.ucx

DONE, FAILED, TIMED_OUT = TransferStatus.DONE, TransferStatus.FAILED, TransferStatus.TIMED_OUT


class NameServer:
    """Knows "node-1", denies "nobody", and says nothing of "silent" until `answer` is set."""

    def __init__(self) -> None:
        self.answer = threading.Event()
        self.asked: Counter[str] = Counter()
        self.threads: set[str] = set()
        self._real = socket.getaddrinfo

    def __call__(self, host: str, *args: Any, flags: int = 0, **rest: Any) -> Any:
        if flags & socket.AI_NUMERICHOST:
            return self._real(host, *args, flags=flags, **rest)
        self.asked[host] += 1
        self.threads.add(threading.current_thread().name)
        if host == "nobody":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        if host == "a..b":
            return self._real(host, *args, flags=flags, **rest)  # no name at all: nobody is asked
        if host.startswith("silent"):
            assert self.answer.wait(30)
        six = (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", 0, 0, 0))
        return [six, *self._real("127.0.0.1", *args, flags=socket.AI_NUMERICHOST, **rest)]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[NameServer]:
    server = NameServer()
    monkeypatch.setattr(socket, "getaddrinfo", server)
    yield server
    server.answer.set()
    assert eventually(lambda: not any(t.name == "kvferry-lookup" for t in threading.enumerate()))


def pull_by(host: str, p: Pair, publication: Any, pages: tuple[int, ...] = (4, 5, 6), timeout_s: float = 5) -> Any:
    ticket = dataclasses.replace(publication.ticket, address=with_host(publication.ticket.address, host))
    return p.receiver.pull(ticket, (table(pages),), conversation_id="c", scope=SCOPE, timeout_s=timeout_s)


def ucx(**config: Any) -> Any:
    return pair(backend=TransceiverBackend.UCX, **config)


def test_a_name_leads_to_its_holder_and_is_looked_up_for_each_connection_only(names: NameServer) -> None:
    with ucx() as p:
        for name in "ab":
            pull = pull_by("node-1", p, p.publish(name))
            assert pull.future.result(10).status is DONE
            pull.settled.result(5)
        assert p.same((3, 1, 2), (4, 5, 6))
        assert (names.asked, names.threads) == ({"node-1": 1}, {"kvferry-lookup"})
        assert list(p.receiver.stats().links) == [with_host(p.holder.address, "node-1")]


def test_a_silent_name_server_stops_no_other_transfer_and_no_deadline(names: NameServer) -> None:
    with ucx() as p:
        began = time.monotonic()
        stuck = pull_by("silent", p, p.publish("stuck"), (1, 2, 3), timeout_s=0.5)
        assert eventually(lambda: names.asked["silent"] == 1)
        for name in "abc":
            assert p.pull(p.publish(name)).future.result(10).status is DONE
        assert not names.answer.is_set()
        assert stuck.future.result(5).status is TIMED_OUT
        assert 0.5 <= time.monotonic() - began < 3
        stuck.settled.result(1)


def test_connecting_ends_in_its_time_and_a_late_answer_changes_nothing(names: NameServer) -> None:
    with ucx(connect_timeout_ms=200) as p:
        for _ in range(3):
            outcome = pull_by("silent", p, p.publish(f"t{_}"), timeout_s=20).future.result(5)
            assert (outcome.status, "no address found" in outcome.reason) == (FAILED, True)
        assert names.asked["silent"] == 1  # it is asked once, however often it is wanted
        names.answer.set()
        tries = iter(range(1, 100))  # on a busy machine a handshake may take longer than connect_timeout_ms

        def works() -> bool:
            pull = pull_by("silent", p, p.publish(f"now {next(tries)}"))
            done: bool = pull.future.result(10).status is DONE
            pull.settled.result(5)
            return done

        assert eventually(works, 20)
        assert p.receiver.stats().open_pulls == 0


def test_a_cancel_during_the_look_up_reaches_the_holder_when_the_name_is_known(names: NameServer) -> None:
    with ucx() as p:
        publication = p.publish("t", lease_s=60)
        pull = pull_by("silent", p, publication)
        assert eventually(lambda: names.asked["silent"] == 1)
        pull.cancel()
        assert pull.future.result(5).status is TransferStatus.CANCELLED
        pull.settled.result(1)
        assert not publication.future.done()
        names.answer.set()
        assert publication.future.result(10).status is TransferStatus.CANCELLED


def test_a_name_that_nobody_has_is_an_error_at_once(names: NameServer) -> None:
    with ucx() as p:
        for host in ("nobody", "a..b"):
            pull = pull_by(host, p, p.publish(host))
            outcome = pull.future.result(3)
            assert (outcome.status, f"the name '{host}' was not found" in outcome.reason) == (FAILED, True)
            pull.settled.result(1)
        assert p.pull(p.publish("next")).future.result(10).status is DONE


def test_names_that_are_being_looked_up_are_bounded(names: NameServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transceiver.name_lookups._MAX_LOOKUPS", 1)
    with ucx() as p:
        first = pull_by("silent-1", p, p.publish("a"))
        assert eventually(lambda: names.asked["silent-1"] == 1)
        outcome = pull_by("silent-2", p, p.publish("b"), (7, 8, 9)).future.result(3)
        assert (outcome.status, "'silent-2' was not looked up" in outcome.reason) == (FAILED, True)
        names.answer.set()
        assert first.future.result(10).status is DONE


def test_a_transceiver_closes_while_a_name_is_looked_up(names: NameServer) -> None:
    with ucx() as p:
        pull = pull_by("silent", p, p.publish())
        assert eventually(lambda: names.asked["silent"] == 1)
        p.receiver.close()
        assert pull.future.result(1).status is TransferStatus.CANCELLED
        pull.settled.result(1)
