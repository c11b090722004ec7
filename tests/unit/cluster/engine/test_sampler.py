"""Sampling: the right distribution, and draws that depend on (seed, position) alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from cluster.engine import EngineError
from cluster.engine.sampler import sample, token_probabilities, uniform_draw
from cluster.request import SamplingParams

rows = hnp.arrays(np.float32, st.integers(2, 40), elements=st.floats(-20, 20, width=32))


def softmax(logits: np.ndarray, temperature: float) -> np.ndarray:
    weights = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    return np.asarray(weights / weights.sum())


@given(rows)
def test_greedy_takes_the_first_largest(logits: np.ndarray) -> None:
    assert sample(logits, SamplingParams(), 3) == int(np.argmax(logits))
    assert sample(logits, SamplingParams(temperature=1e-9), 3) == int(np.argmax(logits))
    assert sample(logits, SamplingParams(temperature=1.0, top_k=1), 3) == int(np.argmax(logits))


@given(rows, st.floats(0.05, 3), st.integers(0, 50), st.floats(0.01, 1))
def test_the_kept_set_is_the_smallest_allowed_one(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float
) -> None:
    sampling = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    got = token_probabilities(logits, sampling)
    plain = softmax(logits, temperature)
    assert got.sum() == pytest.approx(1.0)
    kept = got > 0
    if top_k:
        assert kept.sum() <= top_k
    order = np.argsort(-plain, kind="stable")[: top_k or None]
    renormalised = plain[order] / plain[order].sum()
    cumulative = np.cumsum(renormalised)
    least = int(np.searchsorted(cumulative, top_p - 1e-9)) + 1
    most = int(np.searchsorted(cumulative, top_p + 1e-9)) + 1  # rounding may decide at the border itself
    nonzero = int((plain[order] > 0).sum())
    assert min(least, nonzero) <= kept.sum() <= min(most, nonzero)
    assert plain[kept].min() >= plain[~kept].max(initial=0.0) - 1e-15
    np.testing.assert_allclose(got[kept], plain[kept] / plain[kept].sum(), rtol=1e-9)


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 2**64 - 1))
def test_draws_follow_the_distribution(seed: int) -> None:
    logits = np.array([0.0, 1.0, 2.0, -1.0, 0.5], dtype=np.float32)
    sampling = SamplingParams(temperature=0.8, seed=seed)
    count = 3000
    drawn = np.bincount([sample(logits, sampling, p) for p in range(count)], minlength=5)
    expected = softmax(logits, 0.8) * count
    assert ((drawn - expected) ** 2 / expected).sum() < 40  # chi-square with 4 degrees of freedom: p about 4e-8


@given(rows, st.integers(-(2**70), 2**70), st.integers(0, 2**20))
def test_a_draw_depends_on_seed_and_position_alone(logits: np.ndarray, seed: int, position: int) -> None:
    sampling = SamplingParams(temperature=1.0, seed=seed)
    assert sample(logits, sampling, position) == sample(logits.copy(), sampling, position)
    assert 0.0 <= uniform_draw(seed, position) < 1.0


def test_seeds_and_positions_give_different_draws() -> None:
    draws = {uniform_draw(seed, position) for seed in range(50) for position in range(50)}
    assert len(draws) == 2500
    assert abs(np.mean(list(draws)) - 0.5) < 0.02


@given(rows, st.floats(0, 2))
def test_suppressed_ids_never_come(logits: np.ndarray, temperature: float) -> None:
    banned = [int(np.argmax(logits))]
    before = logits.copy()
    for position in range(5):
        token = sample(
            logits, SamplingParams(temperature=temperature), position, eos_token_ids=banned, suppress_eos=True
        )
        assert token not in banned
    assert np.array_equal(before, logits)


def test_nan_is_an_error() -> None:
    with pytest.raises(EngineError, match="NaN"):
        sample(np.array([0.0, np.nan], dtype=np.float32), SamplingParams(), 0)
