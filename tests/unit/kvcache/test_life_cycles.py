"""Sliding windows and recurrent state: what is kept, what a match needs, what a dropped turn gives up.

The numbers are those of `turn_retention.json` and of the reference system's published behaviour.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import numpy as np
import pytest

from kvcache import InvalidSizeError, KvCacheConfig, NeverFitsError
from kvcache.config import RecurrentStateConfig
from kvcache.drop_handle import plan_drop
from kvcache.live_range import first_live_block
from kvcache.snapshot_points import snapshot_points

# beside the checkout, wherever below it the tests were copied to
FOLDERS = [parent / "shared" / "cases" for parent in Path(__file__).resolve().parents[4:]]
CASES = next((folder for folder in FOLDERS if folder.is_dir()), FOLDERS[0]) / "turn_retention.json"
KINDS = {
    "full": {},
    "window": {"windows": (8,)},
    "recurrent": {"recurrent": 1},
    "both": {"windows": (8,), "recurrent": 1},
}
WINDOWED = ["window", "recurrent", "both"]
ENDS = (12, 24, 36, 48, 60)


@pytest.fixture(scope="module")
def cases() -> dict:
    if not CASES.exists():
        pytest.skip(f"{CASES} is not there")
    return json.loads(CASES.read_text())


def after(b, ends, conversation="c"):
    chat = list(range(max(ends)))
    return [b.turn(chat[:end], conversation) for end in ends]


def rewinds(b, ends):
    return [b.probe([*range(end), 999]) for end in ends]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("turns", [1, 2, 5])
def test_linear(bench, cases, kind, turns):
    case = cases["linear"]
    assert after(bench(turns=turns, **KINDS[kind]), case["ends"]) == case["reused_at_each_new_turn"]


@pytest.mark.parametrize("index", range(6))
def test_rewind(bench, cases, index):
    case = cases["rewind"][index]
    for kind in ["full"] if case["life_cycles"] == "full" else WINDOWED:
        b = bench(turns=case["max_num_turns"], **KINDS[kind])
        after(b, case["ends"])
        assert rewinds(b, case["ends"]) == case["reused"], kind


@pytest.mark.parametrize("kind", WINDOWED)
def test_branch(bench, cases, kind):
    case = cases["branch"]
    b = bench(turns=case["max_num_turns"], **KINDS[kind])
    after(b, case["ends"])
    branch = [*range(case["branch_from"]), *range(500, 512)]
    assert b.turn(branch, "c") == case["branch_reuses"]
    then = {str(end): b.probe([*range(end), 999]) for end in case["ends"]}
    then["branch_end"] = b.probe([*branch, 999])
    assert then == case["then_reused"]


@pytest.mark.parametrize("kind", KINDS)
def test_regenerate(bench, cases, kind):
    case = cases["regenerate"]
    b = bench(turns=1, **KINDS[kind])
    prompt = range(case["identical_prompt_of"])
    b.turn(prompt, "c")
    again = b.turn(prompt, "c")
    # a recurrent state stands at the end of the prompt only, and the last prompt token is always computed
    assert again == (0 if "recurrent" in KINDS[kind] else case["reused"])
    assert b.probe([*prompt, 999]) == 12


@pytest.mark.parametrize("kind", WINDOWED)
def test_six_unrelated_prompts(bench, cases, kind):
    b = bench(turns=cases["six_unrelated_prompts_in_one_conversation"]["max_num_turns"], **KINDS[kind])
    prompts = [range(k * 100, k * 100 + 12) for k in range(6)]
    for prompt in prompts:
        b.turn(prompt, "c")
    assert [b.probe([*prompt, 999]) for prompt in prompts] == [0, 12, 12, 12, 12, 12]
    assert b.cached(0) == 5 * 3  # the first chain is gone completely, its full-attention blocks too


@pytest.mark.parametrize("kind", WINDOWED)
def test_answers(bench, cases, kind):
    case = cases["answers"]
    b = bench(turns=1, **KINDS[kind])
    prompt, answer = range(case["prompt"]), range(100, 100 + case["answer"])
    b.turn(prompt, "c", answer)
    following = [*prompt, *answer, *range(200, 204)]
    assert len(following) == case["next_prompt"]
    assert b.turn(following, "c") == case["reused_with_answers"]


def test_live_range(cases):
    for case in cases["window_stale_blocks"]:
        first = first_live_block(case["history"], case["block"], case["window"])
        assert list(range(first, case["history"] // case["block"])) == case["live"]


def test_snapshot_points(cases):
    for case in cases["snapshot_points"]:
        config = RecurrentStateConfig(
            periodic_snapshot_interval=case.get("interval", 0),
            additional_snapshot_offsets_from_end=tuple(case.get("from_end", ())),
        )
        assert list(snapshot_points(config, case["prompt"])) == case["points"]


@pytest.mark.parametrize("kind", ["recurrent", "both"])
def test_five_turns_hybrid(bench, cases, kind):
    case = cases["five_turns_hybrid"]
    b = bench(turns=5, **KINDS[kind])
    after(b, case["ends"])
    assert rewinds(b, case["ends"]) == case["reused"]
    b.turn(range(72), "c")
    assert rewinds(b, case["ends"]) == case["after_sixth"]
    # a rewind lands on that turn's own snapshot and continues from it
    assert b.turn([*range(36), 7, 8, 9], "d") == 36


@pytest.mark.parametrize("kind", WINDOWED)
def test_old_chain_goes_with_its_window(bench, kind):
    b = bench(turns=1, **KINDS[kind])
    b.turn(range(16), "c")
    assert b.cached(0) == 4
    b.turn(range(100, 116), "c")
    assert b.cached(0) == 4


def test_old_chain_stays_on_full_attention(bench):
    b = bench(turns=1)
    b.turn(range(16), "c")
    b.turn(range(100, 116), "c")
    assert (b.cached(0), b.manager.stats().superseded_blocks) == (8, 4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("branch_snapshot", [False, True])
def test_system_prompt_shared_by_conversations(bench, kind, branch_snapshot):
    b = bench(turns=1, enable_branch_snapshot=branch_snapshot, **KINDS[kind])
    system = [*range(16)]
    b.turn([*system, *range(100, 104)], "a")
    b.turn([*system, *range(200, 204)], "b")
    third = b.turn([*system, *range(300, 304)], "c")
    assert third == (16 if kind == "full" or branch_snapshot else 0)
    assert b.turn([*system, *range(100, 104), 1, 2], "a") == 20
    assert b.turn([*system, *range(200, 204), 1, 2], "b") == 20


@pytest.mark.parametrize("kind", WINDOWED)
def test_two_conversations_on_one_prompt_survive_until_both_move_on(bench, kind):
    b = bench(turns=1, **KINDS[kind])
    b.turn(range(16), "a")
    b.turn(range(16), "b")
    b.turn(range(100, 112), "a")
    assert b.probe([*range(16), 1]) == 16
    b.turn(range(200, 212), "b")
    assert b.probe([*range(16), 1]) == 0


@pytest.mark.parametrize("kind", WINDOWED)
@pytest.mark.parametrize("anonymous_first", [False, True])
def test_an_anonymous_publisher_counts(bench, kind, anonymous_first):
    b = bench(turns=1, **KINDS[kind])
    for conversation in (None, "a") if anonymous_first else ("a", None):
        b.turn(range(16), conversation)
    b.turn(range(100, 112), "a")
    assert b.probe([*range(16), 1]) == 16


@pytest.mark.parametrize("kind", WINDOWED)
def test_a_page_that_is_read_survives_the_drop(bench, kind):
    b = bench(turns=1, **KINDS[kind])
    b.turn(range(16), "c")
    reader = b.start([*range(16), 50], "d")
    b.turn(range(100, 112), "c")
    b.compute(reader, [50], end=True)
    reader.end_turn()
    reader.close()
    assert b.probe([*range(16), 50, 1]) == 17


@pytest.mark.parametrize("kind", WINDOWED)
def test_no_plan_when_a_page_is_missing(bench, kind):
    b = bench(turns=2, **KINDS[kind])
    b.turn(range(12), "c")
    tree, handle = b.manager.tree, b.manager.ledger.get("c").turns[-1]
    node, offset = handle.endpoint.node, handle.endpoint.offset
    whole = plan_drop(tree, node, offset)
    assert whole is not None
    whole.drop()
    planned = handle.pages[0]
    if planned.ordinal >= 0:
        b.manager.pools[planned.group].coverage[planned.page] -= 1
    else:
        tree.drop_state(node, (planned.group, planned.position))
    assert plan_drop(tree, node, offset) is None


def test_a_turn_without_plan_leaves_the_queue_alone(bench, caplog):
    b = bench(turns=1)
    b.turn(range(12), "c")
    conversation = b.manager.ledger.get("c")
    b.manager.ledger.save_plan(conversation, lambda: None)
    assert "not retained" in caplog.text
    assert [handle.num_tokens for handle in conversation.turns] == [12]


def test_handles_share_pages_between_prompts_of_different_length(bench):
    b = bench(block=8, windows=(8,), policy="all_reusable")
    b.turn(range(24))
    tree = b.manager.tree
    node = next(n for n in tree.nodes() if n.parent is not None)
    short, long = plan_drop(tree, node, 8), plan_drop(tree, node, 24)
    assert b.probe([*range(8), 999]) == 8
    short.drop()
    assert (b.probe([*range(8), 999]), b.probe([*range(24), 999])) == (0, 24)
    long.drop()
    assert b.probe([*range(24), 999]) == 16


def test_window_kept_at_the_prompt_end_only(bench):
    b = bench(block=32, windows=(64,), policy="per_request")
    cache = b.start(range(128))
    b.compute(cache, range(64))
    b.compute(cache, range(64, 128), end=True)
    assert (cache.pages(1) >= 0).tolist() == [False, False, True, True]
    cache.end_turn()
    cache.close()
    assert b.probe([*range(128), 1]) == 128
    assert b.probe([*range(96), 999]) == 0


def test_all_reusable_keeps_every_window_page(bench):
    b = bench(windows=(8,), policy="all_reusable")
    cache = b.start(range(40))
    for first in range(0, 40, 8):
        b.compute(cache, range(first, first + 8), end=first == 32)
    cache.close()
    assert [b.probe([*range(end), 999]) for end in (8, 16, 24, 40)] == [8, 16, 24, 40]
    assert b.cached(1) == 10


def test_identical_prompt_on_a_window_model(bench):
    b = bench(windows=(8,), policy="per_request")
    b.turn(range(16))
    assert b.turn(range(16)) == 15


def test_the_reused_length_is_common_to_all_windows(bench):
    b = bench(windows=(4, 16), policy="per_request")
    b.turn(range(32))
    assert b.probe([*range(32), 1]) == 32
    # both windows would have to reach back: the wide one still covers 24, the narrow one does not
    assert b.probe([*range(24), 999]) == 0


def test_branch_point_numbers(bench):
    system = [*range(192)]
    prompts = [[*system, *range(k * 1000, k * 1000 + 64)] for k in (1, 2, 3)]
    starts = {False: [[0, 128], [0, 128], [0, 128]], True: [[0, 128], [0, 128, 192], [192]]}
    for flag, expected in starts.items():
        b = bench(block=32, pages=64, windows=(64,), policy="per_request", enable_branch_snapshot=flag)
        seen = []
        for prompt in prompts:
            cache, chunks = b.start(prompt), []
            while cache.num_computed_tokens < 256:
                first = cache.num_computed_tokens
                chunks.append(first)
                end = cache.chunk_end(min(256, first + 128))
                b.compute(cache, prompt[first:end], end=end == 256)
            cache.end_turn()
            cache.close()
            seen.append(chunks)
        assert seen == expected


def test_explicit_point_ends_the_commit(bench):
    b = bench(
        block=8,
        recurrent=1,
        policy="per_request",
        recurrent_state_config=RecurrentStateConfig(additional_snapshot_offsets_from_start=(137,)),
    )
    cache = b.start(range(150))
    assert cache.chunk_end(150) == 137
    b.compute(cache, range(137))
    assert cache.num_committed_tokens == 137
    b.compute(cache, range(137, 150), end=True)
    assert cache.num_committed_tokens == 137
    cache.close()
    assert b.probe([*range(150), 1]) == 137


def test_a_snapshot_must_be_met_exactly(bench):
    b = bench(block=32, recurrent=1, turns=2)
    a, other, third = range(64), range(100, 164), range(200, 264)
    b.turn(a, "c")
    assert (b.probe(a), b.probe([*a, 1])) == (0, 64)
    b.turn(other, "c")
    assert (b.probe([*a, 1]), b.probe([*other, 1])) == (64, 64)
    b.turn(third, "c")
    assert (b.probe([*a, 1]), b.probe([*other, 1])) == (0, 64)


def test_two_turns_ending_in_one_block_keep_both_states(bench):
    """Beyond the reference, which keeps one snapshot a block: a rewind to a retained turn recomputes nothing."""
    b = bench(block=8, recurrent=1, turns=2)
    after(b, (10, 14))
    assert rewinds(b, (10, 14)) == [10, 14]
    b.turn(range(20), "c")
    assert rewinds(b, (10, 14, 20)) == [0, 14, 20]


def test_periodic_interval_is_switched_off_per_conversation():
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        config = KvCacheConfig.model_validate(
            {
                "block_reuse_config": {"policy": "per_conversation", "max_num_turns": 2},
                "recurrent_state_config": {
                    "periodic_snapshot_interval": 64,
                    "additional_snapshot_offsets_from_end": [0],
                },
            }
        )
    assert len(seen) == 1 and "64" in str(seen[0].message) and "setting it to 0" in str(seen[0].message)
    state = config.recurrent_state_config
    assert (state.periodic_snapshot_interval, state.additional_snapshot_offsets_from_end) == (0, (0,))
    assert snapshot_points(state, 150) == (150,)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        KvCacheConfig.model_validate(
            {
                "block_reuse_config": {"policy": "per_conversation"},
                "recurrent_state_config": {"periodic_snapshot_interval": 0},
            }
        )
    assert not seen


def test_outstanding_handles_at_shutdown(bench):
    b = bench(windows=(8,), turns=5)
    after(b, ENDS)
    b.manager.clear()
    b.manager.check_integrity()
    assert [pool.free for pool in b.manager.stats().pools] == [64, 64]


def test_window_pool_too_small_for_the_window(bench):
    b = bench(windows=(8,), pages=4)
    cache = b.start(range(12))
    with pytest.raises(NeverFitsError):
        cache.resize(20)
    cache.close()


def test_state_of_a_transfer_needs_only_the_live_range(bench):
    b = bench(windows=(8,), turns=1)
    cache = b.start(range(40))
    cache.resize(40, history=40)
    assert (cache.pages(1) >= 0).tolist() == [False] * 8 + [True] * 2
    table = cache.block_table(0, 40, group=1)
    assert table.ordinals.tolist() == [8, 9]
    b.model.compute(cache, np.arange(40, dtype=np.int32))
    cache.append_computed(np.arange(40, dtype=np.int32), end_of_prompt=True)
    b.check(cache)
    cache.end_turn()
    cache.close()
    assert b.probe([*range(40), 1]) == 40


def test_a_partial_match_out_of_the_window_of_the_history_is_not_copied(bench):
    b = bench(windows=(8,), policy="per_request")
    b.turn(range(10))
    cache = b.start([*range(10), *range(50, 80)])
    assert cache.num_reused_tokens == 10
    cache.resize(40, history=40)  # the window's block 2, matched in part, is stale by then: it gets no page
    assert (cache.pages(1) >= 0).tolist() == [True] * 2 + [False] * 6 + [True] * 2
    rest = np.arange(50, 80, dtype=np.int32)
    b.model.compute(cache, rest)
    cache.append_computed(rest, end_of_prompt=True)
    b.check(cache)
    cache.end_turn()
    cache.close()
    assert b.probe([*range(10), *range(50, 80), 1]) == 40


@pytest.mark.parametrize("history", [-1, 3, 9])
def test_a_history_that_cannot_be(bench, history):
    b = bench(windows=(8,))
    b.turn(range(4), "c")
    cache = b.start([*range(4), 50, 51, 52, 53], "c")
    with pytest.raises(InvalidSizeError, match=r"4 \.\. 8"):
        cache.resize(8, history=history)
    assert (cache.capacity_tokens, cache.blocks) == (4, 1)
    cache.close()


def test_a_partial_window_page_that_another_block_took_over_is_published_as_a_copy(bench):
    """While a turn is decoded another request publishes a longer block with the same beginning, without a window page
    of its own there: it takes the turn's page over. The turn is retained at its very end all the same.
    """
    b = bench(windows=(8,), turns=2)
    turn = b.start(range(10), "c")
    b.compute(turn, range(10), end=True)
    other = b.start([*range(10), *range(70, 100)], "d")
    other.resize(40, history=40)  # a transfer: the window's pages at the end only
    rest = np.array([*range(10), *range(70, 100)][other.num_computed_tokens :], dtype=np.int32)
    b.model.compute(other, rest)
    other.append_computed(rest, end_of_prompt=True)
    b.compute(turn, [50, 51, 52])
    turn.end_turn()
    turn.close()
    assert [handle.num_tokens for handle in b.manager.ledger.get("c").turns] == [13]
    assert b.probe([*range(10), 50, 51, 52, 999]) == 13
    other.end_turn()
    other.close()
    assert b.probe([*range(10), *range(70, 100), 999]) == 40
