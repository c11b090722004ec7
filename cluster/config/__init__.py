"""The configuration of a cluster: models, loader, checks."""

from __future__ import annotations

from cluster.config.checks import ModelLimits, check_cluster, config_warnings
from cluster.config.cluster_config import ClusterConfig, ConditionalDisaggConfig
from cluster.config.engine_config import EngineConfig
from cluster.config.errors import ConfigError, ConfigProblem
from cluster.config.loader import load_config
from cluster.config.server_config import ServerConfig
from cluster.config.server_section import RouterConfig, ServerSectionConfig

__all__ = [
    "ClusterConfig",
    "ConditionalDisaggConfig",
    "ConfigError",
    "ConfigProblem",
    "EngineConfig",
    "ModelLimits",
    "RouterConfig",
    "ServerConfig",
    "ServerSectionConfig",
    "check_cluster",
    "config_warnings",
    "load_config",
]
