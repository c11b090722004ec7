"""The cache's configuration: strict, nested, old names with a pointer to the new ones (row A25)."""

from __future__ import annotations

import warnings

import pytest
from pydantic import ValidationError

from kvcache import BlockReuseConfig, KvCacheConfig, ReusePolicy
from kvcache.config import RecurrentStateConfig


@pytest.mark.parametrize(
    ("model", "data", "says"),
    [
        (BlockReuseConfig, {"policy": "per_turn"}, "use one of all_reusable, per_request, per_conversation"),
        (BlockReuseConfig, {"policy": "per_conversation", "max_num_turns": 0}, "greater than or equal to 1"),
        (BlockReuseConfig, {"policy": "per_conversation", "max_num_turns": -1}, "greater than or equal to 1"),
        (BlockReuseConfig, {"max_num_turns": "5"}, "valid integer"),
        (BlockReuseConfig, {"max_num_turns": 5.0}, "valid integer"),
        (BlockReuseConfig, {"max_num_turns": True}, "valid integer"),
        (BlockReuseConfig, {"policy": "per_request", "block_reuse_policy": "per_request"}, "give policy only"),
        (BlockReuseConfig, {"turns": 5}, "Extra inputs"),
        (KvCacheConfig, {"block_reuse_policy": "per_request"}, "kv_cache_config.block_reuse_config.policy"),
        (KvCacheConfig, {"max_token": 5}, "Extra inputs"),
        (KvCacheConfig, {"eviction_policy": "fifo"}, "use one of lru, turn_aware"),
        (KvCacheConfig, {"tokens_per_block": 0}, "greater than or equal to 1"),
        (KvCacheConfig, {"tokens_per_block": -32}, "greater than or equal to 1"),
        (KvCacheConfig, {"max_tokens": 0}, "greater than or equal to 1"),
        (KvCacheConfig, {"free_memory_fraction": 0.0}, "greater than 0"),
        (KvCacheConfig, {"free_memory_fraction": 1.5}, "less than or equal to 1"),
        (KvCacheConfig, {"host_cache_size": -1}, "greater than or equal to 0"),
        (KvCacheConfig, {"disk_cache_size": -1}, "greater than or equal to 0"),
        (KvCacheConfig, {"event_buffer_max_size": -1}, "greater than or equal to 0"),
        (KvCacheConfig, {"max_peer_pins": 0}, "greater than or equal to 1"),
        (KvCacheConfig, {"max_tracked_conversations": 0}, "greater than or equal to 1"),
        (KvCacheConfig, {"conversation_idle_timeout_s": 0.0}, "greater than 0"),
        (KvCacheConfig, {"max_util_for_resume": 0.0}, "greater than 0"),
        (RecurrentStateConfig, {"periodic_snapshot_interval": -1}, "greater than or equal to 0"),
        (RecurrentStateConfig, {"additional_snapshot_offsets_from_start": (0,)}, "greater than 0"),
        (RecurrentStateConfig, {"additional_snapshot_offsets_from_start": (1.5,)}, "valid integer"),
        (RecurrentStateConfig, {"additional_snapshot_offsets_from_end": (-1,)}, "greater than or equal to 0"),
        (RecurrentStateConfig, {"additional_snapshot_offsets_from_end": (True,)}, "valid integer"),
    ],
)
def test_refused(model: type, data: dict[str, object], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        model.model_validate(data)


def test_older_spelling() -> None:
    config = KvCacheConfig.model_validate({"block_reuse_config": {"block_reuse_policy": "per_conversation"}})
    assert config.block_reuse_config.policy is ReusePolicy.PER_CONVERSATION
    assert config.block_reuse_config.max_num_turns == 1
    assert "block_reuse_policy" not in config.model_dump()["block_reuse_config"]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"block_reuse_config": {"policy": "per_request", "max_num_turns": 2}}, "max_num_turns=2 has no effect"),
        (
            {
                "block_reuse_config": {"policy": "per_conversation"},
                "recurrent_state_config": {"periodic_snapshot_interval": 64},
            },
            "periodic_snapshot_interval=64 does not go with policy per_conversation: setting it to 0",
        ),
        (
            {
                "block_reuse_config": {"block_reuse_policy": "per_conversation"},
                "recurrent_state_config": {"periodic_snapshot_interval": 64},
            },
            "setting it to 0",
        ),
        ({"block_reuse_config": {"policy": "per_conversation", "max_num_turns": 2}}, None),
        ({"recurrent_state_config": {"periodic_snapshot_interval": 64}}, None),
    ],
)
def test_warnings(data: dict[str, object], says: str | None) -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        KvCacheConfig.model_validate(data)
    assert len(seen) == (0 if says is None else 1)
    assert says is None or says in str(seen[0].message)


def test_round_trip() -> None:
    config = KvCacheConfig(
        tokens_per_block=16,
        block_reuse_config=BlockReuseConfig(policy=ReusePolicy.PER_CONVERSATION, max_num_turns=5),
        recurrent_state_config=RecurrentStateConfig(additional_snapshot_offsets_from_start=(3, 7)),
    )
    assert KvCacheConfig.model_validate(config.model_dump()) == config
    assert KvCacheConfig.model_validate_json(config.model_dump_json()) == config
