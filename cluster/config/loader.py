"""`load_config`: defaults, then the YAML file, then the environment, then `--set`; one strict tree comes out.

Called by the command line and by the examples. Reports everything that is wrong at once and touches nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from cluster.config.cluster_config import ROLE_SECTIONS, ClusterConfig
from cluster.config.errors import ConfigError, ConfigProblem
from cluster.config.explain import explain
from cluster.config.fields import model_at
from cluster.config.merge import canonical_keys, deep_merge
from cluster.config.overrides import Overrides, from_environment, from_sets
from cluster.config.yaml_source import YamlSource, read_yaml

__all__ = ["load_config", "raw_values"]


def load_config(
    path: str | Path | None = None,
    sets: Iterable[str] = (),
    env: Mapping[str, str] | None = None,
    *,
    defaults: Iterable[str] = (),
) -> ClusterConfig:
    """The merged and validated configuration.

    `path` may be None (defaults only); `env` is empty unless given, so a test is not at the mercy of its machine;
    `defaults` are settings like `sets`, below all other layers.
    Raises ConfigError with every problem of every layer. Reads one file, changes nothing.
    """
    file = YamlSource("") if path is None else read_yaml(Path(path))
    scalars = [name for name in ClusterConfig.model_fields if model_at(ClusterConfig, (name,)) is None]
    environment = from_environment(env or {}, ClusterConfig.model_fields, scalars)
    command_line = from_sets(sets)
    problems: list[ConfigProblem] = [*file.problems, *environment.problems, *command_line.problems]

    merged: dict[str, Any] = {}
    for layer in (from_sets(defaults).values, file.values, environment.values, command_line.values):
        merged = deep_merge(merged, canonical_keys(layer))
    where = _source_finder(file, environment, command_line)
    problems += _take_flat_policy(merged, where)
    try:
        with warnings.catch_warnings():  # `config_warnings` tells each of them once and with its path
            warnings.simplefilter("ignore", UserWarning)
            config = ClusterConfig.model_validate(merged)
    except ValidationError as error:
        problems += explain(error, ClusterConfig, ROLE_SECTIONS, where)
    else:
        if not problems:
            return config
    raise ConfigError(problems)


def raw_values(path: Path | None, sets: Iterable[str] = (), env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """What file, environment and `--set` say together, unchecked: for a look at what `load_config` refused.

    What cannot be read is left out; nothing is raised for it.
    """
    file = YamlSource("") if path is None else read_yaml(path)
    scalars = [name for name in ClusterConfig.model_fields if model_at(ClusterConfig, (name,)) is None]
    environment = from_environment(env or {}, ClusterConfig.model_fields, scalars)
    merged: dict[str, Any] = {}
    for layer in (file.values, environment.values, from_sets(sets).values):
        merged = deep_merge(merged, canonical_keys(layer))
    return merged


def _take_flat_policy(merged: dict[str, Any], where: Callable[[str], str]) -> list[ConfigProblem]:
    """Remove `block_reuse_policy` from where it stood before it was nested, with a pointer to its new place; taken out
    here so that the other errors of its section are still found.
    """
    problems: list[ConfigProblem] = []
    for prefix in ("", *(f"{role}." for role in ROLE_SECTIONS)):
        section = merged.get(prefix[:-1], {}) if prefix else merged
        cache = section.get("kv_cache_config") if isinstance(section, dict) else None
        if isinstance(cache, dict) and "block_reuse_policy" in cache:
            del cache["block_reuse_policy"]
            path = f"{prefix}kv_cache_config"
            remedy = f"write it as {path}.block_reuse_config.policy"
            old = f"{path}.block_reuse_policy"
            problems.append(ConfigProblem(old, "the key does not stand here", remedy, where(old)))
    return problems


def _source_finder(file: YamlSource, environment: Overrides, command_line: Overrides) -> Callable[[str], str]:
    def where(path: str) -> str:
        for spelling in (path, _older_spelling(path)):
            if found := command_line.where(spelling) or environment.where(spelling):
                return found
            if spelling in file.lines:
                return file.where(spelling)
        return file.where(path)

    return where


def _older_spelling(path: str) -> str:
    head, _, leaf = path.rpartition(".")
    return f"{head}.block_reuse_policy" if leaf == "policy" else path
