"""The transfer benchmark runs, and its rows say what was measured; its speed is judged on a quiet machine."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from cluster.bench.transfer import BenchRow, render_rows, run_transfer_bench, write_rows
from cluster.bench.transfer.link import Measured
from cluster.bench.transfer.namespaces import NamespacesUnavailable, two_hosts
from cluster.bench.transfer.nixl_peer import NixlUnavailable, open_nixl

KEYS = {"case", "transport", "r", "vs_ucx_perftest", "vs_nixl", "vs_ray", "gbytes_per_s", "rounds"}


@pytest.mark.slow
@pytest.mark.ucx
@pytest.mark.timeout(300)
def test_every_case_is_measured(tmp_path: Path) -> None:
    pytest.importorskip("ucxx", reason="needs ucxx")
    rows = run_transfer_bench(1, with_ray=False)
    write_rows(rows, tmp_path / "bench.json")
    written = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert len(written) == len(rows) >= 14
    for row in written:
        assert set(row) >= KEYS
        assert row["transport"].startswith("ucx/")
        assert row["r"] is None or row["r"] > 0
    assert {row["transport"] for row in written} == {"ucx/shm", "ucx/cma", "ucx/tcp"}


@pytest.mark.timeout(120)
def test_a_python_without_nixl_is_reported_in_its_own_words(tmp_path: Path) -> None:
    if importlib.util.find_spec("nixl") is not None:
        pytest.skip("this Python has nixl")
    with pytest.raises(NixlUnavailable, match="No module named 'nixl'"), open_nixl(4096, 4):
        pass
    with pytest.raises(NixlUnavailable, match="nowhere"), open_nixl(4096, 4, tmp_path / "nowhere"):
        pass


def test_without_root_two_hosts_are_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(NamespacesUnavailable, match="root"), two_hosts():
        pass


def test_a_ratio_is_the_median_of_ratios_inside_a_round() -> None:
    slow_moment = Measured(8, data=[1.0, 10.0, 1.0], total=[2.0, 11.0, 2.0], copy=[1.0, 10.0, 1.0])
    slow_moment.peers["nixl"] = [2.0, 20.0, 2.0]
    slow_moment.peers["ray"] = [2.0]
    assert slow_moment.r == 1.0
    assert slow_moment.over("nixl") == 2.0
    assert slow_moment.over("ray") is None  # not measured in every round
    assert slow_moment.fixed_ms == 1000.0


def test_the_table_names_goals_met_and_missed() -> None:
    text = render_rows(
        [
            BenchRow("a", "ucx/cma", r=1.0, rounds=5, goal="r >= 0.95", met=True),
            BenchRow("b", "ucx/tcp", goal="x", met=False),
        ]
    )
    assert "r >= 0.95 met" in text
    assert "x missed" in text
