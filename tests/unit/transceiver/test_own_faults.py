"""Trouble in our own code, in whatever the loop does for one pull or one link: that one ends, the others go on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.unit.transceiver.rig import Pair, eventually, pair
from transceiver import TransferStatus
from transceiver.inproc_link import InprocLink
from transceiver.peers import PeerTable
from transceiver.pull_data import PullData
from transceiver.receiver import Pull
from transceiver.testing import Fault, FaultKind

DONE, FAILED = TransferStatus.DONE, TransferStatus.FAILED
OURS = "a fault of our own"


def broken_once(original: Callable[..., Any], *, calls: int = 1) -> Callable[..., Any]:
    """The first `calls` calls fail."""
    left = iter(range(calls))

    def call(*args: Any, **rest: Any) -> Any:
        if next(left, None) is not None:
            raise RuntimeError(OURS)
        return original(*args, **rest)

    return call


def serves(p: Pair) -> None:
    """The loop is alive, and nothing is left open."""
    assert p.pull(p.publish("after")).future.result(5).status is DONE
    assert eventually(lambda: p.receiver.stats().open_pulls == p.receiver.stats().quarantined_pulls == 0)


def ends_by_our_fault(pull: Any) -> None:
    """Well before its deadline (5 s)."""
    outcome = pull.future.result(2)
    assert (outcome.status, OURS in outcome.reason) == (FAILED, True)
    pull.settled.result(2)


def test_a_pull_that_cannot_go_on_over_a_new_link_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with pair() as p:
        assert p.pull(p.publish("warm")).future.result(5).status is DONE
        p.receiver_faults.add(Fault(FaultKind.DROP, "PullRequest", count=2))
        first, second = p.pull(p.publish("a"), (1, 2, 3)), p.pull(p.publish("b"), (7, 8, 9))
        assert eventually(lambda: p.receiver_faults.fired == 2)
        monkeypatch.setattr(PeerTable, "_attach", broken_once(PeerTable._attach))
        transport: Any = p.receiver._transport
        p.receiver._ctx.post(lambda: transport.cut(next(iter(transport._links))))
        ends_by_our_fault(first)
        assert second.future.result(5).status is DONE
        serves(p)


@pytest.mark.parametrize("calls", [1, 2])
def test_pulls_whose_link_cannot_be_made_anew_end(calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with pair() as p:
        transport: Any = p.receiver._transport
        real, ways = transport.connect, []

        def connect(address: str) -> Any:
            ways.append(address)
            if 1 < len(ways) <= 1 + calls:
                raise RuntimeError(OURS)
            return real(address)

        monkeypatch.setattr(transport, "connect", connect)
        monkeypatch.setattr(InprocLink, "on_peer_process", lambda *_, **__: len(ways) > 1)
        pull = p.pull(p.publish())
        if calls == 2:
            ends_by_our_fault(pull)
        else:  # the link itself failed, the pull's own try works
            assert pull.future.result(2).status is DONE
        serves(p)


@pytest.mark.parametrize(
    ("owner", "method"),
    [(Pull, "on_link"), (Pull, "on_grant"), (Pull, "on_digests"), (PullData, "_arrived"), (Pull, "_check_done")],
)
def test_a_pull_that_breaks_on_an_event_ends_alone(owner: type, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pair() as p:
        if method == "on_digests":
            p.holder._ctx.digests.find = lambda *_: None  # type: ignore[method-assign]
        if method != "on_link":
            assert p.pull(p.publish("warm")).future.result(5).status is DONE
        monkeypatch.setattr(owner, method, broken_once(getattr(owner, method)))
        ends_by_our_fault(p.pull(p.publish()))
        assert p.receiver.stats().lost_links == 0
        serves(p)


def test_every_pull_of_a_lost_link_ends_though_one_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    with pair() as p:
        p.receiver_faults.add(Fault(FaultKind.DROP, "get", count=2))
        first, second = p.pull(p.publish("a"), (1, 2, 3)), p.pull(p.publish("b"), (7, 8, 9))
        assert eventually(lambda: p.receiver_faults.fired == 2)
        monkeypatch.setattr(Pull, "on_lost", broken_once(Pull.on_lost))
        transport: Any = p.receiver._transport
        p.receiver._ctx.post(lambda: transport.cut(next(iter(transport._links))))
        outcomes = [pull.future.result(2) for pull in (first, second)]
        assert [outcome.status for outcome in outcomes] == [FAILED, FAILED]
        for pull in (first, second):
            pull.settled.result(2)
        serves(p)


def test_a_link_that_cannot_be_taken_in_costs_the_others_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with pair() as p:
        with monkeypatch.context() as patch:
            patch.setattr(p.holder._loop.peers, "_accept", broken_once(lambda link: None))
            outcome = p.pull(p.publish()).future.result(2)
            assert (outcome.status, "lost" in outcome.reason) == (FAILED, True)
        serves(p)


def test_a_link_that_cannot_be_closed_keeps_no_pull(monkeypatch: pytest.MonkeyPatch) -> None:
    with pair(connect_timeout_ms=100) as p:
        p.receiver_faults.add(Fault(FaultKind.DROP, "Hello"))
        with monkeypatch.context() as patch:
            patch.setattr(InprocLink, "close", broken_once(InprocLink.close))
            pull = p.pull(p.publish())
            outcome = pull.future.result(2)
            assert (outcome.status, "no handshake within" in outcome.reason) == (FAILED, True)
            pull.settled.result(2)
        serves(p)


def test_a_holder_that_breaks_on_a_loss_still_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    with pair() as p:
        assert p.pull(p.publish("warm")).future.result(5).status is DONE
        holder = p.holder._holder
        monkeypatch.setattr(holder, "on_lost", broken_once(holder.on_lost))
        transport: Any = p.receiver._transport
        p.receiver._ctx.post(lambda: transport.cut(next(iter(transport._links))))
        assert eventually(lambda: not p.holder.links())
        serves(p)


@pytest.mark.parametrize("cancelled", [False, True])
@pytest.mark.parametrize(
    "place", ["receiver.phase_seconds", "receiver.PullData.drop_waiting", "arrival_checks.ArrivalChecks.give_up"]
)
def test_an_outcome_that_cannot_be_written_up_still_resolves(
    place: str, cancelled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pair() as p:
        if cancelled:  # by the holder: the end comes as a message
            p.receiver_faults.add(Fault(FaultKind.DELAY, "get", seconds=0.3))
        publication = p.publish()
        with monkeypatch.context() as patch:
            patch.setattr(f"transceiver.{place}", broken_once(lambda *_: {}))
            pull = p.pull(publication)
            if cancelled:
                assert eventually(lambda: p.receiver_faults.fired == 1)
                publication.cancel()
            if cancelled or not place.endswith("give_up"):
                ends_by_our_fault(pull)
            else:  # nothing is given up
                assert pull.future.result(2).status is DONE
        serves(p)
