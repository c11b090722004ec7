"""What `kvferry bench cache` does: own figures, peers in the same run, growth; a table and a JSON file."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from cluster.bench.cache.growth import GrowthRow, measure_growth
from cluster.bench.cache.own import measure_own, prompts_of
from cluster.bench.cache.peers import PeerUnavailable, measure_peer
from cluster.replay.lanes import scheduled
from cluster.replay.runner import ReplayOptions
from cluster.replay.trace import load_trace

__all__ = ["run_cache_bench"]

_BLOCKS = (16, 32, 64)
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
    own = measure_own(chosen, prompts, ReplayOptions(capacity_tokens=capacity, block=block, with_bounds=False))
    table.add_row(
        str(block),
        "kvferry",
        f"{own.hit_rate:.5f}",
        f"{own.cpu_us_per_block:.3f}",
        f"{own.cpu_ms_per_request:.3f}",
        "1",
        f"{own.bytes_per_cached_block:.0f}",
    )
    figures: dict[str, Any] = {**asdict(own), "requests": len(chosen), "peers": {}}
    for name in peers:
        try:
            peer = measure_peer(name, prompts, block, capacity, peer_python)
        except PeerUnavailable as error:
            console.print(f"    {error}")
            figures["peers"][name] = {"unavailable": str(error)}
            continue
        times = peer["cpu_us_per_block"] / own.cpu_us_per_block
        figures["peers"][name] = {**peer, "times_ours": times}
        table.add_row(
            str(block),
            name,
            f"{peer['hit_rate']:.5f}",
            f"{peer['cpu_us_per_block']:.3f}",
            f"{peer['cpu_ms_per_request']:.3f}",
            f"{times:.1f}",
            "",
        )
    return figures


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
