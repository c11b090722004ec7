"""The last-N ledger: order, overlap, cancel, bounds, expiry, drop handles."""

from __future__ import annotations

import logging

import pytest

from kvcache import CorruptedCacheError, DropHandleUsedError


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


def superseded_runs(b) -> list[tuple[int, int]]:
    return sorted((n.start, n.end) for n in b.manager.tree.nodes() if n.superseded)


def test_a_new_turn_behind_superseded_blocks_revives_those_above_it(bench):
    b = bench(turns=1)
    b.turn(range(16), "c")
    b.turn(range(100, 108), "c")
    assert superseded_runs(b) == [(0, 16)]
    b.turn([*range(8), *range(50, 58)], "c")  # the blocks 0 and 1 are on a retained path again, 2 and 3 are not
    assert superseded_runs(b) == [(0, 8), (8, 16)]
    first = next(n for n in b.manager.tree.nodes() if n.start == 0 and n.superseded)
    assert first.tokens().tolist() == list(range(100, 108))


def test_a_turn_that_ends_inside_superseded_blocks_revives_only_its_own(bench):
    b = bench(turns=1)
    b.turn(range(24), "c")
    b.turn(range(100, 108), "c")
    b.turn(range(13), "c")  # nothing new is published: its four blocks are retained, those behind stay superseded
    assert superseded_runs(b) == [(0, 8), (16, 24)]
    assert b.manager.stats().superseded_blocks == 4
    assert b.probe([*range(24), 999]) == 24


def test_a_turn_whose_blocks_were_superseded_since_its_prompt_is_retained_all_the_same(bench):
    b = bench(turns=1)
    b.turn(range(16), "c")
    other = b.start(range(16), "d")
    b.compute(other, [15], end=True)
    b.turn(range(100, 108), "c")
    assert superseded_runs(b) == [(0, 16)]
    other.end_turn()
    other.close()
    b.manager.check_integrity()
    assert superseded_runs(b) == []


def test_superseded_marks_are_part_of_the_integrity_check(bench):
    b = bench(turns=1)
    b.turn(range(16), "c")
    (run,) = (n for n in b.manager.tree.nodes() if n.parent is not None)
    run.superseded, b.manager.tree.superseded_blocks = True, 4
    with pytest.raises(CorruptedCacheError, match="retained turn's path"):
        b.manager.check_integrity()
    run.superseded, b.manager.tree.superseded_blocks, b.manager.poison_reason = False, 0, None
