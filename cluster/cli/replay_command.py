"""`kvferry replay`: a request trace through the real cache manager."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cluster.cli.options import require_peers, require_writable

__all__ = ["replay"]


def replay(
    trace: Annotated[Path, typer.Argument(help="A weka, mooncake or aiperf trace (.jsonl or .jsonl.gz).")],
    policy: Annotated[str, typer.Option(help="all_reusable, per_request or per_conversation.")] = "per_conversation",
    max_num_turns: Annotated[int, typer.Option(min=1, help="Retained turns (per_conversation).")] = 5,
    eviction: Annotated[str, typer.Option(help="lru or turn_aware; several, separated by commas.")] = "lru",
    capacity_tokens: Annotated[
        str, typer.Option(help="Cache size in tokens; several, separated by commas (1M = 1000000).")
    ] = "2M",
    lanes: Annotated[int, typer.Option(min=1, help="Closed-loop lanes (traces with conversations).")] = 48,
    block: Annotated[int, typer.Option(min=1, help="Tokens of a block.")] = 256,
    life_cycles: Annotated[str, typer.Option(help="full, swa or ssm.")] = "full",
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many rows of the trace.")] = None,
    conversations: Annotated[
        str,
        typer.Option(help="all, or every second conversation: even or odd (tune on one half, report on the other)."),
    ] = "all",
    peer: Annotated[
        list[str] | None, typer.Option(help="vllm or sglang: replay it there too (block 16, 32, 64).")
    ] = None,
    peer_python: Annotated[Path | None, typer.Option(help="Python that has the peer installed.")] = None,
    bounds: Annotated[bool, typer.Option(help="Compute the infinite-cache and the Belady-optimal rate.")] = True,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the figures there.")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Hit rate over capacity.")] = None,
) -> None:
    """Print hit rate, bounds, evictions, CPU and memory; one row for each capacity and eviction order."""
    require_writable(json_file, "--json")
    require_writable(plot, "--plot")
    require_peers(peer or ())

    from cluster.replay.command import ReplayCommandError, run_replay

    try:
        run_replay(
            trace,
            policy=policy,
            max_num_turns=max_num_turns,
            evictions=eviction.split(","),
            capacities=capacity_tokens.split(","),
            lanes=lanes,
            block=block,
            life_cycles=life_cycles,
            limit=limit,
            conversations=conversations,
            peers=tuple(peer or ()),
            peer_python=peer_python,
            bounds=bounds,
            json_file=json_file,
            plot=plot,
        )
    except ReplayCommandError as error:
        print(f"kvferry replay: {error}")
        raise typer.Exit(2) from None
