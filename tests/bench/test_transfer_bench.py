"""The transfer benchmark runs, and its rows say what was measured; its speed is judged on a quiet machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster.bench.transfer import BenchRow, render_rows, run_transfer_bench, write_rows

KEYS = {"case", "transport", "r", "vs_ucx_perftest", "vs_nixl", "vs_ray", "gbytes_per_s", "rounds"}


@pytest.mark.slow
@pytest.mark.ucx
@pytest.mark.timeout(300)
def test_every_case_is_measured(tmp_path: Path) -> None:
    pytest.importorskip("ucxx", reason="needs ucxx")
    rows = run_transfer_bench(1, with_ray=False)
    write_rows(rows, tmp_path / "bench.json")
    written = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert len(written) == len(rows) >= 12
    for row in written:
        assert set(row) >= KEYS
        assert row["transport"].startswith("ucx/")
        assert row["r"] is None or row["r"] > 0
    assert {row["transport"] for row in written} == {"ucx/cma", "ucx/tcp"}


def test_the_table_names_goals_met_and_missed() -> None:
    text = render_rows(
        [
            BenchRow("a", "ucx/cma", r=1.0, rounds=5, goal="r >= 0.95", met=True),
            BenchRow("b", "ucx/tcp", goal="x", met=False),
        ]
    )
    assert "r >= 0.95 met" in text
    assert "x missed" in text
