"""The last-N ledger: order, overlap, cancel, bounds, expiry, drop handles."""

from __future__ import annotations

import logging

import pytest

from kvcache import DropHandleUsedError


def test_ledger_keeps_the_last_n(bench):
    b = bench(turns=3)
    for end in range(8, 48, 8):
        b.turn(range(end), "c")
    turns = b.manager.ledger.get("c").turns
    assert [handle.num_tokens for handle in turns] == [24, 32, 40]


def test_overlap_first_wins_with_one_warning(bench, caplog):
    b = bench(turns=1)
    first = b.start(range(8), "c")
    b.compute(first, range(4))
    with caplog.at_level(logging.WARNING):
        second = b.start(range(50, 58), "c")
        b.compute(second, range(50, 58), end=True)
        second.end_turn()
        second.close()
    assert len(caplog.records) == 1
    b.compute(first, range(4, 8), end=True)
    first.end_turn()
    first.close()
    assert b.probe(range(8)) == 7
    assert len(b.manager.ledger.get("c").turns) == 1


def test_next_prompt_during_the_previous_decode_is_no_overlap(bench, caplog):
    b = bench(turns=2)
    first = b.start(range(8), "c")
    b.compute(first, range(8), end=True)
    with caplog.at_level(logging.WARNING):
        second = b.start(range(12), "c")
    assert not caplog.records
    b.compute(second, range(8, 12), end=True)
    second.end_turn()
    second.close()
    first.end_turn()
    first.close()
    assert [handle.num_tokens for handle in b.manager.ledger.get("c").turns] == [12, 8]


def test_cancel_frees_the_conversation(bench, caplog):
    b = bench()
    first = b.start(range(8), "c")
    b.compute(first, range(4))
    first.close()
    with caplog.at_level(logging.WARNING):
        assert b.turn(range(8), "c") == 0
    assert not caplog.records


def test_end_of_a_forgotten_conversation_is_a_no_op(bench):
    b = bench(turns=2)
    cache = b.start(range(8), "c")
    b.compute(cache, range(8), end=True)
    assert b.manager.end_conversation("c") is True
    assert b.manager.end_conversation("c") is False
    cache.end_turn()
    cache.close()
    assert b.manager.stats().tracked_conversations == 0
    assert b.probe(range(9)) == 8


def test_double_drop(bench):
    b = bench()
    b.turn(range(8), "c")
    handle = b.manager.ledger.get("c").turns.pop()
    handle.drop()
    with pytest.raises(DropHandleUsedError):
        handle.drop()


def test_idle_expiry_on_the_given_clock(bench):
    now = [0.0]
    b = bench(turns=2, clock=lambda: now[0], conversation_idle_timeout_s=10.0)
    b.turn(range(8), "old")
    now[0] = 8.0
    b.turn(range(50, 58), "young")
    now[0] = 15.0
    assert b.manager.expire_idle() == 1
    assert b.manager.ledger.get("old") is None
    assert b.manager.ledger.get("young") is not None
    now[0] = 30.0
    b.turn(range(5))
    assert b.manager.stats().tracked_conversations == 0


def test_bound_on_tracked_conversations(bench):
    b = bench(turns=2, max_tracked_conversations=3)
    for index in range(6):
        b.turn(range(index * 100, index * 100 + 8), f"c{index}")
    assert b.manager.stats().tracked_conversations == 3
    assert b.manager.stats().superseded_blocks == 6


def test_anonymous_publisher_keeps_blocks_from_being_superseded(bench):
    b = bench(turns=1)
    b.turn(range(16), "c")
    b.turn(range(16))
    b.turn(range(100, 108), "c")
    assert b.manager.stats().superseded_blocks == 0
    b.manager.end_conversation("c")
    assert b.manager.stats().superseded_blocks == 2


def test_two_conversations_on_one_prompt(bench):
    b = bench(turns=1)
    b.turn(range(16), "a")
    b.turn(range(16), "b")
    b.turn(range(100, 108), "a")
    assert b.manager.stats().superseded_blocks == 0
    b.turn(range(200, 208), "b")
    assert b.manager.stats().superseded_blocks == 4
