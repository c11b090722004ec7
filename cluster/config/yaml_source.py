"""Reads one YAML file into plain values and remembers on which line each key stands.

Called by the loader. Safe YAML only; a key given twice, a key that is not text and an alias bomb are problems, not
surprises. Knows nothing of what the keys mean.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from cluster.config.errors import ConfigProblem

__all__ = ["YamlSource", "read_yaml", "scalar_from_text"]

_MAX_BYTES = 1 << 20
_MAX_NODES = 20_000
_MAX_DEPTH = 32
_TAGS: dict[type[yaml.Node], tuple[str, ...]] = {
    yaml.MappingNode: ("tag:yaml.org,2002:map",),
    yaml.SequenceNode: ("tag:yaml.org,2002:seq",),
}


@dataclass(slots=True)
class YamlSource:
    """What a file says: `values`, the line of every dotted path, and the problems found while reading."""

    name: str
    values: dict[str, Any] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)
    problems: list[ConfigProblem] = field(default_factory=list)

    def where(self, path: str) -> str:
        """`file:line` of `path` or of its nearest parent in the file; "" when neither is there."""
        while path:
            if path in self.lines:
                return f"{self.name}:{self.lines[path]}"
            path = path.rpartition(".")[0]
        return ""


class _CoreLoader(yaml.SafeLoader):
    """Safe YAML with the scalars of YAML 1.2: `off` and `no` are text, `1e-3` is a number, `010` and dates are text."""

    yaml_implicit_resolvers = {}  # noqa: RUF012 - an instance attribute to the stubs


for _tag, _pattern, _first in (
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    ("int", r"^[-+]?(?:0|[1-9][0-9_]*)$", "-+0123456789"),
    ("float", r"^[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?$", "-+.0123456789"),
    ("float", r"^[-+]?\.(?:inf|Inf|INF)$|^\.(?:nan|NaN|NAN)$", "-+."),
    ("null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("merge", r"^<<$", "<"),
):
    _CoreLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), list(_first))


class _TooLarge(Exception):
    """The document grows beyond the limits, through aliases or by itself."""


class _Reader:
    """Turns a node tree into values; a node met twice through aliases counts twice."""

    def __init__(self, loader: yaml.SafeLoader, source: YamlSource) -> None:
        self._loader = loader
        self._source = source
        self._nodes = 0

    def read(self, node: yaml.Node, path: str, depth: int = 0) -> Any:
        self._nodes += 1
        if self._nodes > _MAX_NODES or depth > _MAX_DEPTH:
            raise _TooLarge
        if node.tag not in _TAGS.get(type(node), (node.tag,)):
            raise yaml.constructor.ConstructorError(None, None, f"the tag {node.tag!r} is not allowed", node.start_mark)
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path, depth)
        if isinstance(node, yaml.SequenceNode):
            return [self.read(item, f"{path}.{index}", depth + 1) for index, item in enumerate(node.value)]
        return self._loader.construct_object(node)

    def _mapping(self, node: yaml.MappingNode, path: str, depth: int) -> dict[str, Any]:
        self._report_repeats(node, path)
        self._loader.flatten_mapping(node)
        values: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = self._key(key_node, path)
            if key is None:
                continue
            inner = f"{path}.{key}" if path else key
            self._source.lines[inner] = key_node.start_mark.line + 1
            values[key] = self.read(value_node, inner, depth + 1)
        return values

    def _key(self, node: yaml.Node, path: str) -> str | None:
        if isinstance(node, yaml.ScalarNode):
            if node.tag == "tag:yaml.org,2002:str":
                return str(node.value)
            found = node.value
        else:
            found = "a list or mapping"
        line = node.start_mark.line + 1
        self._source.problems.append(
            ConfigProblem(path, f"the key {found!r} is not text", "write a key name", f"{self._source.name}:{line}")
        )
        return None

    def _report_repeats(self, node: yaml.MappingNode, path: str) -> None:
        first: dict[str, int] = {}
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key, line = key_node.value, key_node.start_mark.line + 1
            if key in first:
                self._source.problems.append(
                    ConfigProblem(
                        f"{path}.{key}" if path else key,
                        f"the key is given twice, in lines {first[key]} and {line}",
                        "keep one of them",
                        f"{self._source.name}:{line}",
                    )
                )
            first.setdefault(key, line)


def read_yaml(path: Path) -> YamlSource:
    """Read `path`. Never raises for the user's mistakes: they are in `problems`. An empty file has no values."""
    source = YamlSource(str(path))

    def refuse(message: str, remedy: str, line: int | None = None) -> YamlSource:
        where = source.name if line is None else f"{source.name}:{line}"
        source.problems.append(ConfigProblem("", message, remedy, where))
        return source

    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return refuse("the file does not exist", "name an existing file after -c")
    except IsADirectoryError:
        return refuse("this is a folder", "name a YAML file after -c")
    except OSError as error:
        return refuse(f"the file cannot be read: {error.strerror}", "check its permissions")
    if len(data) > _MAX_BYTES:
        return refuse(f"the file has {len(data)} bytes", f"a configuration has at most {_MAX_BYTES}")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        return refuse(f"the file is not UTF-8 (byte {error.start})", "save it as UTF-8")
    try:
        return _read_text(text, source, refuse)
    except _TooLarge:
        return refuse(
            "the file is too large or too deeply nested once its aliases are followed", "write it out plainly"
        )
    except RecursionError:
        return refuse("the file is too deeply nested", "write it out plainly")
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        line = None if mark is None else mark.line + 1
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        return refuse(f"this is not YAML: {problem}", "correct the syntax of this line or the one before it", line)
    except ValueError as error:
        return refuse(f"a value cannot be read: {error}", "put it into quotes")


def _read_text(text: str, source: YamlSource, refuse: Any) -> YamlSource:
    loader = _CoreLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return source
        value = _Reader(loader, source).read(node, "")
    finally:
        loader.dispose()
    if value is None:
        return source
    if not isinstance(value, dict):
        refuse(f"the file holds {_kind(value)}", "write keys and values, such as `model: smollm2-135m`", 1)
        return source
    source.values = value
    return source


def _kind(value: object) -> str:
    return "a list" if isinstance(value, list) else f"the single value {value!r}"


def scalar_from_text(text: str) -> Any:
    """The value of an environment variable or a `--set`: read as YAML, so `5` is a number and `{a: 1}` a mapping.

    Raises ValueError with a reason for text that is not YAML.
    """
    source = YamlSource("")
    loader = _CoreLoader(text)
    try:
        node = loader.get_single_node()
        value = None if node is None else _Reader(loader, source).read(node, "")
    except _TooLarge:
        raise ValueError("too large") from None
    except yaml.YAMLError as error:
        raise ValueError(getattr(error, "problem", None) or "not YAML") from None
    finally:
        loader.dispose()
    if source.problems:
        raise ValueError(source.problems[0].message)
    return value
