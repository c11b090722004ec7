"""Budget changes while serving, suspension, many conversations."""

from __future__ import annotations

import numpy as np
import pytest

from kvcache import InvalidSizeError, NeverFitsError, OutOfPagesError, SuspendedSequenceError, UnknownLifeCycleError


def test_a_smaller_budget_gives_cached_blocks_up_at_once(bench):
    b = bench(pages=16, policy="per_request")
    b.turn(range(32))
    assert b.manager.set_budget(10) == 0
    assert b.probe([*range(32), 1]) == 32
    assert b.manager.set_budget(5) == 0
    assert b.probe([*range(32), 1]) == 20
    cache = b.start(range(100, 124))
    with pytest.raises(NeverFitsError):
        cache.resize(24)
    cache.resize(20)
    cache.close()
    assert b.manager.set_budget(16) == 0
    b.turn(range(200, 240))


def test_pages_in_use_above_the_budget_go_when_they_are_free(bench):
    b = bench(pages=8, policy="per_request")
    cache = b.start(range(24))
    b.compute(cache, range(24))
    assert b.manager.set_budget(2) == 4
    other = b.start(range(50, 54))
    with pytest.raises(OutOfPagesError):
        other.resize(4)
    cache.close()
    other.resize(8)
    other.close()


@pytest.mark.parametrize("size", [0, -1, 65])
def test_wrong_budgets(bench, size):
    b = bench()
    with pytest.raises(InvalidSizeError):
        b.manager.set_budget(size)
    with pytest.raises(UnknownLifeCycleError):
        b.manager.set_budget(4, group=3)


@pytest.mark.parametrize("kind", [{}, {"windows": (8,)}, {"recurrent": 1}, {"windows": (6,), "recurrent": 1}])
def test_suspend_and_resume(bench, kind):
    b = bench(pages=10, policy="per_request", **kind)
    b.turn(range(8))
    cache = b.start([*range(8), *range(50, 59)])
    b.compute(cache, range(50, 55) if cache.num_reused_tokens else [*range(8), *range(50, 55)])
    assert cache.suspend() > 0
    b.manager.check_integrity()
    for call in (lambda: cache.resize(20), cache.end_turn, cache.pages, cache.pin_for_peer, cache.suspend):
        with pytest.raises(SuspendedSequenceError):
            call()
    b.turn(range(200, 224))
    assert cache.resume() is True
    assert cache.resume() is True
    b.check(cache)
    b.compute(cache, range(55, 59), end=True)
    cache.end_turn()
    cache.close()
    assert b.probe([*range(8), *range(50, 59), 1]) == 17


def test_resume_waits_below_the_utilisation_gate(bench):
    b = bench(pages=10, policy="per_request", max_util_for_resume=0.5)
    cache = b.start(range(16))
    b.compute(cache, range(16))
    cache.suspend()
    other = b.start(range(100, 112))
    b.compute(other, range(100, 112))
    assert cache.resume() is False
    b.manager.check_integrity()
    other.close()
    assert cache.resume() is True
    b.check(cache)
    cache.close()


def test_lost_content_is_noticed(bench):
    b = bench(policy="per_request")
    cache = b.start(range(8))
    b.compute(cache, range(8))
    cache.suspend()
    parts = cache.suspended.parts
    object.__setattr__(cache.suspended, "parts", ((*parts[0][:3], b"\0" * 16, parts[0][4]), *parts[1:]))
    with pytest.raises(SuspendedSequenceError, match="lost"):
        cache.resume()
    b.manager.check_integrity()
    cache.close()


def test_close_of_a_suspended_sequence(bench):
    b = bench(policy="per_request")
    cache = b.start(range(8))
    b.compute(cache, range(8))
    cache.suspend()
    cache.close()
    assert b.manager.stats().pools[0].free == 64


def test_very_many_conversations_stay_bounded(bench):
    b = bench(pages=64, turns=2, max_tracked_conversations=1000)
    prompt = np.arange(5, dtype=np.int32)
    for number in range(20_000):
        prompt = prompt.copy()
        prompt[0] = number
        with b.manager.create("r", prompt, conversation_id=f"c{number}") as cache:
            cache.resize(5)
            cache.append_computed(prompt, end_of_prompt=True)
            cache.end_turn()
    assert b.manager.stats().tracked_conversations == 1000
    assert len(b.manager.tree.order._heap) < 5000
    b.manager.check_integrity()
