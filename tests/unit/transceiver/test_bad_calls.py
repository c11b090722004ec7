"""Calls that cannot work are refused by name at once, and trouble inside the loop ends what waits for it."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvcache.block_table import BlockTable
from tests.unit.transceiver.rig import SCOPE, Pair, make_storage, pair, table
from transceiver import TransferStatus
from transceiver.transfer_checks import check_tables

NO_SECONDS = [float("nan"), float("inf"), float("-inf"), -1.0, 0, "5", None, True, 10**400, np.float32("nan")]
FLOATS: Any = np.asarray([1.0, 2.0])
BROKEN = BlockTable(0, np.arange(2, dtype=np.int32), FLOATS, np.ones(2, np.uint64), np.full(2, 8, np.int32))
BAD_TABLES: list[tuple[BlockTable, str]] = [
    (table((3, 16)), "outside the pool: 3 to 16 of 16 pages"),
    (table((3, -1)), "outside the pool"),
    (table((3,), group=1), "no such group"),
    (table((3,), group=-1), "no such group"),
    (table((3, 3)), "names one page twice"),
    (table((3, 4), valid=(8, 9)), "valid_tokens of 8 to 9, a block holds 1 to 8"),
    (table((3, 4), valid=(8, 0)), "valid_tokens of 0 to 8"),
    (table((3, 4), ordinals=(-1, 0)), "negative ordinal"),
    (BROKEN, "pages are not integers"),
]
IDENTITIES = [
    ({"scope": "text"}, "scope is of type str"),
    ({"scope": None}, "scope is of type NoneType"),
    ({"scope": bytes(257)}, "at most 256 bytes"),
]


def untouched(p: Pair) -> None:
    """Nothing is left of the refused call, and the link still serves."""
    held, got = p.holder.stats(), p.receiver.stats()
    assert (held.open_publications, held.lost_links, got.open_pulls, got.quarantined_pulls) == (0, 0, 0, 0)
    assert p.pull(p.publish("after")).future.result(5).status is TransferStatus.DONE


@pytest.mark.parametrize("seconds", NO_SECONDS, ids=lambda value: str(value)[:12])
def test_a_time_that_is_none_is_refused(seconds: Any) -> None:
    with pair() as p:
        ticket = p.publish().ticket
        with pytest.raises(ValueError, match=r"timeout_s is .*: write a finite number of seconds above 0"):
            p.receiver.fetch(ticket, (table((4,)),), conversation_id="c", scope=SCOPE, timeout_s=seconds)
        with pytest.raises(ValueError, match=r"lease_s is .*: write a finite number of seconds above 0"):
            p.publish("t2", lease_s=seconds)
        assert p.receiver.stats().open_pulls == 0
        assert p.holder.stats().open_publications == 1


@pytest.mark.parametrize(("bad", "says"), BAD_TABLES, ids=[says for _, says in BAD_TABLES])
def test_impossible_tables_are_refused_on_both_sides(bad: BlockTable, says: str) -> None:
    with pair() as p:
        with pytest.raises(ValueError, match=says):
            p.holder.publish("t", (bad,), conversation_id="c", scope=SCOPE, lease_s=5)
        untouched(p)
        ticket = p.publish("next").ticket
        with pytest.raises(ValueError, match=says):
            p.receiver.pull(ticket, (bad,), conversation_id="c", scope=SCOPE, timeout_s=5)
        assert p.receiver.stats().open_pulls == 0


@pytest.mark.parametrize(("change", "says"), IDENTITIES)
def test_a_scope_that_no_message_carries_is_refused(change: dict[str, Any], says: str) -> None:
    with pair() as p:
        with pytest.raises(ValueError, match=says):
            p.publish(**change)
        untouched(p)
        with pytest.raises(ValueError, match=says):
            p.pull(p.publish("next"), **change)


def test_ids_and_tokens_that_no_message_carries_are_refused() -> None:
    with pair() as p:
        for name in ("x" * 257, 5, "\ud800"):
            with pytest.raises(ValueError, match=r"transfer_id|surrogates"):
                p.publish(name)  # type: ignore[arg-type]
            with pytest.raises(ValueError, match=r"receiver|surrogates"):
                p.publish("t", receiver=name)
        untouched(p)
        good = p.publish("good")
        for change in (
            {"transfer_id": 5},
            {"token": "text"},
            {"token": bytes(65)},
            {"address": None},
            {"address": b"x"},
        ):
            ticket: Any = dataclasses.replace(good.ticket, **change)
            with pytest.raises(ValueError, match=next(iter(change))):
                p.receiver.pull(ticket, (table((4,)),), conversation_id="c", scope=SCOPE, timeout_s=5)
        for ticket in (None, "ticket", dataclasses.asdict(good.ticket)):
            with pytest.raises(ValueError, match="the ticket is of type"):
                p.receiver.pull(ticket, (table((4,)),), conversation_id="c", scope=SCOPE, timeout_s=5)


def test_a_grant_that_grows_refuses_impossible_tables_and_goes_on() -> None:
    with pair(enable_pipelined_transfer=True) as p:
        grant = p.holder.publish("t", (), conversation_id="c", scope=SCOPE, lease_s=5, open_ended=True)  # begins empty
        pull = p.pull(grant, pages=(4, 5))
        for bad, says in BAD_TABLES:
            with pytest.raises(ValueError, match=says):
                grant.extend((bad,), last=True)
        with pytest.raises(ValueError, match="given twice"):
            grant.extend((table((1,)), table((2,), ordinals=(1,))), last=True)
        grant.extend((table((1,)),), last=False)
        grant.extend((table((2,), ordinals=(1,)),), last=False)
        grant.extend((), last=True)
        assert pull.future.result(5).status is TransferStatus.DONE
        assert p.same((1, 2), (4, 5))


def test_a_grant_that_was_published_whole_takes_no_more_blocks() -> None:
    with pair(enable_pipelined_transfer=True) as p:
        grant = p.publish("t", pages=(1,))
        for last in (False, True):
            with pytest.raises(ValueError, match=r"grant 't' takes no more blocks: publish it with open_ended=True"):
                grant.extend((table((2,), ordinals=(1,)),), last=last)
        outcome = p.pull(grant, pages=(4, 5)).future.result(5)
        assert (outcome.status, outcome.bad_ordinals) == (TransferStatus.FAILED, ((0, 1),))
        assert bytes(p.target.page(5)) == bytes(4096)  # what was refused is not there


@pytest.mark.parametrize("ended", [False, True])
def test_nothing_is_added_after_the_last_blocks(ended: bool) -> None:
    with pair(enable_pipelined_transfer=True) as p:
        grant = p.publish("t", pages=(1,), open_ended=True)
        grant.extend((table((2,), ordinals=(1,)),), last=True)
        if ended:
            assert p.pull(grant, pages=(4, 5)).future.result(5).status is TransferStatus.DONE
            grant.future.result(5)
        for tables in ((), (table((3,), ordinals=(2,)),)):
            for last in (False, True):
                with pytest.raises(ValueError, match="its last ones were published with last=True"):
                    grant.extend(tables, last=last)
        if not ended:
            outcome = p.pull(grant, pages=(4, 5, 6)).future.result(5)
            assert outcome.bad_ordinals == ((0, 2),)


def test_of_two_threads_that_both_end_a_grant_one_is_refused() -> None:
    with pair(enable_pipelined_transfer=True) as p:
        for number in range(50):
            grant = p.publish(f"t{number}", pages=(1,), open_ended=True)
            barrier, refused = threading.Barrier(2), []

            def end(grant: Any = grant, barrier: Any = barrier, refused: Any = refused) -> None:
                barrier.wait(5)
                try:
                    grant.extend((), last=True)
                except ValueError as error:
                    refused.append(error)

            threads = [threading.Thread(target=end) for _ in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(5)
            assert len(refused) == 1
            assert p.pull(grant, pages=(4,)).future.result(5).status is TransferStatus.DONE


@pytest.mark.parametrize("rows", [2, 1000])
def test_few_rows_and_many_are_checked_alike(rows: int) -> None:
    storage = make_storage(pages=(1024,))
    good = list(range(rows))
    check_tables(storage, (table(good),))
    for pages, says in (([*good[:-1], 1024], "outside"), ([*good[:-1], 0], "twice"), ([*good[:-1], -1], "outside")):
        with pytest.raises(ValueError, match=says):
            check_tables(storage, (table(pages),))
    for valid in (0, 9):
        with pytest.raises(ValueError, match="valid_tokens"):
            check_tables(storage, (table(good, valid=[8] * (rows - 1) + [valid]),))
    storage.close()


def broken(*_: object, **__: object) -> Any:
    raise RuntimeError("a fault of our own")


PLACES: list[tuple[str, Callable[[Pair], tuple[object, str]]]] = [
    ("start", lambda p: ("transceiver.receiver.Pull", "start")),
    ("attach", lambda p: (p.receiver._loop.peers, "attach")),
    ("connect", lambda p: (p.receiver._transport, "connect")),
    ("on_link", lambda p: ("transceiver.receiver.Pull", "on_link")),
    ("request", lambda p: ("transceiver.receiver.Pull", "_request")),
    ("encode", lambda p: ("transceiver.receiver", "encode")),
]


@pytest.mark.parametrize(
    ("place", "warm"),
    [
        pytest.param(place, warm, id=f"{name} {'standing' if warm else 'new'}")
        for name, place in PLACES
        for warm in (False, True)
        if not (warm and name == "connect")  # a standing link is not connected again
    ],
)
def test_a_pull_that_cannot_begin_fails_and_settles(
    place: Callable[[Pair], tuple[object, str]], warm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pair() as p:
        if warm:
            assert p.pull(p.publish("warm")).future.result(5).status is TransferStatus.DONE
        grant = p.publish("t")
        owner, attribute = place(p)
        with monkeypatch.context() as patch:
            if isinstance(owner, str):
                patch.setattr(f"{owner}.{attribute}", broken)
            else:
                patch.setattr(owner, attribute, broken)
            pull = p.pull(grant)
            outcome = pull.future.result(2)  # the deadline, 5 s, is not what ends it
            pull.settled.result(2)
        assert outcome.status is TransferStatus.FAILED
        assert "a fault of our own" in outcome.reason
        assert p.receiver.stats().received_failed == 1
        if warm:
            assert p.receiver.stats().lost_links == 0
        assert p.pull(p.publish("next")).future.result(5).status is TransferStatus.DONE


@pytest.mark.parametrize("also_cancel", [False, True])
def test_a_grant_that_cannot_take_effect_ends(also_cancel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with pair() as p:
        with monkeypatch.context() as patch:
            patch.setattr("transceiver.holder.warm_digests", broken)
            if also_cancel:
                patch.setattr(p.holder._holder, "cancel", broken)
            status = p.publish("t").future.result(2).status
        assert status is (TransferStatus.FAILED if also_cancel else TransferStatus.CANCELLED)
        untouched(p)


def test_a_timer_without_a_time_is_refused() -> None:
    with pair() as p, pytest.raises(ValueError, match="not nan"):
        p.holder._ctx.after(float("nan"), lambda: None)
