"""`kvferry check`: validates a configuration for both roles together and prints the merged tree."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from cluster.cli.options import ConfigOption, SetOption, load_and_warn

if TYPE_CHECKING:
    from cluster.config import ClusterConfig

__all__ = ["check", "refuse_bad_combinations"]


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
    loaded = load_and_warn(config, set_ or ())
    refuse_bad_combinations(loaded, skip_model=skip_model)

    import yaml

    print(yaml.safe_dump(loaded.model_dump(mode="json"), sort_keys=False), end="")


def refuse_bad_combinations(config: ClusterConfig, *, skip_model: bool = False) -> None:
    """Raise ConfigError when the parts of `config` do not go together or its model cannot be used."""
    from cluster.config import ConfigError, ConfigProblem, ModelLimits, check_cluster

    problems: list[ConfigProblem] = []
    limits: ModelLimits | None = None
    if not skip_model:
        from cluster.engine import describe_model
        from cluster.engine.errors import EngineError

        try:
            model = describe_model(config.model, config.context_servers.kv_cache_config.tokens_per_block)
        except EngineError as error:
            problems.append(ConfigProblem("model", str(error)))
        else:
            groups = model.layout.groups
            limits = ModelLimits(
                max_position=model.max_position,
                num_kv_heads=tuple(group.num_kv_heads for group in groups if group.num_kv_heads),
                num_layers=sum(len(group.layers) for group in groups),
            )
    problems += check_cluster(config, limits)
    if problems:
        raise ConfigError(problems)
