"""What `kvferry replay` does: runs, a comparison table, a JSON file and a plot."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from cluster.bench.cache.own import prompts_of
from cluster.bench.cache.peers import PeerUnavailable, measure_peer
from cluster.replay.lanes import scheduled
from cluster.replay.plot import write_plot
from cluster.replay.runner import ReplayOptions, ReplayResult, replay
from cluster.replay.trace import TraceError, TraceRequest, load_trace
from kvcache import EvictionPolicyName, ReusePolicy

__all__ = ["ReplayCommandError", "run_replay"]

_COLUMNS = ("capacity", "eviction", "hit", "infinite", "Belady", "ms/req", "us/block", "B/block", "states")
_LEAST_IN_MILLIONS = 10_000  # tokens: a smaller cache is named by its tokens
_LIFE_CYCLES = ("full", "swa", "ssm")
_MOST_PEER_TOKENS = 250_000_000  # every one of them is handed to the peer's process
_KEYS = (
    "requests",
    "hit_rate",
    "infinite_hit_rate",
    "belady_hit_rate",
    "evictions",
    "cpu_ms_per_request",
    "cpu_us_per_block",
    "bytes_per_cached_block",
    "resident_blocks",
    "resident_states",
    "peers",
)
_UNITS = {"K": 1_000, "M": 1_000_000, "G": 1_000_000_000}


class ReplayCommandError(Exception):
    """A wrong argument or an unreadable trace; the message says what to write instead."""


def run_replay(
    trace: Path,
    *,
    policy: str,
    max_num_turns: int,
    evictions: Sequence[str],
    capacities: Sequence[str],
    lanes: int,
    block: int,
    life_cycles: str,
    limit: int | None,
    conversations: str,
    peers: tuple[str, ...],
    peer_python: Path | None,
    bounds: bool,
    json_file: Path | None,
    plot: Path | None,
) -> list[dict[str, Any]]:
    """Returns one record a run: the keys of `json_file` (which holds the one record, or all of them under `runs`) with
    `capacity_tokens`, `policy` and `eviction`. Blocks for minutes.
    """
    console = Console()
    chosen = _choice(ReusePolicy, "--policy", policy)
    orders = [_choice(EvictionPolicyName, "--eviction", name) for name in evictions]
    sizes = [_tokens(text) for text in capacities]
    if life_cycles not in _LIFE_CYCLES:
        raise ReplayCommandError(f"unknown --life-cycles {life_cycles!r}: use one of {', '.join(_LIFE_CYCLES)}")
    try:
        loaded = load_trace(trace, limit).half(conversations)
        if block == 256 and loaded.block_tokens % block == 0:
            block = loaded.block_tokens  # the default means 256, or the trace's own blocks where those are larger
        arrivals = scheduled(loaded.coarsened(block), lanes)
    except TraceError as error:
        raise ReplayCommandError(str(error)) from None
    console.print(f"{trace.name}: {len(arrivals)} requests, blocks of {block} tokens")
    if peers and (tokens := block * sum(len(request.blocks) for _, request in arrivals)) > _MOST_PEER_TOKENS:
        raise ReplayCommandError(
            f"{tokens} prompt tokens are too many to hand to a peer (at most {_MOST_PEER_TOKENS}): add --limit ROWS"
        )
    records: list[dict[str, Any]] = []
    notes: list[str] = []
    table = Table(box=None, padding=(0, 1, 0, 0))
    for name in _COLUMNS:
        table.add_column(name, no_wrap=True, justify="left" if name in _COLUMNS[:2] else "right")
    for size in sizes:
        for order in orders:
            first = order is orders[0]  # the bounds do not depend on the order
            options = ReplayOptions(size, block, chosen, max_num_turns, order, life_cycles, True, bounds and first)
            with Progress(console=console, transient=True) as progress:
                task = progress.add_task(f"{size} tokens, {order.value}", total=len(arrivals))
                result = replay(arrivals, options, lambda done, p=progress, t=task: p.update(t, completed=done))  # type: ignore[misc]
            if not first:
                result.infinite_hit_rate = records[-1]["infinite_hit_rate"]
                result.belady_hit_rate = records[-1]["belady_hit_rate"]
                result.peers = records[-1]["peers"]
            else:
                _add_peers(result, arrivals, options, peers, peer_python, console)
            figures = {key: value for key, value in asdict(result).items() if key in _KEYS}
            records.append({"capacity_tokens": size, "policy": policy, "eviction": order.value, **figures})
            table.add_row(*_row(size, order.value, result))
            for name, peer in result.peers.items():
                table.add_row("", name, f"{peer['hit_rate']:.4f}", "", "", "", f"{peer['cpu_us_per_block']:.3f}")
            notes.append(f"{_label(size)}, {order.value}: {_evictions(result)}")
    console.print(table)
    console.print("\n".join(["evicted blocks and states:", *notes]), highlight=False)
    if json_file is not None:
        whole = {"runs": records} if len(records) > 1 else {key: records[0][key] for key in _KEYS}
        text = json.dumps(whole, indent=1)
        json_file.write_text(text + "\n", encoding="utf-8")
    if plot is not None:
        write_plot(plot, records)
        console.print(f"wrote {plot}")
    return records


def _evictions(result: ReplayResult) -> str:
    reasons = ", ".join(f"{reason} {count}" for reason, count in result.evictions.items() if count) or "none"
    return reasons + (f"; {result.skipped} requests larger than the cache" if result.skipped else "")


def _label(tokens: int) -> str:
    return f"{tokens / 1e6:g} M" if tokens >= _LEAST_IN_MILLIONS else f"{tokens} tokens"


def _row(size: int, order: str, result: ReplayResult) -> list[str]:
    def rate(value: float | None) -> str:
        return "" if value is None else f"{value:.4f}"

    return [
        _label(size),
        order,
        rate(result.hit_rate),
        rate(result.infinite_hit_rate),
        rate(result.belady_hit_rate),
        f"{result.cpu_ms_per_request:.3f}",
        f"{result.cpu_us_per_block:.3f}",
        f"{result.bytes_per_cached_block:.0f}",
        str(result.resident_states),
    ]


def _add_peers(
    result: ReplayResult,
    arrivals: Sequence[tuple[float, TraceRequest]],
    options: ReplayOptions,
    peers: tuple[str, ...],
    python: Path | None,
    console: Console,
) -> None:
    for name in peers:
        try:
            fitting = [one for _, one in arrivals if 0 < len(one.blocks) * options.block <= options.capacity_tokens]
            prompts = prompts_of(fitting, options.block)
            peer = measure_peer(name, prompts, options.block, options.capacity_tokens, python)
        except PeerUnavailable as error:
            console.print(f"kvferry replay: {error}", markup=False)
            continue
        result.peers[name] = {key: peer[key] for key in ("hit_rate", "cpu_us_per_block")}


def _choice(kind: Any, option: str, value: str) -> Any:
    try:
        return kind(value)
    except ValueError:
        names = ", ".join(one.value for one in kind)
        raise ReplayCommandError(f"unknown {option} {value!r}: use one of {names}") from None


def _tokens(text: str) -> int:
    number, unit = (text[:-1], _UNITS[text[-1].upper()]) if text[-1:].upper() in _UNITS else (text, 1)
    try:
        size = int(float(number) * unit)
    except (ValueError, OverflowError):
        size = 0
    if size < 1:
        raise ReplayCommandError(f"--capacity-tokens {text!r} is not a positive number such as 2M or 500000")
    return size
