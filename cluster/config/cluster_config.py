"""`ClusterConfig`: the whole configuration of a cluster as one frozen value.

Made by `load_config` (or directly, in tests); handed down to the frontend, the controller and every worker. Nobody
changes it afterwards and nobody reads the environment or a file behind its back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, Field, model_validator

from cluster.config.base import StrictModel
from cluster.config.engine_config import EngineConfig
from cluster.config.merge import deep_merge
from cluster.config.server_config import ServerConfig
from cluster.config.server_section import RouterConfig, ServerSectionConfig
from cluster.config.slurm_config import SlurmConfig
from kvcache.config import KvCacheConfig
from transceiver.config import CacheTransceiverConfig

__all__ = ["INHERITED_SECTIONS", "ROLE_SECTIONS", "ClusterConfig", "ConditionalDisaggConfig"]

INHERITED_SECTIONS = ("engine", "kv_cache_config", "cache_transceiver_config")
ROLE_SECTIONS = ("context_servers", "generation_servers")
_DEFAULT_ROUTER = {"context_servers": "conversation", "generation_servers": "kv_cache_aware"}


class ConditionalDisaggConfig(StrictModel):
    """When a generation worker computes a prompt itself instead of asking a context worker."""

    max_local_prefill_length: int = Field(
        default=0,
        ge=0,
        description="Longest uncached part of a prompt, in tokens, that a generation worker computes itself; 0: never.",
    )


def _plain(value: object) -> object:
    """Models as the mappings they were made from, so that values given in Python inherit as those from a file do."""
    if isinstance(value, BaseModel):
        return value.model_dump(exclude_unset=True)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return value


class ClusterConfig(StrictModel):
    """A kvferry cluster. A section given at the top is the default of both server sections."""

    model: str = Field(
        default="smollm2-135m",
        min_length=1,
        description=(
            "`smollm2-135m` (real weights, embedded), `hash` (a toy for tests), a Hugging Face folder with "
            "safetensors, or the path of a `.gguf` file."
        ),
    )
    engine: EngineConfig = Field(default_factory=EngineConfig, description="How a worker runs the model.")
    kv_cache_config: KvCacheConfig = Field(default_factory=KvCacheConfig, description="Pools and reuse.")
    cache_transceiver_config: CacheTransceiverConfig = Field(
        default_factory=CacheTransceiverConfig, description="How blocks travel between workers."
    )
    context_servers: ServerSectionConfig = Field(
        default_factory=ServerSectionConfig, description="The workers that compute prompts."
    )
    generation_servers: ServerSectionConfig = Field(
        default_factory=lambda: ServerSectionConfig(router=RouterConfig(type="kv_cache_aware")),
        description="The workers that produce answers.",
    )
    conditional_disagg_config: ConditionalDisaggConfig = Field(
        default_factory=ConditionalDisaggConfig, description="When prefill stays on the generation side."
    )
    server: ServerConfig = Field(default_factory=ServerConfig, description="The HTTP front.")
    slurm: SlurmConfig | None = Field(
        default=None, description="How `kvferry slurm submit` runs this cluster; `null`: not as a Slurm job."
    )
    max_retries: int = Field(
        default=1, ge=0, le=16, description="How often a request is tried again on another worker when its worker dies."
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_server_sections(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        filled: dict[str, Any] = {key: _plain(value) for key, value in data.items()}
        for role in ROLE_SECTIONS:
            section = filled.get(role, {})
            if not isinstance(section, Mapping):
                continue
            section = dict(section)
            router = section.get("router", {})
            if isinstance(router, Mapping):
                section["router"] = {"type": _DEFAULT_ROUTER[role], **router}
            for name in INHERITED_SECTIONS:
                default, own = filled.get(name, {}), section.get(name, {})
                if isinstance(default, Mapping) and isinstance(own, Mapping):
                    section[name] = deep_merge(default, own)
            filled[role] = section
        return filled
