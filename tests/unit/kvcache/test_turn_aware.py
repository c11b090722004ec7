"""The learned eviction order: what it learns, whom it gives up first, and when it is plain LRU."""

from __future__ import annotations

import numpy as np

from kvcache import EvictionPolicyName
from kvcache.eviction import ReturnHazard


def test_hazard_learns_who_comes_back():
    hazard = ReturnHazard()
    tool, end = hazard.class_of("tool_use", None, None), hazard.class_of("end_turn", None, None)
    assert tool != end
    for _ in range(60):
        hazard.returned(tool, 5.0)
        hazard.returned(end, 500.0)
    soon = hazard.within(np.array([tool, end]), np.array([1.0, 1.0]), 30.0)
    assert soon[0] > 5 * soon[1]
    later = hazard.within(np.array([tool, end]), np.array([300.0, 300.0]), 600.0)
    assert later[1] > later[0]


def test_conversations_that_never_return_lower_the_hazard():
    hazard = ReturnHazard()
    kind = hazard.class_of("stop", None, None)
    for _ in range(20):
        hazard.returned(kind, 10.0)
    alone = hazard.within(np.array([kind]), np.array([0.0]), 30.0)[0]
    crowd = hazard.within(np.array([kind] * 200), np.array([0.0] + [1000.0] * 199), 30.0)[0]
    assert crowd < alone / 3


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


def test_the_horizon_follows_the_turnover(bench):
    now = [0.0]
    b = bench(pages=8, eviction_policy=EvictionPolicyName.TURN_AWARE, clock=lambda: now[0])
    for k in range(60):
        serve(b, now, f"c{k}", [*range(k * 10, k * 10 + 8)], "end_turn", 5000.0)
    assert b.manager.tree.order.horizon_s > 600
    for k in range(60, 160):
        serve(b, now, f"c{k}", [*range(k * 10, k * 10 + 8)], "end_turn", 1.0)
    assert b.manager.tree.order.horizon_s == 20
