"""The reference system's own test cases (rows A of `semantics_rows.py`) that no other file here has, with its numbers.

Blocks of 4 tokens, one full-attention life cycle and a window of 4, `per_conversation`, unless a test says otherwise.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import pytest

from kvcache import RecurrentStateConfig, ReuseScope, SuspendedSequenceError
from kvcache.snapshot_points import snapshot_points


@pytest.mark.parametrize("conversation", ["c", None])
def test_chunks_of_a_windowed_prompt(bench, conversation):
    """A1, A2: nothing is published before the prompt's end."""
    b = bench(windows=(4,), turns=1)
    cache = b.start(range(8), conversation)
    b.compute(cache, range(4))
    assert (cache.num_committed_tokens, cache.num_computed_tokens) == (0, 4)
    b.compute(cache, range(4, 8), end=True)
    assert (cache.num_committed_tokens, cache.num_computed_tokens) == (8, 8)
    cache.close()


def test_cancel_frees_the_conversation_of_a_windowed_model(bench, caplog):
    """A3"""
    b = bench(windows=(4,), turns=1)
    first = b.start(range(8), "c")
    b.compute(first, range(4))
    first.close()
    with caplog.at_level(logging.WARNING):
        b.turn(range(8), "c")
    assert not caplog.records
    assert [turn.num_tokens for turn in b.manager.ledger.get("c").turns] == [8]


def test_the_next_turn_takes_the_old_window_away(bench):
    """A4"""
    b = bench(windows=(4,), turns=1)
    b.turn(range(8), "c")
    assert b.turn([*range(8), 100, 101, 102, 103], "c") == 8
    assert b.turn(range(8), "other") == 0


def test_the_last_two_of_three_prompts(bench):
    """A5"""
    b = bench(windows=(4,), turns=2)
    first, second, third = range(8), range(100, 108), range(200, 208)
    b.turn(first, "c")
    b.turn(second, "c")
    assert b.probe(first) == 7
    b.turn(third, "c")
    assert (b.probe(first), b.probe(second), b.probe(third)) == (0, 7, 7)


def test_an_overlapping_request_is_a_request_without_conversation(bench, caplog):
    """A6"""
    b = bench(windows=(4,), turns=1)
    first = b.start(range(8), "c")
    b.compute(first, range(4))
    with caplog.at_level(logging.WARNING):
        second = b.start(range(100, 108), "c")
    assert len(caplog.records) == 1
    assert (second.conversation_id, second.conversation) == ("c", None)
    b.compute(second, range(100, 108), end=True)
    second.end_turn()
    second.close()
    b.compute(first, range(4, 8), end=True)
    first.end_turn()
    first.close()
    assert b.probe(range(8)) == 7
    assert [turn.num_tokens for turn in b.manager.ledger.get("c").turns] == [8]
    assert len(caplog.records) == 1


def test_the_committed_prefix_is_all_there_at_creation(bench):
    """A9: 128 tokens and one more, since the last one is never taken from the cache."""
    b = bench(block=32, windows=(64,), policy="per_request")
    b.turn(range(128))
    cache = b.start([*range(128), 999])
    assert (cache.num_reused_tokens, cache.num_committed_tokens) == (128, 128)
    assert (cache.pages(1) >= 0).tolist() == [False, False, True, True]
    cache.close()


@pytest.mark.parametrize(("cached", "expected"), [(12, 9), (9, 9)])
def test_a_prompt_shorter_than_the_block_it_ends_in(bench, cached, expected):
    """A10"""
    b = bench(policy="per_request")
    b.turn(range(cached))
    assert b.turn(range(10)) == expected


def test_only_what_was_not_there_is_committed(bench):
    """A15: of a prompt of 10 with 4 tokens cached, tokens 4 to 9; the answer waits for the turn's end."""
    b = bench(policy="per_request")
    b.turn(range(4))
    cache = b.start(range(10))
    assert cache.num_committed_tokens == 4
    b.compute(cache, range(4, 10), end=True)
    assert cache.num_committed_tokens == 10
    b.compute(cache, [50, 51])
    assert cache.num_committed_tokens == 10
    assert b.cached() == 3
    cache.close()
    assert b.probe([*range(10), 50, 51, 1]) == 10


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"policy": "all_reusable"}, 4),
        ({"policy": "per_request"}, 2),
        ({"policy": "per_conversation"}, 2),
        ({"policy": "per_request", "enable_block_reuse": False}, 0),
    ],
)
def test_only_the_window_at_the_prompts_end_is_kept(bench, options, kept):
    """A16: except where every block is published, and where none is."""
    b = bench(windows=(8,), **options)
    b.turn(range(16))
    assert b.cached(1) == kept


def test_a_probe_lands_on_that_turns_snapshot(bench):
    """A17"""
    b = bench(
        block=32,
        recurrent=1,
        turns=2,
        recurrent_state_config=RecurrentStateConfig(additional_snapshot_offsets_from_end=(0,)),
    )
    prompts = [range(64), range(100, 164), range(200, 264)]
    states = []
    for prompt in prompts[:2]:
        b.turn(prompt, "c")
        cache = b.start([*prompt, 999], "reader")
        assert cache.num_reused_tokens == 64
        states.append(cache.state_sources[1])
        assert states[-1] in [n.states.get((1, 64)) for n in b.manager.tree.nodes()]
        cache.close()
    assert states[0] != states[1]
    b.turn(prompts[2], "c")
    assert [b.probe([*prompt, 999]) for prompt in prompts] == [0, 64, 64]


@pytest.mark.parametrize("prompt", [150, 32])
def test_the_prompts_end_is_the_only_point(prompt):
    """A18"""
    state = RecurrentStateConfig(additional_snapshot_offsets_from_end=(0,))
    assert snapshot_points(state, prompt) == (prompt,)


def test_commit_then_plan(bench, monkeypatch):
    """A19: when the plan is made everything is published, and nothing can be added any more."""
    b = bench(recurrent=1, turns=2)
    cache = b.start(range(8), "c")
    b.compute(cache, range(8), end=True)
    b.compute(cache, [50, 51])
    seen = []
    save = b.manager.ledger.save_plan

    def spy(conversation: object, plan: Callable[[], object]) -> None:
        seen.append((cache.num_committed_tokens, cache.turn_ended, conversation.current))
        save(conversation, plan)

    monkeypatch.setattr(b.manager.ledger, "save_plan", spy)
    cache.end_turn()
    assert seen == [(10, True, None)]
    cache.close()


def test_partial_blocks_of_different_length(bench):
    """A22: the third request continues from the second's block and must not write into it."""
    b = bench(block=8, policy="per_request")
    b.turn(range(13))
    second = b.start(range(16))
    b.compute(second, range(13, 16), end=True)
    page = int(second.pages()[1])
    before = bytes(b.storage.page(page))
    third = b.start([*range(12), 77])
    assert third.num_reused_tokens == 12
    b.compute(third, [77], end=True)
    b.compute(third, [78, 79])
    assert bytes(b.storage.page(page)) == before
    b.check(second)
    third.close()
    second.close()


def test_branch_points_are_not_recorded_without_windows_or_states(bench):
    """A26"""
    b = bench(policy="per_request", enable_branch_snapshot=True)
    b.turn(range(16))
    cache = b.start([*range(10), *range(50, 60)])
    assert cache.points == ()
    assert cache.chunk_end(20) == 20
    cache.close()


# scenarios of section 5 and the further cases B


def test_a_cancel_keeps_the_chunks_that_were_published(bench):
    """S12: with all_reusable completed chunks stay, with the others nothing."""
    kept = {}
    for policy in ("all_reusable", "per_request", "per_conversation"):
        b = bench(policy=policy)
        cache = b.start(range(12), "c")
        b.compute(cache, range(8))
        cache.close()
        kept[policy] = b.probe(range(12))
    assert kept == {"all_reusable": 8, "per_request": 0, "per_conversation": 0}


def test_a_cancel_on_a_snapshot_point_keeps_it(bench):
    """S12: hybrid"""
    points = RecurrentStateConfig(additional_snapshot_offsets_from_start=(8,))
    b = bench(recurrent=1, policy="per_request", recurrent_state_config=points)
    cache = b.start(range(12))
    b.compute(cache, range(8))
    cache.close()
    assert b.probe(range(12)) == 8


def test_an_ignored_request_outlives_the_one_that_was_counted(bench):
    """S13: the first is cancelled and its conversation forgotten; the second's end finds nothing to plan for."""
    b = bench(turns=1)
    first = b.start(range(8), "c")
    second = b.start(range(50, 58), "c")
    first.close()
    assert b.manager.stats().tracked_conversations == 0
    b.compute(second, range(50, 58), end=True)
    second.end_turn()
    second.close()
    assert (b.manager.stats().tracked_conversations, b.manager.stats().retained_turns) == (0, 0)
    assert b.probe([*range(50, 58), 1]) == 8


@pytest.mark.parametrize("kind", [{}, {"windows": (8,)}, {"recurrent": 1}])
def test_a_request_suspended_before_its_final_chunk_ends(bench, caplog, kind):
    """B19: no commit and no plan while it is suspended; nothing is lost when it comes back."""
    b = bench(turns=1, **kind)
    b.turn(range(100, 104), "c")
    cache = b.start(range(8), "c")
    b.compute(cache, range(4))
    cache.resize(8)
    if "recurrent" not in kind:  # a state has one place: what was not appended is in nobody's state
        b.model.compute(cache, np.arange(4, 8, dtype=np.int32))
    cache.suspend()
    for call in (
        lambda: cache.append_computed(np.arange(4, 8, dtype=np.int32), end_of_prompt=True),
        cache.end_turn,
    ):
        with pytest.raises(SuspendedSequenceError, match="resume"):
            call()
    assert (cache.num_computed_tokens, cache.num_committed_tokens, b.probe(range(9))) == (4, 0, 0)
    assert [turn.num_tokens for turn in b.manager.ledger.get("c").turns] == [4]
    assert cache.resume()
    b.check(cache)
    b.compute(cache, range(4, 8), end=True)
    cache.end_turn()
    cache.close()
    assert [turn.num_tokens for turn in b.manager.ledger.get("c").turns] == [8]
    assert b.probe([*range(8), 1]) == 8
    assert not caplog.records


def test_a_request_that_is_closed_while_suspended_frees_its_conversation(bench, caplog):
    """B19"""
    b = bench(turns=1)
    cache = b.start(range(8), "c")
    b.compute(cache, range(4))
    cache.suspend()
    cache.close()
    with caplog.at_level(logging.WARNING):
        assert b.turn(range(8), "c") == 0
    assert not caplog.records


def test_scopes_isolate_in_both_directions(bench):
    """A21"""
    b = bench(policy="per_request")
    scopes = [ReuseScope(*pair) for pair in [("7", "11"), ("7", "12"), ("8", "11"), ("7", None), (None, "11")]]
    scopes.append(ReuseScope())
    for number, scope in enumerate(scopes):
        assert [b.probe([*range(12), 1], other) for other in scopes[number:]] == [0] * (len(scopes) - number)
        b.turn(range(12), scope=scope)
        assert b.probe([*range(12), 1], scope) == 12
