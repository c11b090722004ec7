"""The seam between scheduling and a model: the scheduler plans a step, a runner executes it.

A runner never allocates or frees pages; the plan says where to read and write.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cluster.request import SamplingParams
from kvcache.layout import KvLayout
from kvcache.storage.page_storage import PageStorage

__all__ = ["ModelRunner", "SequenceStep", "StepPlan"]


@dataclass(frozen=True, slots=True, eq=False)
class SequenceStep:
    """What one sequence does in a step.

    token_ids    int32 (n,)  tokens whose KV this step computes, at positions start .. start + n - 1
    pages        one int32 array a layer group: page of each block ordinal, enough for start + n tokens
    sampling     parameters for the token after the last one, or None when no token is wanted (a prompt's inner chunk)
    """

    token_ids: NDArray[np.int32]
    start: int
    pages: tuple[NDArray[np.int32], ...]
    sampling: SamplingParams | None = None
    suppress_eos: bool = False


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward pass over a batch of sequences, decodes and prefill chunks mixed."""

    sequences: Sequence[SequenceStep]


class ModelRunner(Protocol):
    """Executes steps of one model on one device."""

    @property
    def layout(self) -> KvLayout:
        """The KV layout of this model with the tokens_per_block it was built for."""
        ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_position(self) -> int:
        """Longest sequence (tokens) the model supports."""
        ...

    @property
    def eos_token_ids(self) -> frozenset[int]: ...

    def bind(self, storage: PageStorage) -> None:
        """Use `storage` for KV from now on. Call once, before the first `execute`."""
        ...

    def execute(self, plan: StepPlan) -> list[int | None]:
        """Run the step: writes the KV of every planned token, returns the sampled token of each sequence (None where
        no sampling was asked). Blocks until the pages are written. Deterministic given plan and page contents, up to
        floating-point noise between batch shapes.
        """
        ...
