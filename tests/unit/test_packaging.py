"""The shape of the house: names, exports, pins, task list, file sizes."""

from __future__ import annotations

import ast
import importlib
import os
import re
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("cluster", "transceiver", "kvcache")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
INITS = [path for path in SOURCES if path.name == "__init__.py"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_is_the_one_in_this_checkout(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__file__ is not None
    assert Path(module.__file__).resolve() == ROOT / name / "__init__.py"
    foreign = {owner for owner in packages_distributions().get(name, []) if owner.lower() != "kvferry"}
    assert foreign == set(), f"{name} also belongs to {foreign}: use a virtual environment of kvferry's own"


@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_ships_its_types(name: str) -> None:
    assert (ROOT / name / "py.typed").is_file()


@pytest.mark.parametrize("folder", ["tests", "slurm", "examples"])
def test_folders_that_are_no_packages_hold_no_init(folder: str) -> None:
    assert list((ROOT / folder).rglob("__init__.py")) == []


def export_order(name: str) -> tuple[int, str]:
    """Constants, then classes, then functions and modules: the order ruff keeps."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)


@pytest.mark.parametrize("path", INITS, ids=module_name)
def test_exports_are_sorted_and_exist(path: Path) -> None:
    tree = ast.parse(path.read_text())
    lists = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets)
    ]
    imports_names = any(isinstance(node, ast.ImportFrom) and node.module != "__future__" for node in tree.body)
    if not lists:
        assert not imports_names, "a package that re-exports names lists them in __all__"
        return
    names = ast.literal_eval(lists[0])
    assert list(names) == sorted(names, key=export_order)
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", ["cluster.config", "cluster.chat", "cluster.demo", "cluster.doctor", *PACKAGES[1:]])
def test_every_export_can_be_had(name: str) -> None:
    module = importlib.import_module(name)
    assert [export for export in module.__all__ if not hasattr(module, export)] == []


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_a_file_is_small_and_says_what_it_is(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 500
    assert ast.get_docstring(ast.parse(text)), "begin with a docstring that says what the file owns"


def pins() -> dict[str, Version]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    return {name.lower().replace("_", "-"): Version(version) for name, version in (line.split("==") for line in lines)}


@pytest.mark.parametrize(
    "requirement",
    [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["test"], *PROJECT["optional-dependencies"]["dev"]],
)
def test_every_dependency_is_bounded_and_pinned_within_its_bounds(requirement: str) -> None:
    parsed = Requirement(requirement)
    if parsed.name == "kvferry":
        return
    operators = {specifier.operator for specifier in parsed.specifier}
    assert operators == {">=", "<"}, requirement
    assert parsed.specifier.contains(pins()[parsed.name.lower().replace("_", "-")]), requirement


def test_the_task_list_is_complete() -> None:
    text = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", text, flags=re.MULTILINE))
    assert {"demo", "test", "lint", "type", "docs", "clean", "help"} <= targets
    assert ".DEFAULT_GOAL := help" in text
    assert f"torch=={pins()['torch']}" in text, "the Makefile's torch is the pinned one"


def test_the_ci_script_calls_the_task_list() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    text = script.read_text()
    assert "set -euo pipefail" in text
    for target in ("lint", "type", "docs-check", "test"):
        assert f"make {target}" in text


def test_the_script_is_the_command() -> None:
    assert PROJECT["scripts"] == {"kvferry": "cluster.cli:main"}
    assert PROJECT["requires-python"] == ">=3.11"
