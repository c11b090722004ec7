"""What a run refuses before anything runs, and what it leaves behind when it breaks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
from rich.console import Console

from cluster.cli.entry import main
from cluster.config import ConfigError
from cluster.transceiver_test import Forced, TransceiverTestConfig, run_transceiver_test, unknown_cells
from cluster.transceiver_test import run as run_module
from cluster.transceiver_test.cells import CellResult, CellStatus, cells_of_sweep
from cluster.transceiver_test.config import HostTransferConfig
from cluster.transceiver_test.rank_pool import RankCallError, RankHungError, RankPool

CONSOLE = Console(quiet=True)


def problems(forced: Forced | None = None, allowed: tuple[str, ...] = ()) -> list[str]:
    return [str(one) for one in unknown_cells(TransceiverTestConfig(), forced or Forced(), allowed)]


def test_a_name_that_no_cell_has_is_named_with_the_nearest() -> None:
    [text] = problems(Forced(mismatch="tp2-tp1/ctx_to_gne/100"))
    assert text.startswith(
        "--force-mismatch: no cell's name contains 'tp2-tp1/ctx_to_gne/100' -> did you mean tcp/ucx/"
    )
    assert "tcp/ucx/tp2-tp1/ctx_to_gen/100" in text
    [text] = problems(allowed=("tcp/ucx/ful/ctx_to_gen/100",))
    assert text.startswith("--allow: no cell is named 'tcp/ucx/ful/ctx_to_gen/100' -> did you mean ")
    assert "tcp/ucx/full/ctx_to_gen/100" in text
    assert "did you mean tcp/ucx/hybrid" in problems(allowed=("ucx/hybrid/ctx_to_gen",))[0]  # a part tolerates nothing
    assert "--list" in problems(Forced(hang="zzzzzz"))[0]


def test_names_that_cells_have_pass() -> None:
    name = "tcp/ucx/full/ctx_to_gen/100"
    assert problems(Forced("", "turns/per_request"), (name,)) == []
    assert len(problems(Forced("x1", "x2"), ("x3", name, "x4"))) == 4


@pytest.mark.parametrize("option", ["--force-mismatch", "--force-hang", "--allow"])
def test_the_command_refuses_an_unknown_cell_before_it_runs(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["transceiver-test", "-o", str(out), option, "tcp/ucx/ful/ctx_to_gen/100"]) == 2
    assert "did you mean tcp/ucx/full/ctx_to_gen/100" in capsys.readouterr().err
    assert not out.exists()


def test_submit_refuses_an_unknown_cell_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "test.yaml"
    path.write_text("slurm: {partition: debug}\n")
    assert main(["transceiver-test", "-c", str(path), "--submit", "--dry-run", "--allow", "tcp/ucx/ful"]) == 2
    assert "--allow: no cell is named 'tcp/ucx/ful'" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_one_clear_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    for folder in ("/proc/nope/x", str(tmp_path / "file"), str(tmp_path / "file" / "x")):
        assert main(["transceiver-test", "-o", folder]) == 2
        assert f"--output: cannot write into {folder}: " in capsys.readouterr().err


def test_results_are_written_although_the_run_breaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = TransceiverTestConfig()
    cell = next(cells_of_sweep(config, "tcp"))[0]

    def breaks(*args: Any) -> None:
        args[6](CellResult(cell, CellStatus.PASS))
        raise RuntimeError("broken")

    monkeypatch.setattr(run_module, "_run_sweep", breaks)
    with pytest.raises(RuntimeError, match="broken"):
        run_transceiver_test(config, run_module.TestOptions(tmp_path), CONSOLE)
    assert json.loads((tmp_path / "results.json").read_text())["verdicts"]["PASS"] == 1
    assert not (tmp_path / "token").exists()


def test_an_unknown_cell_is_refused_by_the_function_too(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--allow"):
        run_transceiver_test(TransceiverTestConfig(), run_module.TestOptions(tmp_path / "out", allowed=("x",)), CONSOLE)
    assert not (tmp_path / "out").exists()


class FailingPool:
    """Every call raises."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def call(self, rank: str, command: str, deadline_s: float, /, **arguments: Any) -> Any:
        raise self._error


@pytest.mark.parametrize(
    ("error", "answered"),
    [
        (RankHungError("gen-0 is gone"), False),
        (RankCallError("gen-0", "raw_receive", "ValueError: bytes are wrong", timed_out=False), True),
    ],
)
def test_a_raw_fabric_that_fails_is_a_row_of_the_report(error: Exception, answered: bool) -> None:
    pool = cast(RankPool, FailingPool(error))
    row, healthy = run_module._raw_fabric(pool, "tcp", HostTransferConfig())
    assert (row["error"], row["median_GBps"], healthy) == (str(error), 0.0, answered)
