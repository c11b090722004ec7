"""Every kind of the public reports that a CPU can show names what covers it, and what it names exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.integration.transceiver.fault_matrix import DIRECTIONS, Cell, all_cells
from tests.integration.transceiver.public_reports import COVERED, render

ROOT = Path(__file__).resolve().parents[3]
REPORTS = ROOT.parent / "shared" / "cases" / "public-reports.md"


@pytest.mark.skipif(not REPORTS.exists(), reason="needs the collection of public reports beside the checkout")
def test_every_row_that_a_cpu_can_show_is_covered() -> None:
    rows = re.findall(r"^\| (\d+) \|.*\| ([YP])\b[^|]*\|$", REPORTS.read_text(), flags=re.MULTILINE)
    assert len(rows) > 30
    assert {int(number) for number, _ in rows} == set(COVERED)


@pytest.mark.parametrize("row", sorted(COVERED))
def test_what_covers_a_row_exists(row: int) -> None:
    cells = set(all_cells())
    for name in COVERED[row]:
        if "::" not in name:
            assert all(Cell(*name.split(" x "), direction) in cells for direction in DIRECTIONS), name
            continue
        file, _, function = name.partition("::")
        tree = ast.parse((ROOT / file).read_text())
        functions = (ast.FunctionDef, ast.AsyncFunctionDef)
        assert function in {node.name for node in tree.body if isinstance(node, functions)}, name


def test_the_table_has_a_line_for_each() -> None:
    assert len(render().splitlines()) == sum(map(len, COVERED.values()))
