"""The sections `context_servers` and `generation_servers`: how many workers of a role there are and how one is picked.

Read by the controller and the router. What a section does not say about `engine`, `kv_cache_config` and
`cache_transceiver_config` comes from the top level; `ClusterConfig` fills it in, so a section is always complete.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from cluster.config.base import StrictModel
from cluster.config.engine_config import EngineConfig
from kvcache.config import KvCacheConfig
from transceiver.config import CacheTransceiverConfig

__all__ = ["RouterConfig", "ServerSectionConfig"]


class RouterConfig(StrictModel):
    """How a worker is chosen for a request."""

    type: Literal["round_robin", "load_balancing", "kv_cache_aware", "conversation"] = Field(
        default="conversation",
        description=(
            "`round_robin`: in turn; `load_balancing`: the least busy; `kv_cache_aware`: the longest cached prefix, "
            "weighed against load; `conversation`: the worker that served the conversation before."
        ),
    )
    load_weight: float = Field(
        default=0.25, ge=0.0, description="`kv_cache_aware`: cached blocks that one request in progress outweighs."
    )
    max_sessions: int = Field(
        default=100_000, ge=1, description="Conversations whose worker is remembered; the least recent is forgotten."
    )


class ServerSectionConfig(StrictModel):
    """One role's workers."""

    num_instances: int = Field(default=1, ge=1, le=4096, description="Workers of this role.")
    tensor_parallel_size: int = Field(default=1, ge=1, description="Ranks that share each layer of one worker.")
    pipeline_parallel_size: int = Field(default=1, ge=1, description="Ranks that share the layers of one worker.")
    router: RouterConfig = Field(default_factory=RouterConfig, description="How a worker of this role is chosen.")
    engine: EngineConfig = Field(
        default_factory=EngineConfig, description="Overrides of the top level's `engine`, key by key."
    )
    kv_cache_config: KvCacheConfig = Field(
        default_factory=KvCacheConfig, description="Overrides of the top level's `kv_cache_config`, key by key."
    )
    cache_transceiver_config: CacheTransceiverConfig = Field(
        default_factory=CacheTransceiverConfig,
        description="Overrides of the top level's `cache_transceiver_config`, key by key.",
    )
