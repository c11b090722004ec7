"""What a caller can get wrong: a named error that says what to change, nothing changed, integrity holds."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import kvcache
from kvcache import (
    BlockTable,
    BytesPageStorage,
    ClosedManagerError,
    ClosedSequenceError,
    CorruptedCacheError,
    DropHandleUsedError,
    EvictionPolicyName,
    InvalidArgumentError,
    InvalidSizeError,
    InvalidTokensError,
    KvCacheConfig,
    KvCacheManager,
    NeverFitsError,
    OutOfPagesError,
    PinLimitError,
    ReuseScope,
    TurnEndedError,
    UnknownLifeCycleError,
)
from kvcache.conversation_manager import ConversationManager
from kvcache.testing import pattern_layout


def picture(b) -> object:
    """Everything that a refused call might have changed."""
    pools = [(pool.free_list().tolist(), pool.refs.tolist(), pool.plan_count.tolist()) for pool in b.manager.pools]
    return b.manager.stats(), pools, [pool.generations.tolist() for pool in b.manager.pools]


def refused(b, error: type[Exception], call: Callable[[], object], match: str = ".") -> None:
    before = picture(b)
    with pytest.raises(error, match=match):
        call()
    assert picture(b) == before
    b.manager.check_integrity()


NO_PROMPTS = {
    "empty": [],
    "empty array": np.zeros(0, dtype=np.int32),
    "two dimensions": [[1, 2], [3, 4]],
    "a number": 5,
    "None": None,
    "a text": "abc",
    "texts": ["a", "b"],
    "fractions": [1.5, 2.0],
    "truth values": np.array([True, False]),
    "negative": [-1],
    "negative int32": np.array([1, 2, -3], dtype=np.int32),
    "2^31": [2**31],
    "2^31 as uint32": np.array([2**31], dtype=np.uint32),
    "2^63 as uint64": np.array([1, 2**63], dtype=np.uint64),
    "2^70": [2**70],
}


@pytest.mark.parametrize("kind", NO_PROMPTS)
@pytest.mark.parametrize("policy", ["all_reusable", "per_request", "per_conversation"])
def test_what_is_no_prompt(bench, kind, policy):
    b = bench(policy=policy)
    b.turn(range(8), "c")
    refused(
        b, InvalidTokensError, lambda: b.manager.create("bad", NO_PROMPTS[kind], conversation_id="new"), "token ids"
    )
    if kind != "negative int32":  # a probe only compares, and nothing cached is negative
        refused(b, InvalidTokensError, lambda: b.manager.probe_reuse(NO_PROMPTS[kind]), "token ids")
        refused(b, InvalidTokensError, lambda: b.manager.prefetch(NO_PROMPTS[kind]), "token ids")
        refused(b, InvalidTokensError, lambda: b.manager.provenance(NO_PROMPTS[kind]), "token ids")
    assert b.probe([*range(8), 1]) == 8


def test_the_largest_token_id(bench):
    b = bench()
    top = 2**31 - 1
    assert b.turn([top, 0, top], "c") == 0
    assert b.manager.probe_reuse(np.array([top, 0, top, 1], dtype=np.uint64)) == 3


@pytest.mark.parametrize("size", [0, -1, -(2**40), 7, 2.5, 8.0, "8", None])
def test_sizes(bench, size):
    b = bench(turns=2)
    b.turn(range(8), "c")
    cache = b.start([*range(8), 50, 51], "c")
    b.compute(cache, [50])
    refused(b, InvalidSizeError, lambda: cache.resize(size))
    b.compute(cache, [51], end=True)
    cache.end_turn()
    cache.close()


@pytest.mark.parametrize("size", [0, -1, 65, 2.5, "8", None])
def test_budgets(bench, size):
    b = bench()
    b.turn(range(8), "c")
    refused(b, InvalidSizeError, lambda: b.manager.set_budget(size), r"1 \.\. 64 pages")


def test_other_sizes(bench):
    b = bench(event_buffer_max_size=10)
    cache = b.start(range(12))
    b.compute(cache, range(8))
    refused(b, InvalidSizeError, lambda: cache.chunk_end(7), "8 tokens are computed")
    refused(b, InvalidSizeError, lambda: b.manager.poll_events(-1))
    for start, end in ((-1, 4), (5, 4), (0, 13), (0, -1)):
        refused(b, InvalidSizeError, lambda start=start, end=end: cache.block_table(start, end), "not within")
    cache.close()


@pytest.mark.parametrize("counts", [[0], [-1], [4, 4], []])
def test_pools_of_no_size(counts):
    with pytest.raises(InvalidSizeError, match="page"):
        BytesPageStorage(pattern_layout(4), counts)


def test_commit_past_capacity(bench):
    b = bench(pages=8)
    cache = b.start(range(16))
    cache.resize(6)
    refused(b, InvalidSizeError, lambda: cache.append_computed(np.arange(7, dtype=np.int32)), "capacity of 6: resize")
    # the block has room, the capacity has not
    refused(b, InvalidSizeError, lambda: cache.append_computed(np.arange(8, dtype=np.int32)), "capacity of 6: resize")
    b.compute(cache, range(6))
    cache.resize(8)
    refused(
        b, InvalidTokensError, lambda: cache.append_computed(np.array([99], dtype=np.int32)), "differ from its prompt"
    )
    cache.close()


def test_tokens_that_contradict_the_prompt(bench):
    b = bench()
    cache = b.start(range(8))
    cache.resize(12)
    for tokens in ([1], [0, 1, 2, 4], [*range(8), -1], [2**31]):
        refused(b, InvalidTokensError, lambda tokens=tokens: cache.append_computed(np.array(tokens)))
    assert cache.num_computed_tokens == 0
    cache.close()


def test_appending_before_the_match_is_copied(bench):
    b = bench(policy="per_request")
    b.turn(range(10))
    cache = b.start([*range(10), 50, 51, 52])
    refused(b, InvalidSizeError, lambda: cache.append_computed(np.array([50], dtype=np.int32)), "resize")
    cache.close()


@pytest.mark.parametrize("kind", [{}, {"windows": (8,)}, {"mla": True}])
def test_more_tokens_than_the_pool_can_ever_hold(bench, kind):
    b = bench(pages=8, turns=1, **kind)
    b.turn(range(8), "c")
    cache = b.start([*range(8), *range(50, 90)], "c")
    refused(b, NeverFitsError, lambda: cache.resize(48), "shorten the request or raise kv_cache_config.max_tokens")
    refused(b, NeverFitsError, lambda: cache.resize(10**12), "max_tokens")
    cache.close()
    assert b.probe([*range(8), 1]) == 8


def test_want_of_pages_for_now(bench):
    b = bench(pages=8)
    first, second = b.start(range(20)), b.start(range(100, 120))
    b.compute(first, range(20))
    refused(b, OutOfPagesError, lambda: second.resize(16), "try again when another sequence has closed")
    first.close()
    second.resize(16)
    second.close()


@pytest.mark.parametrize("group", [-1, 1, 7, "0", None])
def test_unknown_life_cycle(bench, group):
    b = bench()
    cache = b.start(range(8))
    b.compute(cache, range(8))
    for call in (
        lambda: cache.pages(group),
        lambda: cache.block_table(group=group),
        lambda: b.manager.set_budget(4, group=group),
    ):
        refused(b, UnknownLifeCycleError, call, "no life cycle")
    cache.close()


@pytest.mark.parametrize("group", [-1, 1, 7])
def test_unknown_life_cycle_of_a_storage(group):
    storage = BytesPageStorage(pattern_layout(4), [8])
    for call in (storage.num_pages, storage.region, storage.generations, storage.generations_region):
        with pytest.raises(UnknownLifeCycleError, match="the layout has 1"):
            call(group)
    storage.close()


@pytest.mark.parametrize("page", [-1, 8, 10**9])
def test_foreign_page(page):
    storage = BytesPageStorage(pattern_layout(4), [8])
    for call in (
        lambda: storage.page(page),
        lambda: storage.copy_page(page, 0),
        lambda: storage.copy_page(0, page),
    ):
        with pytest.raises(InvalidSizeError, match=r"not in 0\.\.7"):
            call()
    storage.close()


def test_a_page_that_somebody_else_holds(bench):
    """Giving a page back that one does not hold cannot be undone: the manager refuses from then on."""
    b = bench()
    cache = b.start(range(8))
    b.compute(cache, range(8))
    page = cache.pages()[:1]
    b.manager.pools[0].release(page)
    with pytest.raises(CorruptedCacheError, match="more often than it was held"), b.manager.guard():
        b.manager.pools[0].release(page)
    assert b.manager.poison_reason is not None
    for call in (
        lambda: b.manager.create("r", np.arange(3, dtype=np.int32)),
        lambda: b.manager.probe_reuse(np.arange(3, dtype=np.int32)),
        b.manager.clear,
        b.manager.check_integrity,
        cache.end_turn,
        cache.close,
    ):
        with pytest.raises(CorruptedCacheError, match=r"poisoned \(.*\): restart the worker"):
            call()
    b.manager.poison_reason = None
    b.manager.pools[0].refs[page] = 1
    b.manager.pools[0]._top -= 1
    cache.close()


def test_a_stale_page_of_a_plan_is_not_dropped(bench):
    """A drop handle names pages with their generation: what was given out anew since is somebody else's."""
    b = bench(windows=(8,), pages=4, turns=1)
    b.turn(range(8), "c")
    (handle,) = b.manager.ledger.get("c").turns
    b.turn(range(100, 116), "d")  # takes the pages
    before = b.manager.pools[1].tree_pages
    assert all(b.manager.pools[1].generations[planned.page] > planned.generation for planned in handle.pages)
    assert b.manager.end_conversation("c")
    assert handle.used and b.manager.pools[1].tree_pages == before
    b.manager.check_integrity()
    assert b.probe([*range(100, 116), 1]) == 16


def test_a_storage_of_another_model():
    storage = BytesPageStorage(pattern_layout(4), [8])
    other = pattern_layout(4, windows=(8,))
    with pytest.raises(InvalidSizeError, match="another layout"):
        KvCacheManager(other, KvCacheConfig(tokens_per_block=4), storage)
    with pytest.raises(InvalidSizeError, match="make them equal"):
        KvCacheManager(storage.layout, KvCacheConfig(tokens_per_block=8), storage)
    storage.close()


def test_everything_twice(bench):
    b = bench(turns=1)
    cache = b.start(range(8), "c")
    b.compute(cache, range(8), end=True)
    pin = cache.pin_for_peer()
    cache.end_turn()
    refused(b, TurnEndedError, cache.end_turn, "already called")
    refused(b, TurnEndedError, lambda: cache.append_computed(np.array([8], dtype=np.int32)), "turn has ended")
    cache.close()
    after = picture(b)
    cache.close()
    assert picture(b) == after
    for call in (lambda: cache.resize(9), cache.end_turn, cache.pages, cache.block_table, cache.suspend, cache.resume):
        if call == cache.resume:
            assert cache.resume() is True  # it is not suspended
        else:
            refused(b, ClosedSequenceError, call, "create a new one")
    refused(b, ClosedSequenceError, cache.pin_for_peer, "create a new one")
    pin.release()
    after = picture(b)
    pin.release()
    assert picture(b) == after
    handle = b.manager.ledger.get("c").turns.pop()
    handle.drop()
    refused(b, DropHandleUsedError, handle.drop, "already been dropped: plan a new one")
    assert b.manager.end_conversation("c") is True
    assert b.manager.end_conversation("c") is False
    b.manager.close()
    b.manager.close()


def test_pins_beyond_the_bound(bench):
    b = bench(max_peer_pins=2)
    cache = b.start(range(8))
    b.compute(cache, range(8))
    pins = [cache.pin_for_peer() for _ in range(2)]
    refused(b, PinLimitError, cache.pin_for_peer, "raise kv_cache_config.max_peer_pins")
    pins[0].release()
    pins.append(cache.pin_for_peer())
    for pin in pins:
        pin.release()
    cache.close()


@pytest.mark.parametrize("wrong", [5, b"bytes", ["a"], {}])
def test_arguments_of_another_type_do_not_poison(bench, wrong):
    b = bench()
    prompt = np.arange(4, dtype=np.int32)
    refused(b, InvalidArgumentError, lambda: b.manager.create("r", prompt, conversation_id=wrong), "is a text")
    refused(b, InvalidArgumentError, lambda: b.manager.end_conversation(wrong), "is a text")
    refused(b, InvalidArgumentError, lambda: b.manager.create("r", prompt, scope=wrong), "is a ReuseScope")
    refused(b, InvalidArgumentError, lambda: b.manager.probe_reuse(prompt, wrong), "is a ReuseScope")


def test_any_text_may_be_a_scope_or_an_id(bench):
    b = bench()
    scopes = [ReuseScope(cache_salt=text) for text in ("\ud800", "\udfff", "", "\0", "\u00e9", "e\u0301", "a" * 10_000)]
    assert len({scope.digest() for scope in scopes}) == len(scopes)
    for scope in scopes:
        b.turn(range(6), "\ud800", scope=scope)
    assert [b.probe([*range(6), 1], scope) for scope in scopes] == [6] * len(scopes)


def test_a_block_table_that_is_none():
    ids, generations = np.array([1, 0], dtype=np.int32), np.zeros(2, dtype=np.uint64)
    with pytest.raises(ValueError, match="increase strictly"):
        BlockTable(0, ids, ids, generations, ids)
    with pytest.raises(ValueError, match="one length"):
        BlockTable(0, ids[:1], ids, generations, ids)


@pytest.mark.slow
def test_a_million_conversations_are_bounded():
    """The ledger by itself: what it keeps is bounded, however many ids it is told of."""
    now = [0.0]
    ledger = ConversationManager(2, 1000, 3600.0, lambda: now[0])
    for number in range(1_000_000):
        conversation = ledger.prepare(f"c{number}", "r")
        assert conversation is not None
        ledger.bound()
        conversation.completed += 1
        conversation.turns.append(FakeHandle())
        ledger.finish(conversation, "r")
    assert len(ledger) == ledger.retained_turns == 1000
    assert FakeHandle.dropped == 999_000
    assert [c.conversation_id for c in ledger.conversations()][:2] == ["c999000", "c999001"]
    now[0] = 4000.0
    assert ledger.expire_idle() == 1000
    assert FakeHandle.dropped == 1_000_000


class FakeHandle:
    """Counts its drops."""

    dropped = 0

    def drop(self) -> int:
        FakeHandle.dropped += 1
        return 0


@pytest.mark.slow
def test_a_million_conversations_that_never_end_a_turn_leave_nothing():
    ledger = ConversationManager(2, 1000, None, lambda: 0.0)
    for number in range(1_000_000):
        conversation = ledger.prepare(f"c{number}", "r")
        assert conversation is not None
        ledger.bound()
        ledger.finish(conversation, "r")
    assert len(ledger) == 0


def test_more_open_conversations_than_the_bound(bench):
    """An open request is never cut off; the bound holds again as soon as they close."""
    b = bench(turns=1, max_tracked_conversations=3)
    opened = [b.start(range(number * 100, number * 100 + 5), f"c{number}") for number in range(10)]
    assert b.manager.stats().tracked_conversations == 10
    for number, cache in enumerate(opened):
        b.compute(cache, range(number * 100, number * 100 + 5), end=True)
        cache.end_turn()
        cache.close()
    b.turn(range(5000, 5005), "last")
    assert b.manager.stats().tracked_conversations == 3
    assert b.manager.ledger.get("last") is not None


def test_every_error_has_a_name_and_a_base():
    errors = [getattr(kvcache, name) for name in kvcache.__all__ if name.endswith("Error")]
    assert all(issubclass(error, kvcache.KvCacheError) for error in errors)


def test_a_bad_prompt_of_a_new_conversation_costs_no_other_its_turns(bench):
    b = bench(turns=1, max_tracked_conversations=1)
    b.turn(range(8), "c")
    bad = np.array([1, 2, -3], dtype=np.int32)
    refused(b, InvalidTokensError, lambda: b.manager.create("bad", bad, conversation_id="new"))
    assert b.manager.ledger.get("c") is not None


def test_the_bound_does_not_take_what_the_newcomer_reuses(bench):
    b = bench(turns=1, windows=(8,), max_tracked_conversations=1)
    b.turn(range(8), "c")
    assert b.turn([*range(8), 50], "new") == 8
    assert b.manager.stats().tracked_conversations == 1


WRONG_ENDS = {
    "a number as reason": (5, 1, InvalidArgumentError, "stop reason is a text"),
    "bytes as reason": (b"stop", 1, InvalidArgumentError, "stop reason is a text"),
    "a long reason": ("x" * 65, 1, InvalidSizeError, "at most 64 characters"),
    "an endless reason": ("x" * 10**6, 1, InvalidSizeError, "not 1000000"),
    "a text as tokens": ("stop", "a", InvalidArgumentError, "output_tokens is an integer"),
    "a fraction": ("stop", 1.5, InvalidArgumentError, "output_tokens is an integer"),
    "a truth value": ("stop", True, InvalidArgumentError, "output_tokens is an integer"),
    "negative": ("stop", -1, InvalidSizeError, r"0 \.\. 2"),
    "2^31": ("stop", 2**31, InvalidSizeError, r"0 \.\. 2"),
    "10^30": (None, 10**30, InvalidSizeError, r"0 \.\. 2"),
}


@pytest.mark.parametrize("kind", WRONG_ENDS)
@pytest.mark.parametrize("order", EvictionPolicyName)
def test_a_wrong_end_of_a_turn_ends_nothing(bench, order, kind):
    reason, tokens, error, match = WRONG_ENDS[kind]
    b = bench(pages=8, turns=1, eviction_policy=order)
    cache = b.start(range(8), "c")
    b.compute(cache, range(8), end=True)
    refused(b, error, lambda: cache.end_turn(stop_reason=reason, output_tokens=tokens), match)
    assert not cache.turn_ended
    cache.end_turn(stop_reason="x" * 64, output_tokens=np.int64(2**31 - 1))  # the largest that may be
    cache.close()
    for start in range(100, 180, 16):  # evicts, so that the order is asked
        b.turn(range(start, start + 16), "d")
    assert b.probe([*range(164, 180), 1]) == 16


def test_a_closed_manager_takes_no_request(bench):
    b = bench(turns=1)
    b.turn(range(8), "c")
    b.manager.close()
    refused(b, ClosedManagerError, lambda: b.start(range(8), "c"), "was closed: make a new one")
    assert b.manager.poison_reason is None
