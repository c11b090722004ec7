"""Configuration of one cache manager: frozen, strict pydantic models that refuse unknown keys.

The cluster nests these in its own tree (`kv_cache_config`). Validation here concerns one manager only.
"""

from __future__ import annotations

import warnings
from enum import StrEnum
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

__all__ = ["BlockReuseConfig", "KvCacheConfig", "ReusePolicy"]


class ReusePolicy(StrEnum):
    """When computed blocks are published for reuse."""

    ALL_REUSABLE = "all_reusable"
    PER_REQUEST = "per_request"
    PER_CONVERSATION = "per_conversation"


def _policy(value: Any) -> Any:
    if isinstance(value, str) and not isinstance(value, ReusePolicy):
        try:
            return ReusePolicy(value)
        except ValueError:
            names = ", ".join(policy.value for policy in ReusePolicy)
            raise ValueError(f"unknown policy {value!r}: use one of {names}") from None
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
    max_peer_pins: int = Field(default=4096, ge=1, description="Most page pins that peers may hold at a time")

    @model_validator(mode="before")
    @classmethod
    def _flat_policy(cls, data: Any) -> Any:
        if isinstance(data, dict) and "block_reuse_policy" in data:
            raise ValueError(
                "block_reuse_policy is not a key of kv_cache_config: write kv_cache_config.block_reuse_config.policy"
            )
        return data
