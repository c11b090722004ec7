"""What a transceiver test leaves behind: results.json, results.best.json, a table and a plot of bandwidth by size.

Pure but for the files it is told to write. Every length and every cell is in results.json; verdicts count all of them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from cluster.transceiver_test.bandwidth_plot import bandwidth_svg
from cluster.transceiver_test.cells import CellResult, CellStatus, TransferCell

__all__ = ["failed_cells", "print_results", "results_to_json", "write_results"]


def failed_cells(results: Sequence[CellResult], allowed: Sequence[str] = ()) -> list[CellResult]:
    """Results that did not pass and are not tolerated; a cell is tolerated by its whole name."""
    return [result for result in results if result.status is not CellStatus.PASS and result.cell.name not in allowed]


def results_to_json(results: Sequence[CellResult], raw: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The content of results.json."""
    counts = {str(status): sum(result.status is status for result in results) for status in CellStatus}
    combinations: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        combinations.setdefault(result.cell.combination, []).append(_entry(result))
    return {
        "verdicts": counts,
        "by_combination": [{"combination": name, "cells": cells} for name, cells in combinations.items()],
        "host_transfer": list(raw),
    }


def write_results(folder: Path, results: Sequence[CellResult], raw: Sequence[dict[str, Any]]) -> list[Path]:
    """Write results.json, results.best.json and bandwidth.svg; returns their paths."""
    best: dict[str, Any] = {}
    for result in results:
        if not isinstance(result.cell, TransferCell) or result.status is not CellStatus.PASS:
            continue
        entry = _entry(result)
        old = best.get(result.cell.combination)
        if old is None or (entry["req_len"], entry["per_rank_BW_GBps"]) > (old["req_len"], old["per_rank_BW_GBps"]):
            best[result.cell.combination] = entry
    lines: dict[str, list[tuple[float, float]]] = {}
    for result in results:
        if isinstance(result.cell, TransferCell) and result.per_rank is not None:
            size = result.transfer_bytes or 0.0
            lines.setdefault(f"{result.cell.sweep}/{result.cell.combination}", []).append((size, result.per_rank))
    files = {
        "results.json": json.dumps(results_to_json(results, raw), indent=2) + "\n",
        "results.best.json": json.dumps(best, indent=2) + "\n",
        "bandwidth.svg": bandwidth_svg(lines),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    return [folder / name for name in files]


def print_results(console: Console, results: Sequence[CellResult], raw: Sequence[dict[str, Any]]) -> None:
    """One row a cell, then the raw figures and the details of what did not pass."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("cell", "transport", "GB/s a rank", "p90", "in all", "ranks", "blocks", "status"):
        table.add_column(
            heading, no_wrap=True, justify="left" if heading in ("cell", "transport", "status") else "right"
        )
    for result in results:
        figures = (result.per_rank, result.p90, result.aggregate)
        table.add_row(
            result.cell.name,
            result.transport or "-",
            *("-" if figure is None else f"{figure:.3f}" for figure in figures),
            str(result.receivers or "-"),
            str(result.blocks_moved),
            str(result.status),
        )
    console.print(table)
    for row in raw:
        figure = row.get("error") or f"{row['median_GBps']:.3f} GB/s"
        console.print(f"raw fabric, sweep {row['sweep']}: {row['mode']} {figure}", markup=False, highlight=False)
    for result in results:
        if result.status is not CellStatus.PASS:
            console.print(
                f"{result.status} {result.cell.name}: {result.detail or 'nothing was reported'}", markup=False
            )


def _entry(result: CellResult) -> dict[str, Any]:
    cell = result.cell
    return {
        "cell": cell.name,
        "sweep": cell.sweep,
        "req_len": cell.length if isinstance(cell, TransferCell) else None,
        "status": str(result.status),
        "error_detail": result.detail,
        "selected_transport": result.transport,
        "per_rank_BW_GBps": result.per_rank,
        "p90_BW_GBps": result.p90,
        "aggregate_BW_GBps": result.aggregate,
        "num_ranks": result.receivers,
        "num_samples": len(result.samples),
        "bytes": result.bytes_moved,
        "blocks": result.blocks_moved,
        "seconds": round(result.seconds, 3),
    }
