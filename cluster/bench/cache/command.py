"""What `kvferry bench cache` does: own figures, peers in the same run, growth; a table and a JSON file."""

from __future__ import annotations

import json
import math
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from cluster.bench.cache.growth import GrowthRow, measure_growth
from cluster.bench.cache.own import OwnFigures, measure_own, prompts_of
from cluster.bench.cache.peers import PeerProcess, PeerUnavailable
from cluster.replay.lanes import scheduled
from cluster.replay.runner import ReplayOptions
from cluster.replay.trace import load_trace

__all__ = ["run_cache_bench"]

_BLOCKS = (16, 32, 64)
_ROUNDS = 8  # each with an empty cache, the managers by turns; the best one counts
_ROWS_READ = 10  # rows of the trace to read for one request wanted: lanes interleave many conversations


def run_cache_bench(
    trace: Path | None,
    *,
    requests: int,
    capacity_tokens: int,
    peers: tuple[str, ...],
    peer_python: Path | None,
    growth: bool,
    json_file: Path | None,
) -> dict[str, Any]:
    """Returns what is written to `json_file`. Raises TraceError. Blocks for minutes when peers take part."""
    console = Console()
    out: dict[str, Any] = {}
    table = Table("block", "who", "hit rate", "CPU us/block", "CPU ms/request", "times ours", "bytes/block")
    if trace is not None:
        whole = load_trace(trace, limit=requests * _ROWS_READ)
        for block in _BLOCKS:
            console.print(f"==> block {block}")
            out[f"block_{block}"] = _one_block(
                whole.coarsened(block), block, requests, capacity_tokens, peers, peer_python, table, console
            )
        console.print(table)
    if growth:
        console.print("==> growth (block 16)")
        out["growth"] = _growth(measure_growth(), console)
    if json_file is not None:
        json_file.write_text(json.dumps(out, indent=1) + "\n", encoding="utf-8")
    return out


def _one_block(
    trace: Any,
    block: int,
    requests: int,
    capacity: int,
    peers: tuple[str, ...],
    peer_python: Path | None,
    table: Table,
    console: Console,
) -> dict[str, Any]:
    chosen = [request for _, request in scheduled(trace)][:requests]
    prompts = prompts_of(chosen, block)
    options = ReplayOptions(capacity_tokens=capacity, block=block, with_bounds=False)
    own: list[OwnFigures] = []
    theirs: dict[str, list[dict[str, float]]] = {}
    figures: dict[str, Any] = {"peers": {}}
    with ExitStack() as stack:
        running: dict[str, PeerProcess] = {}
        for name in peers:
            try:
                running[name] = stack.enter_context(PeerProcess(name, prompts, block, capacity, peer_python))
                theirs[name] = [running[name].one_round()]
            except PeerUnavailable as error:
                console.print(f"    {error}")
                running.pop(name, None)
                figures["peers"][name] = {"unavailable": str(error)}
        for _ in range(_ROUNDS):
            own.append(measure_own(chosen, prompts, options))
            for name, peer in running.items():
                theirs[name].append(peer.one_round())
    best = min(own, key=lambda one: one.cpu_us_per_block)
    _row(table, block, "kvferry", asdict(best), 1.0, f"{best.bytes_per_cached_block:.0f}")
    for name, rounds in theirs.items():
        peer_best = min(rounds, key=lambda one: one["cpu_us_per_block"])
        times = peer_best["cpu_us_per_block"] / best.cpu_us_per_block
        figures["peers"][name] = {**peer_best, "times_ours": times}
        _row(table, block, name, peer_best, times, "")
    return {**asdict(best), "requests": len(chosen), **figures}


def _row(table: Table, block: int, who: str, figures: dict[str, float], times: float, size: str) -> None:
    table.add_row(
        str(block),
        who,
        f"{figures['hit_rate']:.5f}",
        f"{figures['cpu_us_per_block']:.3f}",
        f"{figures['cpu_ms_per_request']:.3f}",
        f"{times:.1f}",
        size,
    )


def _growth(rows: list[GrowthRow], console: Console) -> dict[str, Any]:
    table = Table("cached blocks", "prompt tokens", "warm ms")
    for row in rows:
        table.add_row(str(row.cached_blocks), str(row.prompt_tokens), f"{row.warm_ms:.3f}")
    console.print(table)
    warm = {(row.cached_blocks, row.prompt_tokens): row.warm_ms for row in rows}
    largest = max(row.cached_blocks for row in rows)
    smallest = min(row.cached_blocks for row in rows)
    longest = max(row.prompt_tokens for row in rows)
    both = [length for (cached, length) in warm if cached == smallest and (largest, length) in warm]
    by_size = [warm[largest, length] / warm[smallest, length] for length in both]
    return {
        "rows": [asdict(row) for row in rows],
        "long_over_short": warm[largest, longest] / warm[largest, 1024],
        "longest_warm_ms": warm[largest, longest],
        "large_over_small_cache": math.exp(sum(math.log(one) for one in by_size) / len(by_size)),
    }
