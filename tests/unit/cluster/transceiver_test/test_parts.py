"""Cells, patterns, geometry, figures and the plot of the transceiver test: pure parts."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest

from cluster.config import ConfigError
from cluster.transceiver_test import (
    CellResult,
    CellStatus,
    TransceiverTestConfig,
    TransferCell,
    TurnCell,
    cells_of_sweep,
    load_test_config,
)
from cluster.transceiver_test.config import LayoutConfig, LayoutKind, ParallelConfig
from cluster.transceiver_test.geometry import holders_of, rank_geometry, side_ranks, wanted_ordinals
from cluster.transceiver_test.pattern import block_pattern
from cluster.transceiver_test.report import failed_cells, results_to_json, write_results
from cluster.transceiver_test.turn_driver import missing_blocks, turn_tokens
from kvcache.config import ReusePolicy
from kvcache.layout import LayerGroup, LifeCycleKind


def default_cells() -> list[TransferCell | TurnCell]:
    config = TransceiverTestConfig()
    return [cell for sweep in config.ucx_env_sweep for case in cells_of_sweep(config, sweep.name) for cell in case]


def test_every_cell_has_a_name_of_its_own() -> None:
    cells = default_cells()
    assert len({cell.name for cell in cells}) == len(cells) == 148


def test_the_default_matrix_has_every_dimension() -> None:
    cells = default_cells()
    kinds = {cell.layout.kind for cell in cells}
    assert kinds == set(LayoutKind)
    assert {cell.length for cell in cells if isinstance(cell, TransferCell)} == {100, 1000, 8000}
    turns = [cell for cell in cells if isinstance(cell, TurnCell)]
    assert {cell.policy for cell in turns} == set(ReusePolicy)
    assert {cell.max_num_turns for cell in turns if cell.policy is ReusePolicy.PER_CONVERSATION} == {1, 5}


def test_request_ids_do_not_collide() -> None:
    config = TransceiverTestConfig(request_lengths=tuple(range(1, 21)))
    ids = [
        cell.request_id(number)
        for case in cells_of_sweep(config, "tcp")
        for cell in case
        if isinstance(cell, TransferCell)
        for number in (0, 9999)
    ]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("dtype", ["float32", "float16", "float8_e4m3fn"])
def test_the_pattern_tells_tokens_layers_heads_and_sides_apart(dtype: str) -> None:
    group = LayerGroup(LifeCycleKind.FULL, (0, 1, 2), num_kv_heads=3, head_dim=16, dtype=dtype)
    page = block_pattern(group, 0, np.arange(5, dtype=np.uint64))
    assert page.nbytes == group.page_bytes(5)
    assert len(np.unique(page)) == page.size


def test_a_ranks_pattern_is_its_part_of_the_whole() -> None:
    whole = LayerGroup(LifeCycleKind.FULL, (0, 1, 2, 3), num_kv_heads=4, head_dim=16)
    part = LayerGroup(LifeCycleKind.FULL, (2, 3), num_kv_heads=2, head_dim=16)
    tokens = np.arange(7, dtype=np.uint64)
    assert np.array_equal(block_pattern(part, 2, tokens), block_pattern(whole, 0, tokens)[2:, :, 2:])


def test_ranks_share_layers_and_heads_out() -> None:
    spec = LayoutConfig(name="x", num_layers=4, num_kv_heads=2, generation=ParallelConfig(tp=4))
    held = [rank_geometry(spec, spec.generation, rank).first_heads[0] for rank in side_ranks(spec.generation)]
    assert held == [0, 0, 1, 1]
    assert holders_of(spec, spec.generation, spec.context, 0) in ([0, 2], [1, 3])
    stages = LayoutConfig(name="y", num_layers=3, context=ParallelConfig(pp=2))
    assert [rank_geometry(stages, stages.context, rank).layout.groups[0].layers for rank in (0, 1)] == [(0, 1), (2,)]


def test_wanted_blocks_by_life_cycle() -> None:
    full = LayerGroup(LifeCycleKind.FULL, (0,), num_kv_heads=1, head_dim=8)
    sliding = LayerGroup(LifeCycleKind.SLIDING, (0,), num_kv_heads=1, head_dim=8, window=10)
    state = LayerGroup(LifeCycleKind.RECURRENT, (0,), state_bytes_per_layer=8)
    assert wanted_ordinals(full, 8, 20) == [(0, 8), (1, 8), (2, 4)]
    assert wanted_ordinals(sliding, 8, 20) == [(1, 8), (2, 4)]
    assert wanted_ordinals(state, 8, 20) == [(2, 4)]


def test_missing_blocks_count_a_partly_filled_one() -> None:
    assert [missing_blocks(reused, 65, 32) for reused in (0, 31, 32, 64)] == [3, 3, 2, 1]
    assert set(turn_tokens(1, 50, 1)).isdisjoint(turn_tokens(1, 50, 2) + turn_tokens(2, 50, 1))


def result(status: CellStatus, samples: list[float], length: int = 100) -> CellResult:
    cell = TransferCell(
        "tcp", "ucx", LayoutConfig(name="full"), next(iter(TransceiverTestConfig().directions)), length, 1, 0
    )
    return CellResult(
        cell, status, "", "ucx/tcp", samples, receivers=2, bytes_moved=10_000, timed_bytes=10_000, blocks_moved=4
    )


def test_figures() -> None:
    one = result(CellStatus.PASS, [1.0, 2.0, 3.0, 10.0])
    assert (one.per_rank, one.p90, one.aggregate) == (2.5, 10.0, 5.0)
    assert result(CellStatus.NO_DATA, []).per_rank is None


def test_anything_but_pass_fails_unless_it_is_allowed_by_name() -> None:
    results = [result(status, [1.0], length) for length, status in enumerate(CellStatus, 1)]
    assert {one.status for one in failed_cells(results)} == set(CellStatus) - {CellStatus.PASS}
    names = [one.cell.name for one in results]
    assert failed_cells(results, names) == []
    assert len(failed_cells(results, ["ucx/full"])) == 4  # a part of a name tolerates nothing


def test_the_files_hold_every_length(tmp_path: Path) -> None:
    results = [result(CellStatus.PASS, [1.0], 100), result(CellStatus.PASS, [3.0], 1000)]
    results.append(result(CellStatus.MISMATCH, [9.0], 8000))
    write_results(tmp_path, results, [])
    data = json.loads((tmp_path / "results.json").read_text())
    [combination] = data["by_combination"]
    assert [cell["req_len"] for cell in combination["cells"]] == [100, 1000, 8000]
    assert data["verdicts"] == {"PASS": 2, "NO_DATA": 0, "TRANSFER_ERROR": 0, "TIMEOUT": 0, "MISMATCH": 1}
    best = json.loads((tmp_path / "results.best.json").read_text())
    assert [entry["req_len"] for entry in best.values()] == [1000]
    assert ElementTree.parse(tmp_path / "bandwidth.svg").getroot().tag.endswith("svg")
    assert results_to_json([], []) == {
        "verdicts": dict.fromkeys(map(str, CellStatus), 0),
        "by_combination": [],
        "host_transfer": [],
    }


def test_bad_input_is_named_all_at_once(tmp_path: Path) -> None:
    path = tmp_path / "test.yaml"
    path.write_text(
        "request_lengths: [0]\n"
        "requests_per_lenght: 3\n"
        "layouts: [{name: a, num_kv_heads: 3, context: {tp: 2}}]\n"
        "run: {timeout_per_cell_s: 60.0, max_sweep_s: 50.0}\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_test_config(path)
    text = str(caught.value)
    for expected in (
        "request_lengths.0",
        "did you mean requests_per_length?",
        "3 KV heads cannot be shared out over 2 ranks",
        "max_sweep_s must be above timeout_per_cell_s",
    ):
        assert expected in text
