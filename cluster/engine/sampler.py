"""Chooses the next token from a row of logits (numpy only).

Randomness is counter-based: a draw is a function of (seed, token position) and nothing else, so the same request gets
the same draw on whichever worker and in whatever batch it runs. Kept tokens are laid out in id order before the draw:
noise in the last bits of a logit then moves a border by that noise only, it never reorders the candidates.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from cluster.engine.errors import EngineError
from cluster.engine.model_runner import StepPlan
from cluster.request import SamplingParams

__all__ = ["sample", "sample_plan", "token_probabilities", "uniform_draw"]

_WORD = (1 << 64) - 1
_STREAM = 0x6B76_6665_7272_7931  # second key word: keeps these draws apart from other uses of the same seed
_GREEDY_BELOW = 1e-6  # a temperature under this is greedy: dividing by it would overflow


def uniform_draw(seed: int, position: int) -> float:
    """The number in [0, 1) that belongs to (seed, position). Pure."""
    bits = np.random.Philox(
        key=np.array([seed & _WORD, _STREAM], dtype=np.uint64), counter=np.array([position, 0, 0, 0], dtype=np.uint64)
    )
    return float(bits.random_raw() >> 11) * 2.0**-53


def token_probabilities(logits: NDArray[np.float32], sampling: SamplingParams) -> NDArray[np.float64]:
    """Distribution over the vocabulary after temperature, top-k, then top-p; shape of `logits`, sums to 1.

    Needs temperature > 0. Ties at the border of top-k and top-p go to the lower id.
    """
    scaled = logits.astype(np.float64)
    scaled -= scaled.max()
    scaled /= sampling.temperature
    weights = np.exp(scaled)
    restrict_k = 0 < sampling.top_k < len(weights)
    restrict_p = sampling.top_p < 1.0
    if restrict_k or restrict_p:
        order = np.argsort(-weights, kind="stable")
        if restrict_k:
            weights[order[sampling.top_k :]] = 0.0
            order = order[: sampling.top_k]
        if restrict_p:
            cumulative = np.cumsum(weights[order])
            keep = int(np.searchsorted(cumulative, sampling.top_p * cumulative[-1], side="left")) + 1
            weights[order[keep:]] = 0.0
    weights /= weights.sum()
    return weights


def sample(
    logits: NDArray[np.float32],
    sampling: SamplingParams,
    position: int,
    *,
    eos_token_ids: Iterable[int] = (),
    suppress_eos: bool = False,
) -> int:
    """The token for `position`, from its row of logits (left unchanged).

    `suppress_eos` makes `eos_token_ids` impossible. Greedy takes the lowest id among equals. Raises EngineError when
    the logits hold a NaN.
    """
    if suppress_eos:
        logits = logits.copy()
        logits[list(eos_token_ids)] = -np.inf
    best = int(np.argmax(logits))
    if np.isnan(logits[best]):
        raise EngineError("the model returned NaN logits: its weights or its KV pages are damaged")
    if sampling.temperature < _GREEDY_BELOW or sampling.top_k == 1:
        return best
    cumulative = np.cumsum(token_probabilities(logits, sampling))
    target = uniform_draw(sampling.seed, position) * cumulative[-1]
    return int(np.searchsorted(cumulative, target, side="right"))


def sample_plan(
    plan: StepPlan, rows: Sequence[NDArray[np.float32] | None], eos_token_ids: frozenset[int]
) -> list[int | None]:
    """The next token of every sequence of a step, None where none is wanted. `rows` holds a row of logits a sequence.

    Where a sequence must not end yet, neither an end-of-sequence token nor one of its stop tokens can come.
    """
    tokens: list[int | None] = []
    for sequence, logits in zip(plan.sequences, rows, strict=True):
        if logits is None or sequence.sampling is None:
            tokens.append(None)
            continue
        position = sequence.start + len(sequence.token_ids)
        ends = eos_token_ids.union(t for t in sequence.sampling.stop_token_ids if t < len(logits))
        tokens.append(
            sample(logits, sequence.sampling, position, eos_token_ids=ends, suppress_eos=sequence.suppress_eos)
        )
    return tokens
