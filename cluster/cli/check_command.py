"""`kvferry check`: validates a configuration for both roles together and prints the merged tree."""

from __future__ import annotations

from typing import Annotated

import typer

from cluster.cli.options import ConfigOption, SetOption, load, require_sound

__all__ = ["check"]


def check(
    config: ConfigOption = None,
    set_: SetOption = None,
    skip_model: Annotated[
        bool, typer.Option("--skip-model", help="Do not look at the model, for example where it is not installed.")
    ] = False,
) -> None:
    """Validate the configuration of both roles and print it, merged, as YAML.

    Exit status 2 and one line an error when it cannot work. Loads no weights and starts nothing.
    """
    loaded = load(config, set_ or ())
    require_sound(loaded, skip_model=skip_model)

    import yaml

    print(yaml.safe_dump(loaded.model_dump(mode="json"), sort_keys=False), end="")
