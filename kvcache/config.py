"""Configuration of one cache manager: frozen, strict pydantic models that refuse unknown keys.

The cluster nests these in its own tree (`kv_cache_config`). Validation here concerns one manager only.
"""

from __future__ import annotations

import warnings
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

__all__ = ["BlockReuseConfig", "EvictionPolicyName", "KvCacheConfig", "RecurrentStateConfig", "ReusePolicy"]


class ReusePolicy(StrEnum):
    """When computed blocks are published for reuse."""

    ALL_REUSABLE = "all_reusable"
    PER_REQUEST = "per_request"
    PER_CONVERSATION = "per_conversation"


class EvictionPolicyName(StrEnum):
    """Order in which cached blocks are given up; superseded ones always go first."""

    LRU = "lru"
    TURN_AWARE = "turn_aware"


def _policy(value: Any) -> Any:
    return _named(ReusePolicy, "policy", value)


def _eviction(value: Any) -> Any:
    return _named(EvictionPolicyName, "eviction_policy", value)


def _named(kind: type[StrEnum], what: str, value: Any) -> Any:
    if isinstance(value, str) and not isinstance(value, kind):
        try:
            return kind(value)
        except ValueError:
            names = ", ".join(name.value for name in kind)
            raise ValueError(f"unknown {what} {value!r}: use one of {names}") from None
    return value


class BlockReuseConfig(BaseModel):
    """Which blocks are published for reuse, and how many turns of a conversation are retained."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    policy: Annotated[ReusePolicy, BeforeValidator(_policy)] = Field(
        default=ReusePolicy.ALL_REUSABLE,
        description="all_reusable publishes every computed block at once; per_request publishes a prompt at its end "
        "and the answer at the end of the turn; per_conversation does so too and retains the last max_num_turns turns",
    )
    max_num_turns: int = Field(
        default=1, ge=1, description="Retained turns of a conversation (only with policy per_conversation)"
    )
    enable_branch_snapshot: bool = Field(
        default=False,
        description="Windowed and recurrent models: also keep the state where a new prompt leaves a cached path, so "
        "that prefixes shared by conversations can be reused",
    )

    @model_validator(mode="before")
    @classmethod
    def _older_spelling(cls, data: Any) -> Any:
        if not isinstance(data, dict) or "block_reuse_policy" not in data:
            return data
        if "policy" in data:
            raise ValueError("give policy only: block_reuse_policy is its older spelling, and both were given")
        renamed = dict(data)
        renamed["policy"] = renamed.pop("block_reuse_policy")
        return renamed

    @model_validator(mode="after")
    def _turns_without_effect(self) -> BlockReuseConfig:
        if "max_num_turns" in self.model_fields_set and self.policy is not ReusePolicy.PER_CONVERSATION:
            warnings.warn(
                f"max_num_turns={self.max_num_turns} has no effect with policy {self.policy.value}: "
                "it needs policy per_conversation",
                stacklevel=2,
            )
        return self


class RecurrentStateConfig(BaseModel):
    """Where a prompt's recurrent state is kept, besides the ends of prompts and turns. Points inside a prompt are
    forced chunk ends. With any point given, only points (and the end of the turn) are kept.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    periodic_snapshot_interval: int = Field(default=0, ge=0, description="A point every so many tokens; 0: none")
    additional_snapshot_offsets_from_start: tuple[Annotated[int, Field(gt=0)], ...] = Field(
        default=(), strict=False, description="Points counted from the start of the prompt (tokens)"
    )
    additional_snapshot_offsets_from_end: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        default=(), strict=False, description="Points counted back from the end of the prompt (0: the end itself)"
    )


class KvCacheConfig(BaseModel):
    """Sizes and reuse rules of one worker's KV cache."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    tokens_per_block: int = Field(default=32, ge=1, le=4096, description="Tokens of one block")
    max_tokens: int | None = Field(default=None, ge=1, description="Pool size in tokens; null: free_memory_fraction")
    free_memory_fraction: float = Field(
        default=0.5, gt=0, le=1, description="Share of the device's free memory for the pool when max_tokens is null"
    )
    enable_block_reuse: bool = Field(default=True, description="Look up and publish blocks at all")
    enable_partial_reuse: bool = Field(default=True, description="Let a match end inside a block (private copy)")
    block_reuse_config: BlockReuseConfig = Field(default_factory=BlockReuseConfig, description="Publication policy")
    max_tracked_conversations: int = Field(
        default=100_000, ge=1, description="Conversations remembered; the one idle for longest is ended beyond it"
    )
    conversation_idle_timeout_s: float | None = Field(
        default=None, gt=0, description="A conversation idle for longer is ended (seconds); null: never"
    )
    recurrent_state_config: RecurrentStateConfig = Field(
        default_factory=RecurrentStateConfig, description="Snapshot points of recurrent models"
    )
    eviction_policy: Annotated[EvictionPolicyName, BeforeValidator(_eviction)] = Field(
        default=EvictionPolicyName.LRU,
        description="lru, or turn_aware: conversations least likely to come back soon first, learned while serving",
    )
    host_cache_size: int = Field(
        default=0,
        ge=0,
        description="Bytes of host memory for blocks that left the device, and as many for suspended sequences",
    )
    disk_cache_size: int = Field(default=0, ge=0, description="Bytes of disk for blocks that left host memory")
    disk_cache_path: str | None = Field(
        default=None, description="Existing folder for the disk tier (needed with disk_cache_size)"
    )
    max_util_for_resume: float = Field(
        default=0.95, gt=0, le=1, description="A suspended sequence resumes only below this share of used pages"
    )
    event_buffer_max_size: int = Field(
        default=0, ge=0, description="Block events kept until they are polled; 0: no events are made"
    )
    max_peer_pins: int = Field(default=4096, ge=1, description="Most page pins that peers may hold at a time")

    @model_validator(mode="after")
    def _disk_needs_a_folder(self) -> KvCacheConfig:
        if self.disk_cache_size and (self.disk_cache_path is None or not Path(self.disk_cache_path).is_dir()):
            raise ValueError(
                f"disk_cache_size={self.disk_cache_size} needs disk_cache_path to be an existing folder, "
                f"not {self.disk_cache_path!r}"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _flat_policy(cls, data: Any) -> Any:
        if isinstance(data, dict) and "block_reuse_policy" in data:
            raise ValueError(
                "block_reuse_policy is not a key of kv_cache_config: write kv_cache_config.block_reuse_config.policy"
            )
        return data

    @model_validator(mode="before")
    @classmethod
    def _no_periodic_snapshots_per_conversation(cls, data: Any) -> Any:
        """Periodic snapshots and a bound on retained turns contradict each other: the bound wins, with a warning."""
        if not isinstance(data, dict):
            return data
        reuse = data.get("block_reuse_config")
        policy = reuse.policy if isinstance(reuse, BlockReuseConfig) else None
        if isinstance(reuse, dict):
            policy = reuse.get("policy", reuse.get("block_reuse_policy"))
        state = data.get("recurrent_state_config")
        interval = state.periodic_snapshot_interval if isinstance(state, RecurrentStateConfig) else None
        if isinstance(state, dict):
            interval = state.get("periodic_snapshot_interval")
        if policy != ReusePolicy.PER_CONVERSATION or not isinstance(interval, int) or interval <= 0:
            return data
        warnings.warn(
            f"periodic_snapshot_interval={interval} does not go with policy per_conversation: setting it to 0",
            stacklevel=2,
        )
        kept = state.model_dump() if isinstance(state, RecurrentStateConfig) else dict(state or {})
        return {**data, "recurrent_state_config": {**kept, "periodic_snapshot_interval": 0}}
