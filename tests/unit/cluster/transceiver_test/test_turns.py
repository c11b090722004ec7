"""A turn cell between two managers of this process: it passes, and a damaged byte is found by its own check."""

from __future__ import annotations

from typing import Any, cast

import pytest

from cluster.transceiver_test import CellResult, CellStatus, TurnCell
from cluster.transceiver_test.config import LayoutConfig, ParallelConfig, TurnConfig
from cluster.transceiver_test.geometry import rank_geometry
from cluster.transceiver_test.rank_pool import RankPool
from cluster.transceiver_test.rank_process import RankProcess
from cluster.transceiver_test.turn_driver import drive_turns
from cluster.transceiver_test.turn_end import TurnEnd
from kvcache.config import ReusePolicy


class LocalRank:
    """A pool whose only rank is this process; counts the commands."""

    def __init__(self) -> None:
        self.rank = RankProcess("ctx-0", b"s" * 32, "127.0.0.1")
        self.commands: list[str] = []

    def call(self, rank: str, command: str, deadline_s: float, /, **arguments: Any) -> Any:
        self.commands.append(command)
        return self.rank.obey(command, arguments)


def turns(*, damage: bool) -> tuple[CellResult, list[str]]:
    spec = LayoutConfig(name="full", num_layers=2, num_kv_heads=2)
    cell = TurnCell("tcp", "inproc", spec, ReusePolicy.PER_CONVERSATION, 2)
    short = TurnConfig(turns=3, rewind_to=1, first_tokens=70, turn_tokens=20, answer_tokens=10)
    result, pool = CellResult(cell), LocalRank()
    layout = rank_geometry(spec, ParallelConfig(), 0).layout
    drive_turns(
        cast(RankPool, pool), cell, short, layout, "ctx-0", "ctx-0", {"backend": "inproc"}, result, lambda: 20.0,
        damage=damage,
    )  # fmt: skip
    return result, pool.commands


def test_an_undamaged_conversation_passes() -> None:
    result, commands = turns(damage=False)
    assert (result.status, result.detail) == (CellStatus.PASS, "")
    assert "turn_damage" not in commands


def test_a_damaged_byte_is_found_by_the_cells_own_check() -> None:
    result, commands = turns(damage=True)
    assert result.status is CellStatus.MISMATCH
    assert result.detail == "mismatch in turn 1: turn-gen ends with wrong blocks [0]"
    assert commands.count("turn_damage") == 1
    assert commands[-2:] == ["turn_close", "turn_close"]


def test_a_check_that_finds_nothing_is_no_forced_mismatch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TurnEnd, "_wrong_blocks", lambda self, end: [])
    assert turns(damage=True)[0].status is CellStatus.PASS  # a blind harness shows: the forced fault did not fail it
