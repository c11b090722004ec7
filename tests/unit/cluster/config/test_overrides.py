"""The layers above the file: what becomes of variables and --set arguments."""

from __future__ import annotations

import pytest

from cluster.config.overrides import from_environment, from_sets

TOP = ["model", "engine", "server"]
SCALARS = ["model"]


def test_parts_of_a_variable_become_keys() -> None:
    layer = from_environment({"KVFERRY_SERVER__PORT": "1", "KVFERRY_MODEL": "hash"}, TOP, SCALARS)
    assert layer.values == {"server": {"port": 1}, "model": "hash"}
    assert layer.where("server.port") == "environment KVFERRY_SERVER__PORT"
    assert layer.where("server.host") == ""
    assert layer.where("server") == "environment KVFERRY_SERVER__PORT"


def test_a_mapping_is_the_source_of_what_is_in_it() -> None:
    layer = from_sets(["engine={device: cpu}"])
    assert layer.where("engine.device") == "--set engine={device: cpu}"
    assert layer.where("engine.dtype") == ""


def test_later_sets_win_and_mappings_merge() -> None:
    layer = from_sets(["a={b: 1, c: 2}", "a.b=3"])
    assert layer.values == {"a": {"b": 3, "c": 2}}
    assert layer.where("a.b") == "--set a.b=3"
    assert layer.where("a.c") == "--set a={b: 1, c: 2}"


@pytest.mark.parametrize("argument", ["a", "=1", "a..b=1", ".a=1", "a.=1", ""])
def test_a_malformed_set_is_a_problem(argument: str) -> None:
    layer = from_sets([argument])
    assert layer.values == {}
    assert "section.key=value" in layer.problems[0].message


def test_a_value_may_hold_an_equals_sign() -> None:
    assert from_sets(["model=/a=b"]).values == {"model": "/a=b"}


def test_unreadable_values_are_problems_with_their_source() -> None:
    (problem,) = from_sets(["server.port=[1"]).problems
    assert problem.path == "server.port"
    assert problem.source == "--set server.port=[1"
    (problem,) = from_environment({"KVFERRY_SERVER__PORT": "{a: 1, a: 2}"}, TOP, SCALARS).problems
    assert problem.source == "environment KVFERRY_SERVER__PORT"


@pytest.mark.parametrize("variable", ["KVFERRY___X", "KVFERRY_SERVER__", "KVFERRY_A____B"])
def test_an_empty_part_is_a_problem(variable: str) -> None:
    assert from_environment({variable: "1"}, TOP, SCALARS).problems


def test_a_misspelt_scalar_is_a_problem_and_a_stranger_is_not() -> None:
    (problem,) = from_environment({"KVFERRY_MODLE": "x"}, TOP, SCALARS).problems
    assert "KVFERRY_MODEL" in problem.remedy
    assert from_environment({"KVFERRY_SECRET": "x"}, TOP, SCALARS).problems == []
