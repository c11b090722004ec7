"""The runner of a sweep over ranks inside this process (backend inproc): what it counts, and how it ends in trouble."""

from __future__ import annotations

from typing import Any, cast

import pytest

from cluster.transceiver_test import CellResult, CellStatus, Forced, TransceiverTestConfig
from cluster.transceiver_test import report as report_module
from cluster.transceiver_test.config import Direction, LayoutConfig, TurnConfig
from cluster.transceiver_test.rank_pool import RankCallError, RankPool
from cluster.transceiver_test.rank_process import RankProcess
from cluster.transceiver_test.report import write_results
from cluster.transceiver_test.sweep_runner import SweepRunner


class LocalRank:
    """A pool whose only rank is this process; `errors` are raised by commands instead of obeying them, once each."""

    def __init__(self, errors: dict[str, Exception] | None = None) -> None:
        self.rank = RankProcess("ctx-0", b"s" * 32, "127.0.0.1")
        self.errors = errors or {}

    def call(self, rank: str, command: str, deadline_s: float, /, **arguments: Any) -> Any:
        answer = self.rank.obey(command, arguments)
        if command in self.errors:
            raise self.errors.pop(command)
        return answer

    def kill(self) -> None:
        """What the death of a process does: nothing is left of its ends."""
        for end in self.rank._ends.values():
            end.close()


def config(warmup: int) -> TransceiverTestConfig:
    return TransceiverTestConfig(
        request_lengths=(40, 300),
        requests_per_length=2,
        warmup_requests=warmup,
        backends=("inproc",),
        directions=(Direction.CTX_TO_GEN,),
        layouts=(LayoutConfig(name="full", num_layers=2, num_kv_heads=2),),
        turn_cells=TurnConfig(enabled=False),
    )


def run(test: TransceiverTestConfig, pool: LocalRank, forced: Forced | None = None) -> tuple[bool, list[CellResult]]:
    results: list[CellResult] = []
    runner = SweepRunner(test, test.ucx_env_sweep[1], cast(RankPool, pool), forced or Forced(), results.append)
    try:
        return runner.run(), results
    finally:
        pool.kill()


@pytest.mark.parametrize("warmup", [0, 3])
def test_the_plots_sizes_are_those_of_one_transfer(
    warmup: int, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    healthy, results = run(config(warmup), LocalRank())
    assert (healthy, [one.status for one in results]) == (True, [CellStatus.PASS] * 2), results
    drawn: list[dict[str, list[tuple[float, float]]]] = []

    def draw(lines: dict[str, list[tuple[float, float]]]) -> str:
        drawn.append(lines)
        return ""

    monkeypatch.setattr(report_module, "bandwidth_svg", draw)
    write_results(tmp_path_factory.mktemp("out"), results, [])
    [points] = drawn[0].values()
    block = 2 * 2 * 2 * 32 * 64 * 2  # layers, k and v, heads, tokens, elements, bytes of float16
    assert [size for size, _ in points] == [2 * block, 10 * block]
    assert results[0].bytes_moved == (warmup + 2) * 2 * block


def test_an_end_that_cannot_be_closed_ends_the_sweep_and_keeps_the_results() -> None:
    pool = LocalRank({"close": RankCallError("ctx-0", "close", "RuntimeError: a thread is left", timed_out=False)})
    healthy, results = run(config(0), pool)
    assert not healthy
    assert [one.status for one in results] == [CellStatus.PASS, CellStatus.TIMEOUT]
    assert results[1].detail == "ctx-0 close: RuntimeError: a thread is left"


def test_an_end_that_cannot_be_closed_does_not_hide_a_mismatch() -> None:
    pool = LocalRank({"close": RankCallError("ctx-0", "close", "TimeoutError: no end", timed_out=True)})
    healthy, results = run(config(0), pool, Forced(mismatch="/300"))
    assert not healthy
    assert [one.status for one in results] == [CellStatus.PASS, CellStatus.MISMATCH]
