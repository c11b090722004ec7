"""The real model, loaded once for all tests of this folder. Its conversion is kept in the user's cache."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cluster.engine import SequenceStep, StepPlan, load_runner, load_tokenizer, make_storage
from cluster.request import SamplingParams

MODEL = "smollm2-135m"
NUM_PAGES = 64


class Engine:
    """The real model and its pages."""

    def __init__(self) -> None:
        self.runner: Any = load_runner(MODEL, tokens_per_block=32)
        self.storage = make_storage(self.runner, [NUM_PAGES])
        self.runner.bind(self.storage)
        self.pages: NDArray[np.int32] = np.random.default_rng(0).permutation(NUM_PAGES).astype(np.int32)

    def step(self, ids: Sequence[int], start: int, pages: NDArray[np.int32], wanted: bool = True) -> SequenceStep:
        sampling = SamplingParams() if wanted else None
        return SequenceStep(np.asarray(ids, dtype=np.int32), start, (pages,), sampling)

    def logits(self, *steps: SequenceStep) -> list[NDArray[np.float32]]:
        return [row for row in self.runner.forward(StepPlan(steps)) if row is not None]

    def decode(self, sequences: list[tuple[list[int], NDArray[np.int32]]], counts: list[int]) -> list[list[int]]:
        """Greedy continuations of prompts whose last token is not computed yet, all in one batch."""
        outs: list[list[int]] = [[] for _ in sequences]
        while True:
            live = [i for i, out in enumerate(outs) if len(out) < counts[i]]
            if not live:
                return outs
            steps = []
            for i in live:
                ids, pages = sequences[i]
                at = len(ids) + len(outs[i]) - 1
                steps.append(self.step([(ids + outs[i])[-1]], at, pages))
            for i, token in zip(live, self.runner.execute(StepPlan(steps)), strict=True):
                outs[i].append(token)


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    one = Engine()
    yield one
    one.storage.close()


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return load_tokenizer(MODEL)


@pytest.fixture(scope="session")
def golden() -> list[dict[str, Any]]:
    path = Path(__file__).parents[2] / "data" / "golden_tokens.json"
    cases: list[dict[str, Any]] = json.loads(path.read_text())["cases"]
    return cases


@pytest.fixture(scope="session")
def shared_golden() -> list[dict[str, Any]]:
    path = Path(__file__).parents[4] / "shared" / "cases" / "golden_tokens.json"
    if not path.is_file():
        pytest.skip(f"no {path.name} beside this checkout")
    cases: list[dict[str, Any]] = json.loads(path.read_text())["cases"]
    return cases
