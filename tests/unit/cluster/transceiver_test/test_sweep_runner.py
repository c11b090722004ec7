"""The runner of a sweep over ranks inside this process (backend inproc): what it counts, and how it ends in trouble."""

from __future__ import annotations

from typing import Any, cast

import pytest

from cluster.transceiver_test import CellResult, CellStatus, Forced, TransceiverTestConfig
from cluster.transceiver_test import report as report_module
from cluster.transceiver_test.config import Direction, LayoutConfig, TurnConfig
from cluster.transceiver_test.rank_pool import RankPool
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


def run(test: TransceiverTestConfig, pool: LocalRank) -> tuple[bool, list[CellResult]]:
    results: list[CellResult] = []
    runner = SweepRunner(test, test.ucx_env_sweep[1], cast(RankPool, pool), Forced(), results.append)
    return runner.run(), results


@pytest.mark.parametrize("warmup", [0, 3])
def test_the_plots_sizes_are_those_of_one_transfer(
    warmup: int, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    healthy, results = run(config(warmup), LocalRank())
    assert (healthy, [one.status for one in results]) == (True, [CellStatus.PASS] * 2), results
    drawn: list[dict[str, list[tuple[float, float]]]] = []
    monkeypatch.setattr(report_module, "bandwidth_svg", lambda lines: drawn.append(lines) or "")
    write_results(tmp_path_factory.mktemp("out"), results, [])
    [points] = drawn[0].values()
    block = 2 * 2 * 2 * 32 * 64 * 2  # layers, k and v, heads, tokens, elements, bytes of float16
    assert [size for size, _ in points] == [2 * block, 10 * block]
    assert results[0].bytes_moved == (warmup + 2) * 2 * block
