"""Runs a scheduled trace through a `KvCacheManager`, request by request, on the trace's own clock."""

from __future__ import annotations

import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from cluster.replay.belady import belady_hits, infinite_hits
from cluster.replay.byte_budget import ByteBudget
from cluster.replay.trace import TraceRequest
from kvcache import (
    BlockReuseConfig,
    BytesPageStorage,
    KvCacheConfig,
    KvCacheManager,
    NeverFitsError,
    RecurrentStateConfig,
    ReusePolicy,
)
from kvcache.config import EvictionPolicyName
from kvcache.testing import pattern_layout

__all__ = ["ReplayOptions", "ReplayResult", "block_tokens", "make_manager", "replay", "serve"]

_SNAPSHOT_PAGES, _SNAPSHOT_EVERY_BLOCKS = 8, 4  # bytes of a snapshot; how often all_reusable keeps one
_SENTINEL = np.array([2**31 - 1], dtype=np.int32)


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """What `kvferry replay` is told. `window_tokens` and `snapshot` concern `life_cycles` swa and ssm."""

    capacity_tokens: int = 2_000_000
    block: int = 256
    policy: ReusePolicy = ReusePolicy.PER_CONVERSATION
    max_num_turns: int = 5
    eviction: EvictionPolicyName = EvictionPolicyName.LRU
    life_cycles: str = "full"
    branch_snapshot: bool = True
    with_bounds: bool = True


@dataclass(slots=True)
class ReplayResult:
    """Figures of one run; rates are blocks reused / blocks requested, without `skipped` requests: those larger than
    the whole cache.
    """

    requests: int = 0
    blocks: int = 0
    hit_rate: float = 0.0
    infinite_hit_rate: float | None = None
    belady_hit_rate: float | None = None
    evictions: dict[str, int] = field(default_factory=dict)
    cpu_ms_per_request: float = 0.0
    cpu_us_per_block: float = 0.0
    bytes_per_cached_block: float = 0.0
    resident_blocks: int = 0
    resident_states: int = 0
    skipped: int = 0
    peers: dict[str, dict[str, float]] = field(default_factory=dict)


def block_tokens(ids: NDArray[np.int64], block: int) -> NDArray[np.int32]:
    """Tokens of the blocks: equal id, equal tokens; different ids differ in their first token already."""
    first = (ids.astype(np.uint32) * np.uint32(2654435761)) & np.uint32(0x7FFFFFFF)
    inner = np.arange(block, dtype=np.uint32) * np.uint32(40503)
    return ((first[:, None] + inner) & np.uint32(0x7FFFFFFF)).astype(np.int32).ravel()


class _PromptMaker:
    """Tokens of prompts; those of a conversation's last prompt are kept, since the next one mostly extends it."""

    def __init__(self, block: int, kept: int = 64) -> None:
        self._block = block
        self._kept = kept
        self._last: OrderedDict[str, tuple[NDArray[np.int64], NDArray[np.int32]]] = OrderedDict()

    def prompt(self, request: TraceRequest) -> NDArray[np.int32]:
        """The prompt's full blocks and one token more, which is always computed."""
        ids = request.blocks
        tokens = np.empty(len(ids) * self._block + 1, dtype=np.int32)
        known, old = self._last.pop(request.conversation, (ids[:0], _SENTINEL[:0]))
        shared = min(len(known), len(ids))
        differs = known[:shared] != ids[:shared]
        same = int(differs.argmax()) if differs.any() else shared
        tokens[: same * self._block] = old[: same * self._block]
        tokens[same * self._block : -1] = block_tokens(ids[same:], self._block)
        tokens[-1:] = _SENTINEL
        self._last[request.conversation] = (ids, tokens)
        if len(self._last) > self._kept:
            self._last.popitem(last=False)
        return tokens


def replay(
    arrivals: Sequence[tuple[float, TraceRequest]],
    options: ReplayOptions,
    progress: Callable[[int], None] | None = None,
) -> ReplayResult:
    """One run. `progress` gets the number of requests done, about every 200."""
    now = [0.0]
    manager = make_manager(options, lambda: now[0])
    result = ReplayResult(requests=len(arrivals))
    reused_blocks, cpu = 0, 0.0
    paths: list[NDArray[np.int64]] = []
    prompts = _PromptMaker(options.block)
    budget = make_budget(options, manager)
    for done, (at, request) in enumerate(arrivals):
        now[0] = at
        if len(request.blocks) == 0:
            continue
        prompt = prompts.prompt(request)
        began = time.thread_time()
        try:
            reused_blocks += serve(manager, request, prompt, options.block, budget)
            paths.append(request.blocks)
            result.blocks += len(request.blocks)
        except NeverFitsError:
            result.skipped += 1
        cpu += time.thread_time() - began
        if budget is not None:
            result.resident_states = max(result.resident_states, manager.pools[1].tree_pages)
        if progress is not None and done % 200 == 0:
            progress(done)
    stats = manager.stats()
    result.hit_rate = reused_blocks / max(1, result.blocks)
    result.cpu_ms_per_request = 1e3 * cpu / max(1, result.requests)
    result.cpu_us_per_block = 1e6 * cpu / max(1, result.blocks)
    result.evictions = dict(stats.evictions)
    result.resident_blocks = stats.pools[0].cached
    result.bytes_per_cached_block = stats.index_bytes / max(1, result.resident_blocks)
    if options.with_bounds:
        result.infinite_hit_rate = infinite_hits(paths) / max(1, result.blocks)
        result.belady_hit_rate = belady_hits(paths, options.capacity_tokens // options.block) / max(1, result.blocks)
    return result


def serve(
    manager: KvCacheManager,
    request: TraceRequest,
    prompt: NDArray[np.int32],
    block: int,
    budget: ByteBudget | None = None,
) -> int:
    """One request through the manager: match, allocate, publish, end of turn, free. Returns the blocks reused."""
    with manager.create(request.conversation, prompt, conversation_id=request.conversation) as cache:
        end, reused = len(prompt) - 1, cache.num_reused_tokens // block
        if budget is not None:
            new = end // block - reused
            states = 1 + len(cache.points)
            if manager.policy is ReusePolicy.ALL_REUSABLE and not cache.explicit_points:
                states += new
            budget.make_room(new, states)
        while cache.num_computed_tokens < end:
            chunk = cache.chunk_end(end)
            cache.resize(chunk)
            cache.append_computed(prompt[cache.num_computed_tokens : chunk], end_of_prompt=chunk == end)
        if not cache.prompt_ended:
            if budget is not None:
                cache.resize(end)  # private copies of the matched snapshots
            cache.append_computed(prompt[:0], end_of_prompt=True)
        cache.end_turn(stop_reason=request.stop_reason, output_tokens=request.output_tokens)
        return reused


def make_manager(options: ReplayOptions, clock: Callable[[], float]) -> KvCacheManager:
    """An empty manager as the options say, over pages that only hold a pattern. With windows or snapshots each pool
    is as large as the whole budget: `make_budget` bounds them together.
    """
    pages = max(1, options.capacity_tokens // options.block)
    layout = pattern_layout(
        options.block,
        windows=(options.block,) if options.life_cycles == "swa" else (),
        recurrent=1 if options.life_cycles == "ssm" else 0,
    )
    periodic = options.life_cycles == "ssm" and options.policy is ReusePolicy.ALL_REUSABLE
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # max_num_turns without effect: the user compares policies
        config = KvCacheConfig(
            tokens_per_block=options.block,
            max_tokens=options.capacity_tokens,
            block_reuse_config=BlockReuseConfig(
                policy=options.policy,
                max_num_turns=options.max_num_turns,
                enable_branch_snapshot=options.branch_snapshot
                and options.life_cycles != "full"
                and options.policy is ReusePolicy.PER_CONVERSATION,
            ),
            recurrent_state_config=RecurrentStateConfig(
                periodic_snapshot_interval=_SNAPSHOT_EVERY_BLOCKS * options.block if periodic else 0
            ),
            eviction_policy=options.eviction,
        )
    return KvCacheManager(layout, config, BytesPageStorage(layout, [pages] * len(layout.groups)), clock=clock)


def make_budget(options: ReplayOptions, manager: KvCacheManager) -> ByteBudget | None:
    """The common budget of pages and states, or None for full attention alone."""
    if options.life_cycles == "full":
        return None
    state_pages = _SNAPSHOT_PAGES if options.life_cycles == "ssm" else 1
    return ByteBudget(manager, max(1, options.capacity_tokens // options.block), state_pages)
