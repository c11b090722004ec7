"""Routing policies: affinity, load, ties, and what happens when a worker goes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from cluster.config import RouterConfig
from cluster.routing import ConversationRouter, PrefixIndex, RouteRequest, make_router


@dataclass
class Worker:
    worker_id: str
    active_requests: int = 0


def request(tokens: range | list[int], conversation: str | None = None, salt: str | None = None) -> RouteRequest:
    return RouteRequest(np.asarray(list(tokens), np.int32), conversation, salt)


def router(kind: str):
    return make_router(RouterConfig(type=kind), tokens_per_block=4)


def three() -> list[Worker]:
    return [Worker("a"), Worker("b"), Worker("c")]


def test_round_robin_takes_turns_and_survives_a_missing_worker():
    policy, workers = router("round_robin"), three()
    picks = [policy.choose(request([1]), workers).worker_id for _ in range(4)]
    assert picks == ["a", "b", "c", "a"]
    assert policy.choose(request([1]), [workers[0], workers[2]]).worker_id == "c"


def test_load_balancing_prefers_the_idle_and_rotates_ties():
    policy = router("load_balancing")
    workers = [Worker("a", 2), Worker("b", 0), Worker("c", 0)]
    assert {policy.choose(request([1]), workers).worker_id for _ in range(2)} == {"b", "c"}


def test_a_conversation_stays_on_its_worker_whatever_the_load():
    policy, workers = router("conversation"), three()
    first = policy.choose(request(range(8), "conv"), workers)
    first.active_requests = 50
    for turn in range(5):
        assert policy.choose(request(range(8 + turn), "conv"), workers) is first


def test_a_lost_worker_moves_the_conversation_and_it_sticks_again():
    policy, workers = router("conversation"), three()
    first = policy.choose(request(range(8), "conv"), workers)
    policy.remove_worker(first.worker_id)
    rest = [worker for worker in workers if worker is not first]
    second = policy.choose(request(range(8), "conv"), rest)
    assert policy.choose(request(range(8), "conv"), workers) is second


def test_one_conversation_id_under_two_salts_is_two_sessions():
    policy = router("conversation")
    workers = [Worker("a"), Worker("b")]
    one = policy.choose(request([1], "conv", "x"), workers)
    one.active_requests = 9
    other = policy.choose(request([1], "conv", "y"), workers)
    assert other is not one
    assert policy.choose(request([1], "conv", "x"), workers) is one


def test_sessions_are_bounded():
    policy = ConversationRouter(4, max_sessions=2)
    workers = three()
    pinned = [policy.choose(request([1], f"c{i}"), workers) for i in range(3)]
    workers[0].active_requests = 5  # the forgotten session is placed anew, away from the busy worker
    assert policy.choose(request([1], "c0"), workers) is not workers[0]
    assert policy.choose(request([1], "c2"), workers) is pinned[2]


@pytest.mark.parametrize("kind", ["conversation", "kv_cache_aware"])
def test_without_an_id_a_prompt_follows_its_prefix(kind: str):
    policy, workers = router(kind), three()
    policy.record(request(range(16)), "b")
    assert policy.choose(request(range(18)), workers).worker_id == "b"
    policy.remove_worker("b")
    busy = [Worker("a"), Worker("b", 9)]
    assert policy.choose(request(range(18)), busy).worker_id == "a"


def test_kv_cache_aware_weighs_blocks_against_load():
    policy = router("kv_cache_aware")
    policy.record(request(range(8)), "a")  # two blocks
    assert policy.choose(request(range(8)), [Worker("a", 4), Worker("b", 0)]).worker_id == "a"
    assert policy.choose(request(range(8)), [Worker("a", 9), Worker("b", 0)]).worker_id == "b"


def test_the_prefix_index_separates_salts_and_stays_bounded():
    index = PrefixIndex(4, max_blocks=3)
    tokens = np.arange(8, dtype=np.int32)
    index.add(index.keys(tokens, None), "a")
    assert index.matched_blocks(index.keys(tokens, None)) == {"a": 2}
    assert index.matched_blocks(index.keys(tokens, "salt")) == {}
    index.add(index.keys(np.arange(100, 108, dtype=np.int32), None), "b")
    assert index.matched_blocks(index.keys(tokens, None)).get("a", 0) < 2


def test_an_unknown_router_lists_the_known_ones():
    @dataclass
    class Settings:
        type: str = "psychic"
        load_weight: float = 0.25
        max_sessions: int = 1

    with pytest.raises(ValueError, match="conversation, kv_cache_aware, load_balancing, round_robin"):
        make_router(Settings(), tokens_per_block=4)
