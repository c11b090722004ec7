"""Every acceptance case of the reference specification is a test that exists, with the layouts and lengths it names."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.integration.transceiver import layout_cases as cases
from tests.unit.transceiver.semantics_rows import ROWS
from transceiver.parallel_layout import ParallelLayout as P

TESTS = Path(__file__).resolve().parents[2]
FOLDERS = [parent / "shared" / "reference" for parent in Path(__file__).resolve().parents[4:]]
REFERENCE = next((folder for folder in FOLDERS if folder.is_dir()), FOLDERS[0]) / "transceiver-semantics.md"


def functions(path: Path) -> set[str]:
    """Of a test file, with the names of generated test cases."""
    tree = ast.parse(path.read_text())
    names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    assigned = (target for node in tree.body if isinstance(node, ast.Assign) for target in node.targets)
    return names | {target.id for target in assigned if isinstance(target, ast.Name)}


@pytest.mark.parametrize("row", ROWS)
def test_the_tests_of_a_row_exist(row: str) -> None:
    assert ROWS[row].tests
    for test in ROWS[row].tests:
        name, function = test.split("::")
        assert function in functions(TESTS / name), test


@pytest.fixture(scope="module")
def section() -> str:
    if not REFERENCE.exists():
        pytest.skip(f"{REFERENCE} is not there")
    parts = re.split(r"^## ", REFERENCE.read_text(), flags=re.MULTILINE)
    return next(part for part in parts if part.startswith("2. "))


def bullets(section: str) -> tuple[list[str], list[str]]:
    """Of the single-process transceiver, and of the layer below."""
    upper, lower = section.split("**kv_transfer**")
    upper, lower = upper.split("**single-process transceiver**")[1], lower.split("**Neighbours**")[0]
    return re.findall(r"^\* (.*)", upper, re.MULTILINE), re.findall(r"^\* (.*)", lower, re.MULTILINE)


def test_no_row_of_the_reference_is_left_out(section: str) -> None:
    upper, lower = bullets(section)
    names = section.split("**Neighbours**")[1].split("**Lifecycle")[0].split(": ", 1)[1]
    neighbours = re.split(r", (?![^(]*\))", names.strip())
    requirements = re.search(r"Requirement ids kept stable: ([A-Z, -]+)\.", section)
    assert "Geometry common" in section and "four component cases" in section and "Seven GPU cases" in section
    assert requirements is not None
    expected = ["G", *(f"T{n}" for n, _ in enumerate(upper, 1)), *(f"K{n}" for n, _ in enumerate(lower, 1))]
    expected += [f"N{n}" for n, _ in enumerate(neighbours, 1)]
    assert list(ROWS) == [*expected, "C", "GPU", *requirements[1].split(", ")]


def layout(name: str, dp: bool = False) -> P:
    """``tp2pp4`` or ``dp4``."""
    sizes = {kind: int(size) for kind, size in re.findall(r"(tp|dp|pp)(\d)", name)}
    return P(sizes.get("tp", sizes.get("dp", 1)), sizes.get("pp", 1), attention_dp=dp or "dp" in sizes)


ARROW = r"((?:[td]p\d|pp\d)+)→((?:[td]p\d|pp\d)+)"


def test_every_layout_that_is_named_is_run(section: str) -> None:
    """The 32 layouts, those of uneven layers, and those of replicated pools."""
    (upper, _), run = bullets(section), cases.LAYOUTS
    like, rest = upper[1].split("attention DP both ")
    both, rest = rest.split(", ctx only ")
    only, mla = rest.split("; MLA ")
    pairs = [("mha", P(tp, pp), P(tp, pp)) for tp in (1, 2, 4) for pp in (1, 2, 4)]
    pairs += [("mha", layout(a), layout(b)) for a, b in re.findall(ARROW, like)]
    pairs += [("mha", layout(name, True), layout(name, True)) for name in re.findall(r"tp\d(?:pp\d)?", both)]
    sources = re.findall(r"(tp\d(?:pp\d)?)", both)  # "ctx only (→pp2, →tp2pp2)": of the first two, in their order
    pairs += [
        ("mha", layout(a, True), layout(b))
        for a, b in zip(sources, re.findall(r"→((?:tp\d|pp\d)+)", only), strict=False)
    ]
    pairs += [("mla", layout(a), layout(b)) for a, b in re.findall(ARROW, mla)]
    pairs += [("mla", P(1), P(1)), ("mla", P(2), P(2)), ("mla", P(4), P(4))]
    pairs += [("mla", layout(n), layout(n)) for n in re.findall(r",(tp\dpp\d)", mla)]
    pairs += [("mla", layout("dp2"), P(2)), ("mla", layout("dp4"), layout("dp4"))]
    assert [pair for pair in pairs if pair not in run] == []
    assert len(set(pairs)) == len(set(run)) == int(upper[1].split()[0]) == 32

    uneven = [(layout(a), layout(b)) for a, b in re.findall(ARROW, upper[3])] + [(P(1, n), P(1, n)) for n in (2, 3, 4)]
    assert upper[3].startswith("uneven layers: 5 or 7 layers over pp 2,3,4")
    assert [pair for pair in uneven if ("mha", *pair) not in cases.UNEVEN] == []
    assert "mla" in {kind for kind, _, _ in cases.UNEVEN}

    text = re.sub(r"→1\b", "→tp1", re.sub(r" 1→", " tp1→", upper[5]))
    index = [(layout(a), layout(b)) for a, b in re.findall(ARROW, text)]
    assert len(index) == 6 and [pair for pair in index if pair not in cases.INDEX_PAIRS] == []


def test_every_length_and_window_that_is_named_is_run(section: str) -> None:
    upper, _ = bullets(section)
    lengths = re.search(r"boundary lengths ([\d, ]+)", upper[4])
    assert lengths is not None
    assert tuple(map(int, lengths[1].split(","))) == cases.BOUNDARY_LENGTHS
    assert f" {len(cases.BOUNDARY_PAIRS)} layouts" in upper[4]
    assert "window none / 24 uniform / mixed 256+24" in upper[2]
    assert list(cases.WINDOWS.values()) == [(None,), (24,), (256, 24)]
    assert "Lengths 30, 60, 80" in upper[0]
