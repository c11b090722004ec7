"""Transfers over `inproc`: what arrives, what is refused, how each end reaches the other side."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import numpy as np
import pytest

from kvcache.layout import KvLayout, LayerGroup, LifeCycleKind
from tests.unit.transceiver.rig import SCOPE, SECRET, Pair, eventually, make_layout, make_storage, pair, table
from transceiver import (
    CacheTransceiver,
    CacheTransceiverConfig,
    TransceiverBackend,
    TransceiverClosedError,
    TransceiverFullError,
    TransferStatus,
)
from transceiver.testing import Fault, FaultKind

DONE, FAILED, CANCELLED, TIMED_OUT = TransferStatus


def test_blocks_arrive_byte_for_byte_and_both_sides_say_so() -> None:
    with pair() as p:
        publication = p.publish()
        pull = p.pull(publication)
        outcome = pull.future.result(5)
        pull.settled.result(5)
        assert (outcome.status, outcome.blocks, outcome.bytes) == (DONE, 3, 3 * p.source.region().page_bytes)
        assert outcome.segments == 2  # pages 1, 2 -> 5, 6 are one run; 3 -> 4 is another
        assert outcome.transport == "inproc"
        held = publication.future.result(5)
        assert (held.status, held.blocks, held.bytes) == (DONE, 3, outcome.bytes)
        assert p.same((3, 1, 2), (4, 5, 6))
        assert p.receiver.stats().digests_checked == 3
        assert p.receiver.links() == {"holder-" + p.receiver.address.rpartition("-")[2]: "inproc"}


def test_what_a_transport_has_not_hashed_while_it_copied_is_hashed_on_arrival(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transceiver.inproc_link.InprocLink.copies_itself", True)  # it says so, and does nothing
    with pair() as p:
        outcome = p.pull(p.publish()).future.result(5)
        assert (outcome.status, outcome.segments) == (DONE, 3)  # one read a page, so that each can be hashed apart
        assert p.same((3, 1, 2), (4, 5, 6))
        assert (p.receiver.stats().digests_checked, p.receiver.stats().digest_mismatches) == (3, 0)
        p.receiver_faults.add(Fault(FaultKind.CORRUPT, "get"))
        damaged = p.pull(p.publish("u")).future.result(5)
        assert damaged.status is FAILED
        assert len(damaged.bad_ordinals) == 1


def test_only_the_named_ordinals_move() -> None:
    with pair() as p:
        outcome = p.pull(p.publish(pages=(3, 1, 2, 9)), pages=(7, 8), ordinals=(1, 3)).future.result(5)
        assert (outcome.status, outcome.blocks) == (DONE, 2)
        assert p.same((1, 9), (7, 8))
        assert not any(bytes(p.target.page(page)).strip(b"\0") for page in (4, 5, 6, 9))


def test_an_empty_list_releases_the_holder() -> None:
    with pair() as p:
        publication = p.publish()
        pull = p.receiver.pull(publication.ticket, (), conversation_id="c", scope=SCOPE, timeout_s=5)
        outcome = pull.future.result(5)
        assert (outcome.status, outcome.bytes) == (DONE, 0)
        assert publication.future.result(5).status is DONE


def test_a_block_that_the_holder_lacks_is_named() -> None:
    with pair() as p:
        publication = p.publish(pages=(3, 1))
        outcome = p.pull(publication, pages=(4, 5, 6), ordinals=(0, 1, 7)).future.result(5)
        assert outcome.status is FAILED
        assert outcome.bad_ordinals == ((0, 7),)
        assert (outcome.blocks, "1 not held" in outcome.reason) == (2, True)
        assert p.same((3, 1), (4, 5))
        assert publication.future.result(5).status is FAILED


def test_a_partial_block_needs_as_many_tokens_as_are_wanted() -> None:
    with pair() as p:
        short = p.holder.publish("t", (table((3, 1), valid=(8, 4)),), conversation_id="c", scope=SCOPE, lease_s=5)
        assert short.ticket.num_tokens == 12
        pull = p.receiver.pull(
            short.ticket, (table((4, 5), valid=(8, 5)),), conversation_id="c", scope=SCOPE, timeout_s=5
        )
        assert pull.future.result(5).bad_ordinals == ((0, 1),)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"conversation_id": "other"}, "conversation"),
        ({"scope": b"other"}, "scope"),
        ({"conversation_id": None}, "conv"),
    ],
)
def test_a_grant_serves_its_conversation_and_scope_only(change: dict[str, Any], field: str) -> None:
    with pair() as p:
        publication = p.publish()
        outcome = p.pull(publication, **change).future.result(5)
        assert outcome.status is FAILED
        assert f"refused by the holder ({field}" in outcome.reason
        assert not publication.future.done()  # a refused stranger does not end the grant
        assert p.pull(publication).future.result(5).status is DONE


def test_a_forged_token_is_refused() -> None:
    with pair() as p:
        publication = p.publish()
        forged = dataclasses.replace(publication.ticket, token=bytes(32))
        pull = p.receiver.pull(forged, (table((4,)),), conversation_id="c", scope=SCOPE, timeout_s=5)
        assert "(token)" in pull.future.result(5).reason
        unknown = dataclasses.replace(publication.ticket, transfer_id="never")
        pull = p.receiver.pull(unknown, (table((4,)),), conversation_id="c", scope=SCOPE, timeout_s=5)
        assert "no such grant" in pull.future.result(5).reason
        assert p.holder.stats().refused_pulls == 2


def test_a_grant_is_good_once() -> None:
    with pair() as p:
        publication = p.publish()
        assert p.pull(publication).future.result(5).status is DONE
        again = p.pull(publication).future.result(5)
        assert (again.status, "the grant is over (done)" in again.reason) == (FAILED, True)
        assert p.publish().future.result(5).status is FAILED  # nor can its id be published again


def test_a_request_may_come_before_its_publication() -> None:
    with pair() as p:
        token = p.holder._holder.token("t", p.publish("other").conversation, SCOPE)
        ticket = dataclasses.replace(p.publish("another").ticket, transfer_id="t", token=token)
        pull = p.receiver.pull(ticket, (table((4, 5, 6)),), conversation_id="c", scope=SCOPE, timeout_s=5)
        assert eventually(lambda: p.holder.stats().parked_requests == 1)
        publication = p.publish("t")
        assert pull.future.result(5).status is DONE
        assert publication.future.result(5).status is DONE
        assert p.holder.stats().parked_requests == 0


def test_groups_move_separately() -> None:
    layout = KvLayout(
        "m", 8,
        (
            LayerGroup(LifeCycleKind.FULL, (0, 2), 2, 16),
            LayerGroup(LifeCycleKind.SLIDING, (1,), 2, 16, window=16),
            LayerGroup(LifeCycleKind.RECURRENT, (3,), state_bytes_per_layer=100),
        ),
    )  # fmt: skip
    with pair(layout=layout, pages=(8, 6, 4)) as p:
        source = (
            table((1, 2, 3)),
            table((4,), ordinals=(2,), group=1),
            table((3,), ordinals=(0,), valid=(1,), group=2),
        )
        target = (
            table((5, 6, 7)),
            table((0,), ordinals=(2,), group=1),
            table((1,), ordinals=(0,), valid=(1,), group=2),
        )
        publication = p.holder.publish("t", source, conversation_id=None, scope=b"", lease_s=5)
        pull = p.receiver.pull(publication.ticket, target, conversation_id=None, scope=b"", timeout_s=5)
        assert pull.future.result(5).status is DONE
        for mine, theirs in zip(target, source, strict=True):
            for a, b in zip(theirs.pages.tolist(), mine.pages.tolist(), strict=True):
                assert bytes(p.source.page(a, mine.group)) == bytes(p.target.page(b, mine.group))


@pytest.mark.parametrize("verify", [True, False])
def test_a_corrupted_block_is_named_and_the_others_are_good(verify: bool) -> None:
    with pair(verify=verify, max_segment_bytes=1) as p:
        p.receiver_faults.add(Fault(FaultKind.CORRUPT, "get", skip=1))
        outcome = p.pull(p.publish()).future.result(5)
        if not verify:
            assert outcome.status is DONE  # nobody looked
            return
        assert (outcome.status, outcome.blocks, len(outcome.bad_ordinals)) == (FAILED, 2, 1)
        assert p.receiver.stats().digest_mismatches == 1


def test_a_page_given_out_anew_during_the_copy_is_found_without_digests() -> None:
    with pair(verify=False) as p:
        publication = p.publish()
        p.receiver_faults.add(Fault(FaultKind.DELAY, "get", seconds=0.2))
        pull = p.pull(publication)
        assert eventually(lambda: pull.state.value == "transferring")
        p.source.generations()[3] = 2
        outcome = pull.future.result(5)
        assert (outcome.status, outcome.bad_ordinals) == (FAILED, ((0, 0),))
        assert p.receiver.stats().stale_generations == 1


def test_a_page_that_changed_hands_before_the_request_is_not_granted() -> None:
    with pair() as p:
        publication = p.publish()
        p.source.generations()[1] = 7
        assert p.pull(publication).future.result(5).bad_ordinals == ((0, 1),)


def test_a_receivers_cancel_reaches_the_holder() -> None:
    with pair() as p:
        p.receiver_faults.add(Fault(FaultKind.DELAY, "get", seconds=0.3))
        publication = p.publish()
        pull = p.pull(publication)
        assert eventually(lambda: pull.state.value == "transferring")
        assert pull.cancel() is False  # not yet: reads are under way
        assert pull.future.result(1).status is CANCELLED
        assert publication.future.result(1).status is CANCELLED
        assert not pull.settled.done()
        pull.settled.result(5)
        assert pull.cancel() is True
        assert p.pull(p.publish("next")).future.result(5).status is DONE


@pytest.mark.parametrize("way", ["cancel", "time-out"])
def test_an_end_while_connecting_reaches_the_holder(way: str) -> None:
    with pair() as p:
        p.holder_faults.add(Fault(FaultKind.DELAY, "Challenge", seconds=0.3))
        publication = p.publish()
        pull = p.pull(publication, timeout_s=0.1 if way == "time-out" else 5.0)
        if way == "cancel":
            pull.cancel()
        expected = CANCELLED if way == "cancel" else TIMED_OUT
        assert pull.future.result(1).status is expected
        pull.settled.result(1)
        assert publication.future.result(2).status is expected
        assert p.pull(p.publish("next")).future.result(5).status is DONE


def test_a_holders_cancel_reaches_the_receiver() -> None:
    with pair() as p:
        idle = p.publish("idle")
        idle.cancel()
        assert idle.future.result(5).status is CANCELLED
        p.receiver_faults.add(Fault(FaultKind.DELAY, "get", seconds=0.3))
        publication = p.publish()
        pull = p.pull(publication)
        assert eventually(lambda: pull.state.value == "transferring")
        assert publication.cancel() is False
        assert pull.future.result(1).status is CANCELLED
        assert publication.future.result(1).status is CANCELLED
        pull.settled.result(5)


def test_a_time_out_ends_both_sides_and_keeps_the_pages_in_quarantine() -> None:
    with pair(drain_timeout_ms=400) as p:
        p.receiver_faults.add(Fault(FaultKind.DROP, "get"))
        publication = p.publish()
        pull = p.pull(publication, timeout_s=0.1)
        assert pull.future.result(2).status is TIMED_OUT
        assert publication.future.result(1).status is TIMED_OUT
        assert not pull.settled.done()
        assert p.receiver.stats().quarantined_pulls == 1
        pull.settled.result(5)  # the link is cut after the drain time
        assert p.receiver.stats().quarantined_pulls == 0
        assert p.pull(p.publish("next")).future.result(5).status is DONE
        assert p.receiver.stats().reconnects == 1


def test_a_lease_that_ran_out_frees_the_holder_and_refuses_the_late_receiver() -> None:
    with pair() as p:
        publication = p.publish(lease_s=0.05)
        assert publication.future.result(5).status is TIMED_OUT
        assert "the grant is over (timed_out)" in p.pull(publication).future.result(5).reason


def test_a_lease_that_runs_out_under_a_reader_stops_it() -> None:
    with pair() as p:
        p.receiver_faults.add(Fault(FaultKind.DELAY, "get", seconds=0.5))
        publication = p.publish(lease_s=0.1)
        pull = p.pull(publication)
        outcome = pull.future.result(2)
        assert (outcome.status, "lease" in outcome.reason) == (FAILED, True)
        assert publication.future.result(1).status is TIMED_OUT


def test_a_lost_holder_fails_the_pull_and_a_lost_receiver_frees_the_holder() -> None:
    with pair() as p:
        p.receiver_faults.add(Fault(FaultKind.CUT, "get"))
        publication = p.publish()
        pull = p.pull(publication)
        assert "the link was cut" in pull.future.result(1).reason
        assert "receiver lost" in publication.future.result(1).reason
        pull.settled.result(1)
        assert p.pull(p.publish("next")).future.result(5).status is DONE


def test_another_secret_is_refused_and_nothing_else_disturbed() -> None:
    with pair() as p:
        stranger = CacheTransceiver(
            worker_id="stranger", storage=p.target, config=CacheTransceiverConfig(backend=TransceiverBackend.INPROC),
            secret=b"another secret of some length",
        )  # fmt: skip
        with stranger:
            publication = p.publish()
            pull = stranger.pull(publication.ticket, (table((4,)),), conversation_id="c", scope=SCOPE, timeout_s=5)
            outcome = pull.future.result(5)
            assert (outcome.status, "same secret" in outcome.reason) == (FAILED, True)
            assert p.pull(publication).future.result(5).status is DONE


def test_a_layout_that_differs_is_refused_by_field() -> None:
    with pair(receiver_layout=make_layout(dtype="float16")) as p:
        outcome = p.pull(p.publish()).future.result(5)
        assert outcome.status is FAILED
        assert "groups[0].dtype: 'float" in outcome.reason
        start = p.holder.stats().refused_links
        assert "groups[0].dtype" in p.pull(p.publish("again")).future.result(5).reason
        assert p.holder.stats().refused_links == start  # the verdict is remembered for a while


def test_nobody_at_the_address() -> None:
    with pair() as p:
        ticket = dataclasses.replace(p.publish().ticket, address="inproc://nobody")
        pull = p.receiver.pull(ticket, (table((4,)),), conversation_id="c", scope=SCOPE, timeout_s=5)
        assert "nobody listens" in pull.future.result(5).reason
        ticket = dataclasses.replace(ticket, address="carrier-pigeon")
        pull = p.receiver.pull(ticket, (table((4,)),), conversation_id="c", scope=SCOPE, timeout_s=5)
        assert "not an inproc address" in pull.future.result(5).reason


def test_bounds_are_told_to_the_caller() -> None:
    with pair(max_publications=1, max_pulls=1) as p:
        publication = p.publish()
        with pytest.raises(TransceiverFullError, match="max_publications"):
            p.publish("two")
        p.receiver_faults.add(Fault(FaultKind.DELAY, "get", seconds=0.2))
        pull = p.pull(publication)
        with pytest.raises(TransceiverFullError, match="max_pulls"):
            p.pull(publication)
        pull.settled.result(5)


def test_impossible_tables_are_the_callers_error() -> None:
    with pair() as p:
        ticket = p.publish().ticket
        for bad in ((table((99,)),), (table((4, 4)),), (table((1,), group=3),), (table((1,)), table((2,)))):
            with pytest.raises(ValueError, match="table of group"):
                p.receiver.pull(ticket, bad, conversation_id="c", scope=SCOPE, timeout_s=5)


def test_close_ends_everything_and_leaves_no_thread() -> None:
    before = {t.name for t in threading.enumerate()}
    p = Pair()
    with p:
        publication = p.publish("open")
        p.receiver_faults.add(Fault(FaultKind.DROP, "get"))
        pull = p.pull(p.publish())
        assert eventually(lambda: pull.state.value == "transferring")
    assert pull.future.result(0).status is CANCELLED
    pull.settled.result(0)
    assert publication.future.result(0).status is CANCELLED
    p.holder.close()
    with pytest.raises(TransceiverClosedError):
        p.publish("late")
    assert {t.name for t in threading.enumerate()} - before == set()


def test_a_short_secret_is_refused() -> None:
    storage = make_storage()
    with pytest.raises(ValueError, match="at least 16"):
        CacheTransceiver(worker_id="w", storage=storage, config=CacheTransceiverConfig(), secret=b"short")
    storage.close()
    assert len(SECRET) >= 16


def test_digests_prepared_at_commit_travel_with_the_grant() -> None:
    with pair() as p:
        p.holder.prepare((table((3, 1, 2)),))
        assert eventually(lambda: p.holder._ctx.digests.find(0, 2, 1, 8) is not None)
        p.holder_faults.add(Fault(FaultKind.CUT, "Digests"))  # would break the transfer if digests came later
        assert p.pull(p.publish()).future.result(5).status is DONE


def test_the_csv_has_one_header_and_one_line_per_pull(tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "perf" / "transfers.csv"
    for _ in range(2):
        with pair(perf_csv=str(path)) as p:
            p.pull(p.publish()).settled.result(5)
    lines = path.read_text().splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("timestamp,side,transfer_id")
    assert ",done,3,12288,2,6144.0," in lines[1]
    assert np.isfinite(float(lines[1].rsplit(",", 1)[1]))
