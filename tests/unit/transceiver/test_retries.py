"""A link that breaks before the holder answered; grants that name their receiver; and what the measures say of it."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from tests.unit.transceiver.rig import Pair, eventually, pair
from transceiver import TransferStatus
from transceiver.testing import Fault, FaultKind

DONE, FAILED = TransferStatus.DONE, TransferStatus.FAILED


def receiver_id(p: Pair) -> str:
    return p.receiver._ctx.worker_id


def cut_all(p: Pair) -> None:
    """Every link of the receiver breaks now."""
    transport: Any = p.receiver._transport
    for link in list(transport._links):
        p.receiver._ctx.post(lambda link=link: transport.cut(link))  # type: ignore[misc]
    assert eventually(lambda: not p.receiver.links())


@pytest.mark.parametrize("kind", [FaultKind.CUT, FaultKind.FULL])
def test_a_request_lost_with_its_link_is_asked_again(kind: FaultKind, tmp_path: Path) -> None:
    path = tmp_path / "transfers.csv"
    with pair(perf_csv=str(path)) as p:
        assert p.pull(p.publish("warm")).future.result(5).retries == 0
        p.receiver_faults.add(Fault(kind, "PullRequest"))
        publication = p.publish("t")
        pull = p.pull(publication)
        outcome = pull.future.result(5)
        pull.settled.result(5)
        assert (outcome.status, outcome.retries, outcome.blocks) == (DONE, 1, 3)
        assert publication.future.result(5).status is DONE
        assert p.same((3, 1, 2), (4, 5, 6))
        stats = p.receiver.stats()
        assert (stats.retries, stats.reconnects) == (1, 1)
        link = stats.links[p.holder.address]
        assert (link.retries, link.transfers, link.segments, link.bytes) == (1, 2, 4, 2 * 3 * 4096)
        assert link.mean_segment_bytes == 6144.0
        assert link.detail == "memory copy in one process"
        assert link.queue_s > 0 and link.prepare_s > 0 and link.transfer_s > 0 and link.bandwidth > 0
    rows = list(csv.DictReader(path.open()))
    assert [row["retries"] for row in rows] == ["0", "1"]


def test_it_is_asked_again_once_only() -> None:
    with pair() as p:
        assert p.pull(p.publish("warm")).future.result(5).status is DONE
        p.receiver_faults.add(Fault(FaultKind.CUT, "PullRequest", count=2))
        pull = p.pull(p.publish("t"))
        outcome = pull.future.result(5)
        assert (outcome.status, outcome.retries, "lost" in outcome.reason) == (FAILED, 1, True)
        pull.settled.result(5)
        assert p.pull(p.publish("next")).future.result(5).status is DONE


def test_nothing_is_asked_again_once_the_holder_has_answered() -> None:
    with pair() as p:
        assert p.pull(p.publish("warm")).future.result(5).status is DONE
        p.receiver_faults.add(Fault(FaultKind.CUT, "get"))
        outcome = p.pull(p.publish("t")).future.result(5)
        assert (outcome.status, outcome.retries) == (FAILED, 0)


def test_a_request_that_had_arrived_is_refused_the_second_time() -> None:
    with pair() as p:
        assert p.pull(p.publish("warm")).future.result(5).status is DONE
        p.holder_faults.add(Fault(FaultKind.CUT, "Grant"))
        publication = p.publish("t")
        outcome = p.pull(publication).future.result(5)
        assert (outcome.status, outcome.retries, "refused by the holder" in outcome.reason) == (FAILED, 1, True)
        assert publication.future.result(5).status is FAILED


def test_a_dead_holder_is_an_error_at_once_all_the_same() -> None:
    with pair() as p:
        assert p.pull(p.publish("warm")).future.result(5).status is DONE
        p.holder_faults.add(Fault(FaultKind.KILL, "Grant"))
        outcome = p.pull(p.publish("t")).future.result(1)
        assert (outcome.status, outcome.retries, "nobody listens" in outcome.reason) == (FAILED, 1, True)


def test_damage_is_counted_for_its_transfer(tmp_path: Path) -> None:
    path = tmp_path / "transfers.csv"
    with pair(perf_csv=str(path), max_segment_bytes=1) as p:
        p.receiver_faults.add(Fault(FaultKind.CORRUPT, "get", skip=1))
        pull = p.pull(p.publish())
        assert pull.future.result(5).digest_mismatches == 1
        pull.settled.result(5)
    assert next(csv.DictReader(path.open()))["digest_mismatches"] == "1"


def test_a_grant_with_a_named_receiver_serves_nobody_else() -> None:
    with pair() as p:
        publication = p.publish("t", receiver="somebody else")
        outcome = p.pull(publication).future.result(5)
        assert (outcome.status, "another worker" in outcome.reason) == (FAILED, True)
        assert not publication.future.done()
        assert p.pull(p.publish("mine", receiver=receiver_id(p))).future.result(5).status is DONE


def test_a_grant_ends_when_its_receiver_vanishes_before_it_asked() -> None:
    with pair(connect_timeout_ms=100) as p:
        assert p.pull(p.publish("warm")).future.result(5).status is DONE
        bound = p.publish("bound", lease_s=60, receiver=receiver_id(p))
        free = p.publish("free", lease_s=60)
        p.receiver.close()
        outcome = bound.future.result(2)
        assert (outcome.status, "receiver lost" in outcome.reason) == (FAILED, True)
        assert not free.future.done()  # anybody may still come for it


def test_a_grant_survives_a_link_that_comes_back() -> None:
    with pair(connect_timeout_ms=300) as p:
        assert p.pull(p.publish("warm")).future.result(5).status is DONE
        bound = p.publish("bound", lease_s=60, receiver=receiver_id(p))
        cut_all(p)
        assert p.pull(p.publish("other")).future.result(5).status is DONE  # a new link stands
        assert not eventually(bound.future.done, 0.5)
        assert p.pull(bound).future.result(5).status is DONE
