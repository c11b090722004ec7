"""Command-line options that several commands share, and the loading and checking of the configuration they name.

Used by the command files. Imports the configuration only when a command runs.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from cluster.config import ClusterConfig, ModelLimits

__all__ = ["ConfigOption", "SetOption", "load", "require_peers", "require_sound", "require_writable", "setting"]

ConfigOption = Annotated[
    Path | None, typer.Option("--config", "-c", help="The cluster's YAML file. Without it the defaults hold.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override one key; may be given several times."),
]


def setting(path: str, value: object) -> str:
    """A `--set` argument that a flag stands for."""
    return f"{path}={json.dumps(value)}"


def load(config: Path | None, sets: Sequence[str]) -> ClusterConfig:
    """The merged configuration, with this process's environment. Raises ConfigError."""
    from cluster.config import load_config

    return load_config(config, sets, os.environ)


def require_sound(config: ClusterConfig, *, skip_model: bool = False) -> None:
    """Look at the configuration as a whole: its warnings go to stderr, what cannot work raises ConfigError.

    Reads the model's header unless `skip_model`; loads no weights.
    """
    from cluster.config import ConfigError, ConfigProblem, check_cluster, config_warnings

    problems: list[ConfigProblem] = []
    limits: ModelLimits | None = None
    if not skip_model:
        from cluster.engine.errors import EngineError

        try:
            limits = _limits_of(config)
        except EngineError as error:
            problems.append(ConfigProblem("model", str(error)))
    for warning in config_warnings(config, limits):
        print(f"kvferry: warning: {warning}", file=sys.stderr)
    problems += check_cluster(config, limits)
    if problems:
        raise ConfigError(problems)


def require_writable(file: Path | None, option: str) -> None:
    """Raises typer.BadParameter (exit status 2) when `file` cannot be written: to be called before a long run."""
    if file is None:
        return
    try:
        if file.is_dir():
            why = "is a folder: name a file in it"
        elif file.exists():
            why = "" if os.access(file, os.W_OK) else "may not be written: name another file"
        elif not file.parent.is_dir():
            why = f"cannot be written, there is no folder {file.parent}: make it, or name a file in one that exists"
        else:
            writable = os.access(file.parent, os.W_OK | os.X_OK)
            why = "" if writable else f"cannot be written, {file.parent} is not yours to write to: name another folder"
    except (OSError, ValueError) as error:
        why = f"cannot be written ({error}): name another file"
    if why:
        raise typer.BadParameter(f"{file} {why}", param_hint=option)


def require_peers(names: Sequence[str]) -> None:
    """Raises typer.BadParameter (exit status 2) for a name that is no peer of the cache benchmarks."""
    from cluster.bench.cache.peers import PEERS

    for name in names:
        if name not in PEERS:
            raise typer.BadParameter(f"unknown peer {name!r}: use one of {', '.join(PEERS)}", param_hint="--peer")


def _limits_of(config: ClusterConfig) -> ModelLimits:
    from cluster.config import ModelLimits
    from cluster.engine import describe_model

    model = describe_model(config.model, config.context_servers.kv_cache_config.tokens_per_block)
    groups = model.layout.groups
    return ModelLimits(
        max_position=model.max_position,
        num_kv_heads=tuple(group.num_kv_heads for group in groups if group.num_kv_heads),
        num_layers=sum(len(group.layers) for group in groups),
    )
