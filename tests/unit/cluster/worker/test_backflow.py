"""The rule of `kv_backflow: auto`: a + bytes / B against tokens / R, from measurements only."""

from __future__ import annotations

import pytest

from cluster.worker.backflow import BackflowPolicy

MIB = 2**20


def observed(fixed_s: float, bytes_per_s: float, pulls: int = 32) -> BackflowPolicy:
    policy = BackflowPolicy()
    for index in range(pulls):
        size = (1 + index % 5) * MIB
        policy.observe_pull(size, fixed_s + size / bytes_per_s)
    return policy


def estimate(policy: BackflowPolicy, *, rate: float, tokens: int = 50, prefills: int = 100):
    return policy.estimate(
        num_bytes=3 * MIB, num_tokens=tokens, computed_tokens=int(rate * 10), busy_s=10.0, prefills=prefills
    )


def test_the_fit_finds_the_fixed_cost_and_the_bandwidth():
    assert estimate(observed(0.002, 1e9), rate=200).pull_s == pytest.approx(0.002 + 3 * MIB / 1e9, rel=0.01)


def test_a_slow_model_pulls_and_a_fast_one_computes():
    policy = observed(0.002, 1e9)
    assert estimate(policy, rate=200).worthwhile  # 250 ms of prefill against 5 ms
    assert not estimate(policy, rate=100_000).worthwhile  # 0.5 ms against 5 ms


def test_a_slow_link_turns_the_verdict():
    assert not estimate(observed(0.5, 1e7), rate=200).worthwhile


@pytest.mark.parametrize(("pulls", "prefills"), [(3, 100), (32, 3), (0, 0)])
def test_without_enough_measurements_it_pulls(pulls: int, prefills: int):
    assert estimate(observed(9.0, 1.0, pulls), rate=1e9, prefills=prefills).worthwhile


def test_pulls_of_one_size_give_a_cost_without_a_slope():
    policy = BackflowPolicy()
    for _ in range(20):
        policy.observe_pull(MIB, 0.01)
    assert estimate(policy, rate=200).pull_s == pytest.approx(0.01)
