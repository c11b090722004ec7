"""Matching, publishing and the three policies on a full-attention model."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvcache import (
    ClosedSequenceError,
    CorruptedCacheError,
    InvalidSizeError,
    InvalidTokensError,
    NeverFitsError,
    OutOfPagesError,
    ReuseScope,
    TurnEndedError,
    UnknownLifeCycleError,
)

Make = Callable[..., object]


@pytest.mark.parametrize("policy", ["all_reusable", "per_request", "per_conversation"])
def test_linear_chat_reuses_each_previous_end(bench, policy):
    b = bench(policy=policy, turns=2)
    chat = list(range(60))
    assert [b.turn(chat[:end], "c") for end in (12, 24, 36, 48, 60)] == [0, 12, 24, 36, 48]


def test_unaligned_ends(bench):
    b = bench(turns=2)
    chat = list(range(60))
    assert [b.turn(chat[:end], "c") for end in (10, 20, 30, 40, 50)] == [0, 10, 20, 30, 40]


def test_identical_prompt_reuses_all_but_the_last_token(bench):
    b = bench()
    assert b.turn(range(12)) == 0
    assert b.probe(range(12)) == 11
    assert b.turn(range(12)) == 11


def test_rewind_on_full_attention_reuses_every_end(bench):
    b = bench(turns=1)
    chat = list(range(60))
    for end in (12, 24, 36, 48, 60):
        b.turn(chat[:end], "c")
    assert [b.probe([*chat[:end], 999]) for end in (12, 24, 36, 48, 60)] == [12, 24, 36, 48, 60]


def test_answers_are_published(bench):
    b = bench()
    prompt, answer = list(range(20)), list(range(100, 108))
    b.turn(prompt, "c", answer)
    assert b.probe([*prompt, *answer, *range(200, 204)]) == 27


def test_partial_reuse_and_its_switch(bench):
    for partial, expected in ((True, 9), (False, 8)):
        b = bench(enable_partial_reuse=partial)
        b.turn(range(12))
        assert b.probe(range(10)) == expected


def test_reuse_off(bench):
    b = bench(enable_block_reuse=False)
    assert b.turn(range(12), "c") == 0
    assert b.turn(range(12), "c") == 0
    assert b.cached() == 0


def test_all_reusable_publishes_at_each_chunk(bench):
    b = bench(policy="all_reusable")
    cache = b.start(range(8))
    b.compute(cache, range(4))
    assert cache.num_committed_tokens == 4
    cache.close()
    assert b.probe(range(8)) == 4


@pytest.mark.parametrize("policy", ["per_request", "per_conversation"])
def test_others_publish_at_the_end_of_the_prompt(bench, policy):
    b = bench(policy=policy)
    cache = b.start(range(6), "c")
    b.compute(cache, range(4))
    assert (cache.num_committed_tokens, cache.num_computed_tokens) == (0, 4)
    b.compute(cache, range(4, 6), end=True)
    assert cache.num_committed_tokens == 6
    cache.close()
    assert b.probe(range(7)) == 6


def test_cancel_publishes_nothing(bench):
    b = bench()
    cache = b.start(range(8), "c")
    b.compute(cache, range(4))
    cache.close()
    cache.close()
    assert b.probe(range(8)) == 0
    assert b.manager.stats().tracked_conversations == 0


def test_partial_block_is_not_rebased_and_not_written(bench):
    b = bench(block=8, policy="per_request")
    b.turn([*range(13)])
    b.turn([*range(16)])
    page_before = bytes(b.storage.page(int(b.manager.tree.rows(*_leaf(b))[0, 1])))
    cache = b.start([*range(12), 77])
    assert cache.num_reused_tokens == 12
    b.compute(cache, [77], end=True)
    b.compute(cache, [78, 79])
    assert bytes(b.storage.page(int(b.manager.tree.rows(*_leaf(b))[0, 1]))) == page_before
    cache.end_turn()
    cache.close()
    assert b.probe([*range(16), 1]) == 16


def _leaf(b):
    node = max(
        (n for n in b.manager.tree.nodes() if n.parent is not None and 13 not in n.locks), key=lambda n: n.length
    )
    found = b.manager.tree.match(ReuseScope().digest(), np.arange(16, dtype=np.int32), True)
    assert node is not None and found is not None
    return found.node, found.offset


def test_scopes_do_not_share(bench):
    b = bench()
    own = ReuseScope("lora7", "salt11")
    b.turn(range(12), scope=own)
    others = [("lora7", "salt12"), ("lora8", "salt11"), ("lora7", None), (None, "salt11"), (None, None), ("", "salt11")]
    assert [b.probe(range(13), ReuseScope(*other)) for other in others] == [0] * len(others)
    assert b.probe(range(13), own) == 12
    assert len({ReuseScope(*other).digest() for other in [*others, ("lora7", "salt11")]}) == 7


def test_divergence_splits_a_run_and_both_stay_reusable(bench):
    b = bench(policy="per_request")
    first, second = [*range(20)], [*range(10), *range(50, 60)]
    assert b.turn(first) == 0
    assert b.turn(second) == 10
    assert b.probe([*first, 1]) == 20
    assert b.probe([*second, 1]) == 20
    assert b.cached() == 5 + 3


def test_two_running_requests_with_the_same_prompt(bench):
    b = bench(policy="per_request")
    one, two = b.start(range(10)), b.start(range(10))
    b.compute(one, range(10), end=True)
    b.compute(two, range(10), end=True)
    b.compute(one, [100, 101, 102, 103])
    b.compute(two, [200, 201, 202, 203])
    one.end_turn()
    two.end_turn()
    b.check(one)
    b.check(two)
    one.close()
    b.check(two)
    two.close()
    assert b.probe([*range(10), 100, 101, 102, 103, 1]) == 14
    assert b.probe([*range(10), 200, 201, 202, 203, 1]) == 14
    assert b.cached() == 2 + 2 + 2


def test_eviction_takes_exactly_what_is_needed_from_the_tail(bench):
    b = bench(pages=10, policy="per_request")
    b.turn(range(40))
    assert b.cached() == 10
    assert b.turn(range(100, 112)) == 0
    assert b.probe(range(40)) == 28
    assert b.manager.stats().evicted_blocks == 3


def test_eviction_is_least_recently_used(bench):
    b = bench(pages=9, policy="per_request")
    b.turn(range(12))
    b.turn(range(100, 112))
    b.turn(range(200, 212))
    b.turn(range(12))
    b.turn(range(300, 308))
    assert b.probe(range(13)) == 12
    assert b.probe(range(100, 113)) == 4


def test_superseded_blocks_go_first(bench):
    b = bench(pages=12, turns=1)
    b.turn(range(16), "c")
    b.turn([*range(8), *range(50, 58)], "c")  # the old turn is dropped: its blocks 2 and 3 are on no path any more
    assert b.manager.stats().superseded_blocks == 2
    b.turn(range(200, 212), "older")
    b.turn([*range(16), 1], None)  # still matchable while nobody needs their pages
    assert b.manager.stats().superseded_blocks == 0


def test_superseded_before_least_recently_used(bench):
    b = bench(pages=9, turns=1)
    b.turn(range(200, 208), "other")
    b.turn(range(16), "c")
    b.turn([*range(8), *range(50, 58)], "c")
    assert b.manager.stats().superseded_blocks == 2
    b.turn(range(300, 308), "third")
    assert b.probe(range(200, 209)) == 8
    assert b.probe(range(17)) == 12


def test_pages_in_use_are_never_evicted(bench):
    b = bench(pages=6, policy="per_request")
    b.turn(range(16))
    cache = b.start([*range(16), 90])
    b.compute(cache, [90])
    other = b.start(range(200, 208))
    with pytest.raises(OutOfPagesError):
        other.resize(8)
    assert other.capacity_tokens == 0
    b.check(cache)
    cache.close()
    other.resize(8)
    other.close()


def test_a_copy_source_in_the_way_is_given_up(bench):
    b = bench(pages=4, policy="per_request")
    b.turn(range(14))
    cache = b.start([*range(14), 90, 91])
    assert cache.num_reused_tokens == 14
    cache.resize(16)
    assert cache.num_computed_tokens == 12
    b.compute(cache, [12, 13, 90, 91], end=True)
    cache.close()


def test_pin_outlives_close(bench):
    b = bench(pages=4, policy="per_request")
    cache = b.start(range(12))
    b.compute(cache, range(12), end=True)
    pin = cache.pin_for_peer()
    cache.close()
    assert (b.manager.stats().peer_pins, b.manager.stats().pinned_pages) == (1, 3)
    other = b.start(range(50, 58))
    with pytest.raises(OutOfPagesError):
        other.resize(8)
    b.manager.check_integrity()
    pin.release()
    pin.release()
    assert b.manager.stats().peer_pins == 0
    other.resize(8)
    other.close()


def test_generation_rises_each_time_a_page_is_given_out(bench):
    b = bench(pages=2, enable_block_reuse=False)
    seen = []
    for _ in range(3):
        cache = b.start(range(8))
        b.compute(cache, range(8), end=True)
        table = cache.block_table()
        seen.append(dict(zip(table.pages.tolist(), table.generations.tolist(), strict=True)))
        cache.close()
    assert [seen[i + 1][page] - seen[i][page] for i in range(2) for page in (0, 1)] == [1, 1, 1, 1]


def test_block_table(bench):
    b = bench()
    cache = b.start(range(10))
    b.compute(cache, range(10), end=True)
    table = cache.block_table(5)
    assert (table.ordinals.tolist(), table.valid_tokens.tolist()) == ([1, 2], [4, 2])
    assert cache.block_table(0, 8).valid_tokens.tolist() == [4, 4]
    with pytest.raises(InvalidSizeError):
        cache.block_table(0, 13)
    with pytest.raises(UnknownLifeCycleError):
        cache.pages(1)
    cache.close()


def test_bad_input_changes_nothing(bench):
    b = bench(pages=4)
    for tokens in ([], [[1]], [-1], [2**31], [1.5]):
        with pytest.raises(InvalidTokensError):
            b.manager.create("r", np.array(tokens))
    with pytest.raises(InvalidTokensError):
        b.manager.create("r", np.array([1, 2, -3], dtype=np.int32), conversation_id="c")
    assert b.manager.stats().tracked_conversations == 0
    cache = b.start(range(8))
    for size in (0, -1):
        with pytest.raises(InvalidSizeError):
            cache.resize(size)
    with pytest.raises(NeverFitsError):
        cache.resize(17)
    cache.resize(8)
    with pytest.raises(InvalidSizeError):
        cache.append_computed(np.arange(9, dtype=np.int32))
    with pytest.raises(InvalidTokensError):
        cache.append_computed(np.array([5], dtype=np.int32))
    b.check(cache)
    b.compute(cache, range(8), end=True)
    cache.end_turn()
    with pytest.raises(TurnEndedError):
        cache.end_turn()
    with pytest.raises(TurnEndedError):
        cache.append_computed(np.array([8], dtype=np.int32))
    cache.close()
    with pytest.raises(ClosedSequenceError):
        cache.resize(9)
    assert b.manager.stats().open_sequences == 0


def test_a_broken_invariant_poisons(bench):
    b = bench()
    b.turn(range(8))
    b.manager.pools[0].refs[0] += 1
    with pytest.raises(CorruptedCacheError):
        b.manager.check_integrity()
    assert b.manager.stats().poison_reason
    with pytest.raises(CorruptedCacheError, match="poisoned"):
        b.manager.create("r", np.arange(3, dtype=np.int32))
    b.manager.pools[0].refs[0] -= 1
    b.manager.poison_reason = None


def test_clear_keeps_what_is_in_use(bench):
    b = bench(turns=2)
    b.turn(range(16), "c")
    cache = b.start([*range(16), 90, 91], "c")
    b.compute(cache, [90])
    b.manager.clear()
    assert (b.cached(), b.manager.stats().tracked_conversations) == (0, 0)
    b.compute(cache, [91], end=True)
    cache.end_turn()
    cache.close()
    assert b.probe([*range(16), 90, 91, 1]) == 18


def test_empty_root_goes(bench):
    b = bench(pages=3, policy="per_request")
    for salt in range(20):
        b.turn(range(12), scope=ReuseScope(cache_salt=str(salt)))
    assert len(b.manager.tree.roots) == 1


def test_a_copy_source_that_another_request_replaces(bench):
    """Between `create` and the first `resize` the partial block may get a longer page, and its own is given out."""
    b = bench(policy="per_request")
    b.turn([1, 2, 3])
    waiting = b.start([1, 2, 3, 50, 51])
    b.turn([1, 2, 3, 60, 61])
    b.turn(range(200, 208))
    b.compute(waiting, [50, 51], end=True)
    waiting.close()


def test_a_run_that_is_unlocked_by_a_copy_and_a_split_is_evicted_again(bench):
    """A reader's lock covers a whole run when eviction looks at it, and only its front later on."""
    b = bench(pages=8, policy="per_request")
    b.turn(range(16))
    b.turn(range(200, 208))
    reader = b.start([*range(14), 90, 91])  # the last block is matched in part: locked until it is copied
    other = b.start(range(100, 116))
    other.resize(16)  # eviction looks at the first run, finds it locked, and takes the second one
    other.close()
    b.compute(reader, [90, 91], end=True)  # splits the run: nobody relies on its last block any more
    reader.close()
    last = b.start(range(300, 332))
    last.resize(32)  # all eight pages: every cached block must go
    assert b.cached() == 0
    last.close()
