"""Every row of the reference specification is a test that exists, or is replaced by a decision of the design."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.unit.kvcache.semantics_rows import ROWS, Overridden

TESTS = Path(__file__).resolve().parents[2]
FOLDERS = [parent / "shared" / "reference" for parent in Path(__file__).resolve().parents[4:]]
REFERENCE = next((folder for folder in FOLDERS if folder.is_dir()), FOLDERS[0]) / "kvcache-semantics.md"


def functions(path: Path) -> set[str]:
    nodes = ast.walk(ast.parse(path.read_text()))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


@pytest.mark.parametrize("row", ROWS)
def test_the_tests_of_a_row_exist(row: str) -> None:
    entry = ROWS[row]
    tests = entry.tests if isinstance(entry, Overridden) else entry
    assert tests
    for test in tests:
        name, function = test.split("::")
        if (TESTS / name).parent.is_dir():  # a copied tree may hold the cache's tests only
            assert function in functions(TESTS / name), test


def test_no_row_of_the_reference_is_left_out() -> None:
    if not REFERENCE.exists():
        pytest.skip(f"{REFERENCE} is not there")
    text = REFERENCE.read_text()
    sections = {int(part.split(".", 1)[0]): part for part in re.split(r"^## ", text, flags=re.MULTILINE)[1:]}
    scenarios, sides = sections[5].split("### Disaggregated sides")

    def lines(part: str) -> int:
        return len(re.findall(r"^\| (?!---)", part, re.MULTILINE)) - 1  # less the head

    expected = [f"S{n}" for n in range(1, lines(scenarios) + 1)]
    expected += [f"D{n}" for n in range(1, len(re.findall(r"^\* ", sides, re.MULTILINE)) + 1)]
    expected += re.findall(r"^\| (A\d+) ", sections[10], re.MULTILINE)
    expected += [f"B{n}" for n in range(1, 13)] + re.findall(r"\b(B1[3-9]):", sections[11])
    expected += [f"F{n}" for n in range(1, lines(sections[14]) + 1)]
    assert list(ROWS) == expected
