"""Result rows of the transfer benchmark: values, JSON, and a table for the terminal."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = ["BenchRow", "render_rows", "write_rows"]


@dataclass(frozen=True, slots=True)
class BenchRow:
    """One case. Ratios are medians over interleaved rounds of one run; None: not compared.

    r                throughput over a copy of the same shape inside one process (over what `goal` names, else)
    milliseconds     for cases that measure a time
    load             the machine's load average right after the case: above 2 on two cores it was not alone
    goal, met        the aimed-at value of the case's own measure, and whether it was reached
    """

    case: str
    transport: str
    r: float | None = None
    vs_ucx_perftest: float | None = None
    vs_nixl: float | None = None
    vs_ray: float | None = None
    gbytes_per_s: float | None = None
    rounds: int = 0
    milliseconds: float | None = None
    load: float | None = None
    goal: str = ""
    met: bool | None = None


def write_rows(rows: list[BenchRow], path: Path) -> None:
    """Write ``{"rows": [...]}``. Raises OSError."""
    path.write_text(json.dumps({"rows": [asdict(row) for row in rows]}, indent=2) + "\n", encoding="utf-8")


def render_rows(rows: list[BenchRow]) -> str:
    """A table, one line a row."""

    def number(value: float | None, digits: int = 2) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    head = (
        f"{'case':40} {'transport':10} {'r':>5} {'/perf':>6} {'/nixl':>6} {'/ray':>6} {'GB/s':>6} {'ms':>8} "
        f"{'load':>5} n   goal"
    )
    lines = [head]
    for row in rows:
        verdict = {True: "met", False: "missed", None: ""}[row.met]
        lines.append(
            f"{row.case:40} {row.transport:10} {number(row.r):>5} {number(row.vs_ucx_perftest):>6} "
            f"{number(row.vs_nixl):>6} {number(row.vs_ray):>6} {number(row.gbytes_per_s):>6} "
            f"{number(row.milliseconds, 3):>8} {number(row.load, 1):>5} {row.rounds:<3} {row.goal} {verdict}".rstrip()
        )
    return "\n".join(lines)
