"""The learned eviction order: what it learns, whom it gives up first, and when it is plain LRU."""

from __future__ import annotations

import numpy as np
import pytest

from kvcache import EvictionPolicyName
from kvcache.eviction import ReturnHazard, TurnAwareOrder
from kvcache.eviction.leaf_heap import LeafHeap
from kvcache.radix_node import RadixNode


def worth(hazard: ReturnHazard, kinds: list[int], ages: list[float], patience: float = 5.0) -> list[float]:
    where = np.array(kinds), np.array(ages, dtype=float)
    hazard.learn(*where)
    return hazard.worth(*where, patience).tolist()


def taught(*lessons: tuple[str, float], times: int = 60) -> tuple[ReturnHazard, dict[str, int]]:
    hazard = ReturnHazard()
    kinds = {reason: hazard.class_of(reason, None, None) for reason, _ in lessons}
    for _ in range(times):
        for reason, gap in lessons:
            hazard.returned(kinds[reason], gap)
    return hazard, kinds


def test_hazard_learns_who_comes_back():
    hazard, kind = taught(("tool_use", 5.0), ("end_turn", 500.0))
    tool, end = kind["tool_use"], kind["end_turn"]
    soon = worth(hazard, [tool, end], [1.0, 1.0])
    assert soon[0] > 5 * soon[1]
    hazard, _ = taught(("tool_use", 5.0), ("end_turn", 500.0))
    later = worth(hazard, [tool, end], [300.0, 300.0])
    assert later[1] > later[0]


def test_worth_looks_past_a_pause():
    """After 60 s nobody has come back before 500 s: what counts is how long one must wait for it."""
    hazard, kind = taught(("end_turn", 500.0))
    near, far = worth(hazard, [kind["end_turn"]] * 2, [470.0, 60.0])
    assert 0 < far < near


def test_worth_is_what_the_index_promises():
    """One class, many observations: returns at a constant rate are worth that rate, whatever the time away."""
    hazard = ReturnHazard()
    kind = hazard.class_of("stop", None, None)
    gaps = np.random.default_rng(3).exponential(100.0, 20_000)
    for gap in gaps.tolist():
        hazard.returned(kind, gap)
    assert worth(hazard, [kind] * 3, [0.0, 50.0, 150.0], 0.001) == pytest.approx([0.01] * 3, rel=0.15)


def test_conversations_that_never_return_lower_the_worth():
    hazard, kind = taught(("stop", 10.0), times=20)
    alone = worth(hazard, [kind["stop"]], [0.0])[0]
    hazard, kind = taught(("stop", 10.0), times=20)
    crowd = worth(hazard, [kind["stop"]] * 200, [0.0] + [1000.0] * 199)[0]
    assert crowd < alone / 3


def test_a_class_without_observations_leans_on_its_stop_reason():
    hazard, _ = taught(("tool_use", 5.0), ("end_turn", 500.0))
    tool, end = (hazard.class_of(reason, 200.0, 1000) for reason in ("tool_use", "end_turn"))
    soon = worth(hazard, [tool, end], [1.0, 1.0])
    assert soon[0] > 3 * soon[1]


def test_many_stop_reasons_share_the_last_class():
    hazard = ReturnHazard()
    kinds = {hazard.class_of(f"reason{k}", None, None) for k in range(50)}
    assert len(kinds) == 7


def test_a_return_before_its_turn_ended_counts_as_at_once():
    """A clock that was set back."""
    hazard, kind = taught(("stop", -5.0))
    same, _ = taught(("stop", 0.0))
    assert worth(hazard, [kind["stop"]] * 2, [0.0, 3000.0]) == worth(same, [kind["stop"]] * 2, [0.0, 3000.0])


def serve(b, now, conversation, tokens, reason, wait):
    cache = b.start(tokens, conversation)
    b.compute(cache, tokens[cache.num_computed_tokens :], end=True)
    cache.end_turn(stop_reason=reason, output_tokens=10)
    cache.close()
    now[0] += wait


def trained(bench, reason):
    now = [0.0]
    b = bench(pages=24, turns=2, eviction_policy=EvictionPolicyName.TURN_AWARE, clock=lambda: now[0])
    for k in range(40):  # tools return after five seconds, users never
        serve(b, now, "tool", [*range(8 + k % 3)], reason("tool_use"), 5.0)
        serve(b, now, f"user{k}", [*range(1000 + 10 * k, 1004 + 10 * k)], reason("end_turn"), 1.0)
    return b, now


def test_who_waits_for_a_user_goes_before_who_waits_for_a_tool(bench):
    b, now = trained(bench, lambda reason: reason)
    assert b.manager.tree.order.informed
    b.manager.clear()
    serve(b, now, "tool", [*range(500, 540)], "tool_use", 1.0)  # the older one
    serve(b, now, "user", [*range(600, 640)], "end_turn", 1.0)
    serve(b, now, "third", [*range(700, 732)], "tool_use", 0.0)
    assert b.probe([*range(500, 540), 1]) == 40
    assert b.probe([*range(600, 640), 1]) < 40


def test_without_stop_reasons_it_is_least_recently_used(bench):
    b, now = trained(bench, lambda reason: None)
    assert not b.manager.tree.order.informed
    b.manager.clear()
    serve(b, now, "tool", [*range(500, 540)], None, 1.0)
    serve(b, now, "user", [*range(600, 640)], None, 1.0)
    serve(b, now, "third", [*range(700, 732)], None, 0.0)
    assert b.probe([*range(500, 540), 1]) < 40
    assert b.probe([*range(600, 640), 1]) == 40


def test_past_gaps_are_kept_by_stop_reason(bench):
    """A user's pauses say nothing about a tool's."""
    now = [0.0]
    b = bench(pages=8, eviction_policy=EvictionPolicyName.TURN_AWARE, clock=lambda: now[0])
    for k in range(10):
        serve(b, now, "c", [*range(8 + k)], "tool_use", 5.0)
        serve(b, now, "c", [*range(8 + k)], "end_turn", 700.0)
    serve(b, now, "c", [*range(18)], "tool_use", 0.0)
    record = b.manager.tree.order._owners["c"]
    assert record.past_gap("tool_use") == pytest.approx(5.0)
    assert record.past_gap("end_turn") == pytest.approx(700.0)
    assert record.past_gap("length") is None


def test_gaps_of_endless_stop_reasons_stay_bounded(bench):
    now = [0.0]
    b = bench(pages=8, eviction_policy=EvictionPolicyName.TURN_AWARE, clock=lambda: now[0])
    for k in range(40):
        serve(b, now, "c", [*range(8)], f"reason{k}", 5.0)
    assert len(b.manager.tree.order._owners["c"].gaps) == 8


def test_patience_follows_the_turnover(bench):
    now = [0.0]
    b = bench(pages=8, eviction_policy=EvictionPolicyName.TURN_AWARE, clock=lambda: now[0])
    order = b.manager.tree.order
    for k in range(60):
        serve(b, now, f"c{k}", [*range(k * 10, k * 10 + 8)], "end_turn", 5000.0)
    assert order.turnover_s > 10_000 and order.patience_s == 60
    for k in range(60, 160):
        serve(b, now, f"c{k}", [*range(k * 10, k * 10 + 8)], "end_turn", 1.0)
    assert order.turnover_s < 30 and order.patience_s == 5


def test_oldest_use_takes_nothing_out(bench):
    now = [0.0]
    for policy in EvictionPolicyName:
        b = bench(pages=24, eviction_policy=policy, clock=lambda: now[0])
        order = b.manager.tree.order
        assert order.oldest_use() is None
        serve(b, now, "a", [*range(8)], "end_turn", 1.0)
        first = order.oldest_use()
        serve(b, now, "b", [*range(50, 58)], "end_turn", 1.0)
        assert order.oldest_use() == first is not None
        serve(b, now, "a", [*range(8), 9], "end_turn", 1.0)
        assert order.oldest_use() > first
        b.manager.check_integrity()


def worker_turn(b, now, conversation, tokens, reason, *, loan=True):
    """What a context worker does in a turn: a prefill, a loan to a peer, and later the answer."""
    cache = b.start(tokens, conversation)
    b.compute(cache, tokens[cache.num_computed_tokens :], end=True)
    cache.close()
    now[0] += 1.0
    if loan:
        with b.manager.create("loan", np.array(tokens, dtype=np.int32)):
            now[0] += 1.0
    serve(b, now, conversation, [*tokens, 7, 8, 9], reason, 0.0)


@pytest.mark.parametrize("loan", [False, True])
def test_requests_closed_within_a_turn_teach_nothing(bench, loan):
    now = [0.0]
    b = bench(pages=24, turns=2, eviction_policy=EvictionPolicyName.TURN_AWARE, clock=lambda: now[0])
    order = b.manager.tree.order
    learned = []
    returned = order._hazard.returned
    order._hazard.returned = lambda kind, gap: (learned.append((kind, gap)), returned(kind, gap))
    for k in range(30):
        worker_turn(b, now, "c", [*range(8 + k % 3)], "stop", loan=loan)
        assert order.informed
        ended = now[0]
        now[0] += 50.0
        with b.start([*range(1000, 1008)], None) as other:  # and an aborted one
            b.compute(other, [*range(1000 + other.num_computed_tokens, 1008)], end=True)
        record = order._owners["c"]
        assert (record.stop_reason, record.idle_since, record.active, record.away) == ("stop", ended, 0, True)
    assert {gap for _, gap in learned} == {50.0} and len(learned) == 29
    assert all(kind >= order._hazard.class_of("stop", None, None) > 0 for kind, _ in learned)
    assert record.past_gap("stop") == pytest.approx(50.0) and record.past_gap(None) is None
    assert set(order._owners) == {"c", *(name for name in order._owners if name[0] == "\0")}
    assert {node.owner for node in b.manager.tree.nodes() if node.parent is not None and node.tokens()[0] == 0} == {"c"}


def test_a_turn_that_goes_on_elsewhere_is_as_fresh_as_its_last_request(bench):
    now = [0.0]
    b = bench(pages=24, turns=2, eviction_policy=EvictionPolicyName.TURN_AWARE, clock=lambda: now[0])
    serve(b, now, "c", [*range(8)], "stop", 1000.0)
    with b.start([*range(8)], "c"):
        pass
    now[0] += 2.0
    record = b.manager.tree.order._owners["c"]
    assert record.age(now[0]) == 2.0 and record.stop_reason == "stop"
    serve(b, now, "c", [*range(8)], "stop", 3.0)
    assert record.age(now[0]) == 3.0


@pytest.mark.parametrize("reason", [None, "stop"])
def test_what_is_remembered_is_bounded(bench, reason):
    """Requests without a conversation leave nothing behind; of conversations only so many are known."""
    now = [0.0]
    b = bench(pages=16, eviction_policy=EvictionPolicyName.TURN_AWARE, clock=lambda: now[0])
    b.check = lambda *_, **__: None  # else it counts everything again at each step
    order = b.manager.tree.order
    for k in range(200):
        serve(b, now, None, [*range(k * 10, k * 10 + 8)], reason, 1.0)
        runs = {node for node in b.manager.tree.nodes() if node.parent is not None}
        assert len(order._owners) <= len(runs) and set(order._homes) <= runs
        assert {node for record in order._owners.values() for node in record.leaves} <= runs
    b.manager.check_integrity()
    b.manager.clear()
    assert not order._owners and not order._homes
    for k in range(1500):
        serve(b, now, f"c{k}", [*range(k * 10, k * 10 + 8)], reason, 100.0)
        assert len(order._owners) <= 1025
    b.manager.clear()
    assert not order._homes and all(not list(record.leaves) for record in order._owners.values())


def test_conversations_without_runs_are_bounded_without_a_clock():
    """Even when time stands still."""
    order = TurnAwareOrder(lambda: 0.0, 64)
    most = 0
    for k in range(100_000):
        order.request_began(f"c{k}")
        order.turn_ended(f"c{k}", None, None)
        order.request_closed(f"c{k}")
        most = max(most, len(order._owners))
    assert most <= 32_768


def test_a_clock_set_back_is_harmless(bench):
    now = [10_000.0]
    b = bench(pages=24, turns=2, eviction_policy=EvictionPolicyName.TURN_AWARE, clock=lambda: now[0])
    order = b.manager.tree.order
    for k in range(60):
        serve(b, now, f"c{k % 5}", [*range(100 * (k % 5), 100 * (k % 5) + 9 + k)], "stop", -100.0)
        assert 0 < order.turnover_s < 10_000 and order.informed
        b.manager.check_integrity()
    assert order._hazard._events.reshape(-1, order._hazard._events.shape[-1])[:, 1:].sum() == 0
    refreshed = order._refreshed_at
    serve(b, now, "last", [*range(2000, 2080)], "stop", 0.0)  # evicts, and sees that its ranking is of another time
    assert order._refreshed_at == now[0] < refreshed + 1


class CountedNode(RadixNode):
    """Counts how often somebody asks when it was last used."""

    looks = 0

    def __getattribute__(self, name):
        if name == "last_used":
            CountedNode.looks += 1
        return super().__getattribute__(name)


def leaves(count, kind=RadixNode):
    root = RadixNode(None, 0, 1)
    made = [kind(root, 0, 1) for _ in range(count)]
    for tick, node in enumerate(made):
        node.last_used, node.owner = tick + 1, "one"
    return made


def looks_to_pop(count):
    """Everything that one conversation with `count` branches has, one after the other."""
    order = TurnAwareOrder(lambda: 0.0, count)
    order.request_began("one")
    order.turn_ended("one", "stop", 1)
    order.request_closed("one")
    made = leaves(count, CountedNode)
    for node in made:
        order.offer(node)
    CountedNode.looks = 0
    for node in made:
        assert order.pop() is node
        node.alive = False
        order.removed(node)
    assert order.pop() is None
    return CountedNode.looks / count


def test_popping_a_branch_does_not_look_at_all_others():
    assert looks_to_pop(2000) < 1.5 * looks_to_pop(100)


def test_leaf_heap_gives_the_least_recently_used_whatever_was_used_since():
    rng = np.random.default_rng(5)
    nodes, heap, inside = leaves(60), LeafHeap(), set()
    for tick in range(100, 4000):
        node = nodes[rng.integers(60)]
        match rng.integers(4):
            case 0:
                heap.add(node)
                inside.add(node)
            case 1:
                heap.discard(node)
                inside.discard(node)
            case 2:
                node.last_used = tick
            case _:
                assert heap.oldest() is min(inside, key=lambda one: one.last_used, default=None)
        assert set(heap) == inside and len(heap) == len(inside)
        assert len(heap._heap) <= max(17, 2 * len(inside) + 1)


def test_leaf_heap_settles_ties_by_who_came_first():
    nodes, heap = leaves(20), LeafHeap()
    for node in nodes:
        node.last_used = 1
        heap.add(node)
    order = []
    while (node := heap.oldest()) is not None:
        order.append(node)
        heap.discard(node)
    assert order == nodes
