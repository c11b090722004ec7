"""Prints the demo's rows as a table. Called by `run_demo`; knows figures, not servers."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from cluster.demo.turn_row import TurnRow

__all__ = ["print_rows"]


def print_rows(console: Console, rows: Sequence[TurnRow], plain_ttft_ms: Sequence[float]) -> None:
    """One row a turn; `plain_ttft_ms` are the times to the first token without reuse, or empty."""
    table = Table(title="what each turn reused, moved and computed", show_lines=True)
    for heading in ("turn", "prompt", "reused\nctx", "reused\ngen", "recom-\nputed", "ctx->gen", "gen->ctx", "TTFT ms"):
        table.add_column(heading, justify="right", no_wrap=True)
    if plain_ttft_ms:
        table.add_column("without\nreuse", justify="right", no_wrap=True)
    table.add_column("text", overflow="fold", min_width=16)
    for index, row in enumerate(rows):
        name = str(row.turn) if row.parent_turn == row.turn - 1 else f"{row.turn} (after {row.parent_turn})"
        cells = [
            name,
            str(row.prompt_tokens),
            str(row.ctx_reused_tokens),
            str(row.gen_reused_tokens),
            str(row.recomputed_tokens),
            _moved(row.ctx_to_gen_blocks, row.ctx_to_gen_bytes),
            _moved(row.gen_to_ctx_blocks, row.gen_to_ctx_bytes),
            f"{row.ttft_ms:.0f}",
        ]
        if plain_ttft_ms:
            cells.append(f"{plain_ttft_ms[index]:.0f}")
        table.add_row(*cells, row.text.replace("[", r"\["))
    console.print(table)


def _moved(blocks: int, size: int) -> str:
    return f"{blocks} bl\n{size / (1 << 20):.1f} MiB" if blocks else "-"
