"""read_yaml: places, repeated keys, YAML 1.2 scalars, and files that are no configuration at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cluster.config.yaml_source import YamlSource, read_yaml, scalar_from_text


def read(folder: Path, text: str | bytes) -> YamlSource:
    path = folder / "c.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_yaml(path)


def test_every_key_knows_its_line(tmp_path: Path) -> None:
    source = read(tmp_path, "a: 1\nb:\n  c: 2\n  d: {e: 3}\n")
    assert source.values == {"a": 1, "b": {"c": 2, "d": {"e": 3}}}
    assert source.lines == {"a": 1, "b": 2, "b.c": 3, "b.d": 4, "b.d.e": 4}
    assert source.where("b.d.unknown").endswith("c.yaml:4")
    assert source.where("zzz") == ""


def test_a_key_given_twice_is_told_with_both_lines(tmp_path: Path) -> None:
    source = read(tmp_path, "a: 1\nb: {x: 1, x: 2}\na: 3\n")
    assert [(problem.path, problem.source[-2:]) for problem in source.problems] == [("a", ":3"), ("b.x", ":2")]
    assert "lines 1 and 3" in source.problems[0].message


def test_merge_keys_are_no_repetition(tmp_path: Path) -> None:
    source = read(tmp_path, "base: &base {x: 1, y: 2}\nother: {<<: *base, y: 3}\n")
    assert source.problems == []
    assert source.values["other"] == {"x": 1, "y": 3}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("off", "off"),
        ("yes", "yes"),
        ("true", True),
        ("null", None),
        ("", None),
        ("~", None),
        ("010", "010"),
        ("65_536", 65536),
        ("-3", -3),
        ("1e-3", 0.001),
        ("1.5", 1.5),
        ("2020-01-01", "2020-01-01"),
        ("1:30", "1:30"),
        ("[1, a]", [1, "a"]),
        ("{a: {b: 1}}", {"a": {"b": 1}}),
        ("'5'", "5"),
    ],
)
def test_scalars_mean_what_they_look_like(text: str, value: Any) -> None:
    assert scalar_from_text(text) == value
    assert type(scalar_from_text(text)) is type(value)


@pytest.mark.parametrize("text", ["{a: 1, a: 2}", "[1", "a: b: c", "!!python/object:os.system x", "&a [*a]"])
def test_text_that_is_no_value_is_refused_with_a_reason(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        scalar_from_text(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [1\n", "not YAML"),
        ("a: b: c\n", "not YAML"),
        ("a: 1\n\tb: 2\n", "not YAML"),
        ("- a\n- b\n", "holds a list"),
        ("just text\n", "single value"),
        ("a: 1\n---\nb: 2\n", "not YAML"),
        ("5: a\n", "not text"),
        ("[a]: 1\n", "not text"),
        ("a: !!python/object/apply:os.system [ls]\n", "not YAML"),
        (b"a: \xff\xfe\n", "not UTF-8"),
        (b"a: \x00\n", "not YAML"),
        ("a: *unknown\n", "not YAML"),
    ],
)
def test_a_broken_file_is_one_problem_that_names_it(tmp_path: Path, text: str | bytes, words: str) -> None:
    source = read(tmp_path, text)
    assert len(source.problems) == 1
    assert words in source.problems[0].message
    assert "c.yaml" in source.problems[0].source


def test_an_alias_bomb_is_refused_quickly(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    source = read(tmp_path, "\n".join(lines))
    assert "too large" in source.problems[0].message


@pytest.mark.parametrize("text", ["a: " + "{a: " * 40 + "1" + "}" * 40, "[" * 1500, "a: &x\n  b: *x\n"])
def test_depth_is_bounded(tmp_path: Path, text: str) -> None:
    source = read(tmp_path, text)
    assert source.problems


def test_a_huge_file_is_refused_by_its_size(tmp_path: Path) -> None:
    source = read(tmp_path, b"#" * (1 << 21))
    assert "bytes" in source.problems[0].message
