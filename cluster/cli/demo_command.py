"""`kvferry demo`: five turns, a rewind and a branch on a local cluster, checked token for token."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cluster.cli.options import ConfigOption, SetOption, require_sound, require_writable

if TYPE_CHECKING:
    from cluster.demo import DemoOptions

__all__ = ["demo", "perform"]


def demo(
    config: ConfigOption = None,
    set_: SetOption = None,
    policy: Annotated[str | None, typer.Option(help="all_reusable, per_request or per_conversation.")] = None,
    max_num_turns: Annotated[int | None, typer.Option(help="Retained turns (per_conversation).")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, max=1024, help="Longest answer, in tokens.")] = 48,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the figures there.")] = None,
) -> None:
    """Show KV reuse in a multi-turn conversation and check every token against a run without it.

    Exit status 1 when a token differs or a reuse that must happen did not.
    """
    require_writable(json_file, "--json")

    from cluster.demo import DemoOptions

    perform(DemoOptions(config, tuple(set_ or ()), policy, max_num_turns, max_tokens, json_file))


def perform(options: DemoOptions) -> None:
    """Run the demo and leave no process behind. Raises typer.Exit(1) when its verdict is bad."""
    import asyncio
    import os

    from rich.console import Console

    from cluster.demo import demo_config, run_demo
    from cluster.descendants import adopt_orphans, end_descendants

    require_sound(demo_config(options, os.environ))
    adopt_orphans()
    try:
        report = asyncio.run(run_demo(options, os.environ, Console()))
    finally:
        end_descendants(grace_s=2.0)
    if report.failures:
        raise typer.Exit(1)
