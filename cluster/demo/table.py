"""Prints the demo's rows as a table. Called by `run_demo`; knows figures, not servers."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from cluster.demo.turn_row import TurnRow

__all__ = ["print_rows"]


def print_rows(console: Console, rows: Sequence[TurnRow], plain_ttft_ms: Sequence[float]) -> None:
    """One row a turn, then its text; `plain_ttft_ms` are the times to the first token without reuse, or empty."""
    table = Table(
        title="what each turn reused, computed and moved",
        box=box.SIMPLE_HEAD,
        padding=(0, 0, 0, 1),
        title_justify="left",
    )
    headings = ["turn", "prompt", "reused\non ctx", "reused\non gen", "com-\nputed", "ctx->gen\nblocks, MiB"]
    headings += ["gen->ctx\nblocks, MiB", "TTFT\nms"]
    if plain_ttft_ms:
        headings.append("without\nreuse")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for index, row in enumerate(rows):
        cells = [
            _name(row),
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
        table.add_row(*cells)
    console.print(table)
    for row in rows:
        console.print(f"{_name(row):>5}  {row.text.strip()}", markup=False, highlight=False)


def _name(row: TurnRow) -> str:
    """The turn's number, with the turn it follows when that is not the one before."""
    return str(row.turn) if row.parent_turn == row.turn - 1 else f"{row.parent_turn}->{row.turn}"


def _moved(blocks: int, size: int) -> str:
    return f"{blocks}, {size / (1 << 20):.1f}" if blocks else "-"
