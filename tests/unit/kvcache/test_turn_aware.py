"""The learned eviction order: what it learns, whom it gives up first, and when it is plain LRU."""

from __future__ import annotations

import numpy as np
import pytest

from kvcache import EvictionPolicyName
from kvcache.eviction import ReturnHazard


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
