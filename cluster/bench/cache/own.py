"""The manager itself on a list of prompts: match, allocate, publish, end of turn, free."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cluster.replay.runner import ReplayOptions, block_tokens, make_manager, serve
from cluster.replay.trace import TraceRequest

__all__ = ["OwnFigures", "measure_own", "prompts_of"]

_LAST = np.array([2**31 - 1], dtype=np.int32)


@dataclass(frozen=True, slots=True)
class OwnFigures:
    """Figures of a run over all prompts."""

    hit_rate: float
    cpu_ms_per_request: float
    cpu_us_per_block: float
    bytes_per_cached_block: float
    blocks: int


def prompts_of(requests: Sequence[TraceRequest], block: int) -> list[NDArray[np.int32]]:
    """Each request's full blocks as tokens, and one token more, which is always computed."""
    return [np.concatenate([block_tokens(request.blocks, block), _LAST]) for request in requests]


def measure_own(
    requests: Sequence[TraceRequest], prompts: Sequence[NDArray[np.int32]], options: ReplayOptions
) -> OwnFigures:
    """One round, from an empty cache."""
    blocks = sum(len(prompt) // options.block for prompt in prompts)
    manager = make_manager(options, time.monotonic)
    reused, cpu = 0, 0.0
    for request, prompt in zip(requests, prompts, strict=True):
        tokens = prompt.copy()  # a prompt has just been made when it comes, for the peers' drivers too
        began = time.thread_time()
        reused += serve(manager, request, tokens, options.block)
        cpu += time.thread_time() - began
    stats = manager.stats()
    size = stats.index_bytes / max(1, stats.pools[0].cached)
    manager.storage.close()
    return OwnFigures(reused / blocks, 1e3 * cpu / len(prompts), 1e6 * cpu / blocks, size, blocks)
