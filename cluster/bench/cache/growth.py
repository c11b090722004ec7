"""How the cost of a turn grows with prompt and cache: a warm turn adds 512 tokens to a cached prompt."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from cluster.replay.runner import ReplayOptions, make_manager
from kvcache import KvCacheManager

__all__ = ["GrowthRow", "measure_growth"]

_NEW_TOKENS = 512
_FILL_PROMPT = 8192


@dataclass(frozen=True, slots=True)
class GrowthRow:
    """CPU milliseconds of one request, the median of the repetitions."""

    cached_blocks: int
    prompt_tokens: int
    warm_ms: float


def measure_growth(
    block: int = 16,
    cached_blocks: tuple[int, ...] = (10_000, 100_000, 1_000_000),
    prompts: tuple[int, ...] = (1024, 8192, 32_768, 131_072),
    repetitions: int = 15,
) -> list[GrowthRow]:
    """Rows for every cache size and prompt length that fits into it."""
    rows = []
    for cached in cached_blocks:
        options = ReplayOptions(capacity_tokens=(cached + 120_000) * block, block=block, with_bounds=False)
        manager = make_manager(options, time.monotonic)
        serial = 0
        for serial in range(cached * block // _FILL_PROMPT):
            _turn(manager, _prompt(serial, _FILL_PROMPT), f"fill{serial}")
        for length in prompts:
            if length > cached * block:
                continue
            rows.append(GrowthRow(cached, length, _warm(manager, serial + length, length, repetitions)))
        manager.storage.close()
    return rows


def _prompt(serial: int, tokens: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.random.default_rng(serial).integers(0, 2**31 - 1, tokens, dtype=np.int32)


def _warm(manager: KvCacheManager, serial: int, length: int, repetitions: int) -> float:
    chat = _prompt(serial, length + _NEW_TOKENS * repetitions + 1)
    _turn(manager, chat[: length + 1], f"warm{serial}")
    times = []
    for turn in range(1, repetitions + 1):
        prompt = chat[: length + turn * _NEW_TOKENS + 1]
        began = time.thread_time()
        reused = _turn(manager, prompt, f"warm{serial}")
        times.append(time.thread_time() - began)
        if reused < length:
            raise RuntimeError(f"a warm turn of {length} tokens reused {reused}: the measurement is void")
    return 1e3 * float(np.median(times))


def _turn(manager: KvCacheManager, prompt: np.ndarray[tuple[int], np.dtype[np.int32]], conversation: str) -> int:
    with manager.create(conversation, prompt, conversation_id=conversation) as cache:
        end, reused = len(prompt) - 1, cache.num_reused_tokens
        cache.resize(end)
        cache.append_computed(prompt[reused:end], end_of_prompt=True)
        cache.end_turn()
        return reused
