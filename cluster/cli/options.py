"""Command-line options that several commands share, and the loading of the configuration they name.

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
    from cluster.config import ClusterConfig

__all__ = ["ConfigOption", "SetOption", "load_and_warn", "setting"]

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


def load_and_warn(config: Path | None, sets: Sequence[str]) -> ClusterConfig:
    """The merged configuration; its warnings go to stderr. Raises ConfigError."""
    from cluster.config import config_warnings, load_config

    loaded = load_config(config, sets, os.environ)
    for warning in config_warnings(loaded):
        print(f"kvferry: warning: {warning}", file=sys.stderr)
    return loaded
