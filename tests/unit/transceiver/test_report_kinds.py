"""Kinds of fault from public reports that no other test of the transceiver shows in their own form."""

from __future__ import annotations

import dataclasses

import pytest

from kvcache.layout import KvLayout, LayerGroup, LifeCycleKind
from tests.unit.transceiver.rig import SCOPE, eventually, pair, table
from transceiver import TransferStatus
from transceiver.testing import Fault, FaultKind

DONE, FAILED = TransferStatus.DONE, TransferStatus.FAILED
TWO_GROUPS = KvLayout(
    "m", 8,
    (LayerGroup(LifeCycleKind.FULL, (0, 2), 2, 16), LayerGroup(LifeCycleKind.SLIDING, (1,), 2, 16, window=16)),
)  # fmt: skip


@pytest.mark.parametrize("kind", [FaultKind.CORRUPT, FaultKind.CUT])
def test_damage_in_one_of_two_groups_is_named_by_group(kind: FaultKind) -> None:
    """A load failure with several cache groups: recovered per group, or all of it is named; the next transfer works."""
    source = (table((1, 2, 3)), table((4, 5), ordinals=(1, 2), group=1))
    target = (table((5, 6, 7)), table((0, 1), ordinals=(1, 2), group=1))
    with pair(layout=TWO_GROUPS, pages=(8, 6)) as p:

        def move(name: str):  # type: ignore[no-untyped-def]
            grant = p.holder.publish(name, source, conversation_id=None, scope=b"", lease_s=5)
            pull = p.receiver.pull(grant.ticket, target, conversation_id=None, scope=b"", timeout_s=5)
            outcome = pull.future.result(5)
            pull.settled.result(5)
            assert eventually(grant.future.done)
            return outcome

        p.receiver_faults.add(Fault(kind, "get", skip=1))  # the second group's read
        outcome = move("broken")
        assert outcome.status is FAILED
        if kind is FaultKind.CORRUPT:
            assert [group for group, _ in outcome.bad_ordinals] == [1] and outcome.blocks == 4
            assert all(bytes(p.source.page(a)) == bytes(p.target.page(b)) for a, b in ((1, 5), (2, 6), (3, 7)))
        else:
            assert set(outcome.bad_ordinals) == {(0, 0), (0, 1), (0, 2), (1, 1), (1, 2)} and outcome.blocks == 0
        assert move("again").status is DONE
        for mine, theirs in zip(target, source, strict=True):
            for a, b in zip(theirs.pages.tolist(), mine.pages.tolist(), strict=True):
                assert bytes(p.source.page(a, mine.group)) == bytes(p.target.page(b, mine.group))


def test_early_requests_are_bounded_and_expire(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody fills a holder with requests for what never comes."""
    monkeypatch.setattr("transceiver.early_requests._MAX_WAITING", 4)
    with pair(early_request_ttl_ms=200) as p:
        conversation = p.publish("other").conversation
        base = p.publish("another").ticket
        pulls = []
        for number in range(6):
            name = f"early-{number}"
            token = p.holder._holder.token(name, conversation, SCOPE)
            ticket = dataclasses.replace(base, transfer_id=name, token=token)
            pulls.append(p.receiver.pull(ticket, (table((number,)),), conversation_id="c", scope=SCOPE, timeout_s=5))
        reasons = [pull.future.result(5).reason for pull in pulls]
        assert sum("too many early requests" in reason for reason in reasons) == 2
        assert sum("no publication came" in reason for reason in reasons) == 4
        assert p.holder.stats().parked_requests == 0
        assert p.pull(p.publish("t")).future.result(5).status is DONE


@pytest.mark.parametrize("position", [0, 7, 15])
def test_every_block_of_a_batch_is_checked_for_its_generation(position: int) -> None:
    """Also the last of many that came with one read."""
    with pair(verify=False, pages=(32,)) as p:
        p.receiver_faults.add(Fault(FaultKind.DELAY, "get", seconds=0.2))
        pull = p.pull(p.publish(pages=range(16)), pages=range(16))
        assert eventually(lambda: pull.state.value == "transferring")
        p.source.generations()[position] = 2
        outcome = pull.future.result(5)
        assert (outcome.status, outcome.bad_ordinals, outcome.segments) == (FAILED, ((0, position),), 1)
