"""The two layers above the file: `KVFERRY_SECTION__KEY` environment variables and `--set section.key=value`.

Called by the loader. Each becomes a nested mapping plus the source of every path; what cannot be read is a problem.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from cluster.config.errors import ConfigProblem
from cluster.config.merge import deep_merge
from cluster.config.yaml_source import scalar_from_text

__all__ = ["ENV_PREFIX", "Overrides", "from_environment", "from_sets"]

ENV_PREFIX = "KVFERRY_"


class Overrides:
    """One layer of overrides: `values`, where each came from, and the problems found."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.sources: dict[str, str] = {}
        self.problems: list[ConfigProblem] = []

    def add(self, keys: list[str], text: str, source: str) -> None:
        """Lay `text`, read as YAML, at `keys`; a later one wins."""
        path = ".".join(keys)
        try:
            value = scalar_from_text(text)
        except ValueError as error:
            self.problems.append(ConfigProblem(path, f"{text!r} cannot be read: {error}", "quote the text", source))
            return
        nested: Any = value
        for key in reversed(keys):
            nested = {key: nested}
        self.values = deep_merge(self.values, nested)
        self.sources[path] = source

    def where(self, path: str) -> str:
        """The source of the value at `path`, or of the first key in it, when this layer gives one; else ""."""
        value: Any = self.values
        for key in path.split("."):
            if not isinstance(value, Mapping) or key not in value:
                return ""
            value = value[key]
        probe = path
        while probe and probe not in self.sources:
            probe = probe.rpartition(".")[0]
        inside = (source for other, source in self.sources.items() if other.startswith(f"{path}."))
        return self.sources.get(probe) or next(inside, "")


def from_sets(sets: Iterable[str]) -> Overrides:
    """`--set a.b=value` arguments, in order."""
    layer = Overrides()
    for argument in sets:
        source = f"--set {argument}"
        path, equals, text = argument.partition("=")
        keys = [key.strip() for key in path.split(".")]
        if not equals or not all(keys):
            layer.problems.append(
                ConfigProblem("", "this is not of the form section.key=value", "for example server.port=8001", source)
            )
            continue
        layer.add(keys, text, source)
    return layer


def from_environment(env: Mapping[str, str], top_level: Iterable[str], scalars: Iterable[str]) -> Overrides:
    """Variables that begin with `KVFERRY_` and name a configuration path, `__` between its parts.

    `top_level` are the root's keys, `scalars` those that are no sections. A variable without `__` counts when it names
    a scalar of the root or looks like one misspelt; others with the prefix belong to somebody else and are left alone.
    """
    layer = Overrides()
    names, plain = list(top_level), list(scalars)
    for variable in sorted(env):
        if not variable.startswith(ENV_PREFIX):
            continue
        keys = [part.lower() for part in variable[len(ENV_PREFIX) :].split("__")]
        source = f"environment {variable}"
        if len(keys) == 1:
            if keys[0] in names:
                layer.add(keys, env[variable], source)
            elif close := difflib.get_close_matches(keys[0], plain, n=1, cutoff=0.75):
                layer.problems.append(
                    ConfigProblem(keys[0], "unknown key", f"did you mean {ENV_PREFIX}{close[0].upper()}?", source)
                )
            continue
        if not all(keys):
            layer.problems.append(
                ConfigProblem("", "an empty part between two `__`", "for example KVFERRY_SERVER__PORT", source)
            )
            continue
        layer.add(keys, env[variable], source)
    return layer
