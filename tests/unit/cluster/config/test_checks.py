"""Rules that concern several keys or both roles."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.config import ModelLimits, check_cluster, config_warnings, load_config

LIMITS = ModelLimits(max_position=8192, num_kv_heads=(3,), num_layers=30)
POLICY = "kv_cache_config.block_reuse_config.policy"


def paths(sets: list[str], limits: ModelLimits | None = LIMITS) -> list[str]:
    return [problem.path for problem in check_cluster(load_config(None, sets), limits)]


def test_the_defaults_are_fine() -> None:
    assert paths([]) == []
    assert config_warnings(load_config()) == []


@pytest.mark.parametrize(
    ("sets", "expected"),
    [
        (["kv_cache_config.max_tokens=4096"], ["engine.max_seq_len"]),
        (["generation_servers.kv_cache_config.max_tokens=4096"], ["generation_servers.engine.max_seq_len"]),
        (["engine.max_num_tokens=8"], ["engine.max_num_tokens"]),
        (["engine.enable_chunked_prefill=false"], ["engine.enable_chunked_prefill"]),
        (["engine.enable_chunked_prefill=false", "engine.max_num_tokens=8192"], []),
        (
            ["cache_transceiver_config.enable_pipelined_transfer=true", f"{POLICY}=per_request"],
            ["cache_transceiver_config.enable_pipelined_transfer"],
        ),
        (["cache_transceiver_config.enable_pipelined_transfer=true"], []),
        (
            [
                "cache_transceiver_config.enable_pipelined_transfer=true",
                f"{POLICY}=per_request",
                "kv_cache_config.enable_block_reuse=false",
            ],
            [],
        ),
        (["context_servers.tensor_parallel_size=2"], ["context_servers.tensor_parallel_size"] * 2),
        (["context_servers.tensor_parallel_size=3"], ["context_servers.tensor_parallel_size"]),
        (["generation_servers.pipeline_parallel_size=31"], ["generation_servers.pipeline_parallel_size"] * 2),
        (
            ["generation_servers.kv_cache_config.tokens_per_block=16"],
            ["generation_servers.kv_cache_config.tokens_per_block"],
        ),
        (["generation_servers.engine.dtype=bfloat16"], ["generation_servers.engine.dtype"]),
        (
            ["context_servers.cache_transceiver_config.backend=inproc"],
            ["generation_servers.cache_transceiver_config.backend"],
        ),
        (
            ["conditional_disagg_config.max_local_prefill_length=8", "generation_servers.router.type=round_robin"],
            ["conditional_disagg_config.max_local_prefill_length"],
        ),
        (["conditional_disagg_config.max_local_prefill_length=8"], []),
        (["server.api_keys_file=/nonexistent/keys"], ["server.api_keys_file"]),
    ],
)
def test_what_does_not_go_together_is_refused(sets: list[str], expected: list[str]) -> None:
    assert paths(sets) == expected


def test_without_a_model_only_the_model_rules_are_left_out() -> None:
    assert paths(["context_servers.tensor_parallel_size=2"], None) == ["context_servers.tensor_parallel_size"]


def test_every_problem_says_what_to_write() -> None:
    sets = ["kv_cache_config.max_tokens=64", "engine.max_num_tokens=8", "context_servers.tensor_parallel_size=2"]
    for problem in check_cluster(load_config(None, sets), LIMITS):
        assert problem.remedy, problem


def test_a_readable_key_file_is_accepted(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    assert paths([f"server.api_keys_file={keys}"]) == []


@pytest.mark.parametrize(
    ("sets", "path"),
    [
        (["kv_cache_config.block_reuse_config.max_num_turns=3"], "kv_cache_config.block_reuse_config.max_num_turns"),
        (["server.host=0.0.0.0"], "server.host"),
        (["context_servers.kv_cache_config.enable_block_reuse=false"], "context_servers.router.type"),
        (["context_servers.engine.max_seq_len=4096"], "engine.max_seq_len"),
    ],
)
def test_what_is_allowed_but_has_no_effect_is_one_warning(sets: list[str], path: str) -> None:
    (warning,) = config_warnings(load_config(None, sets))
    assert warning.startswith(f"{path}: ")


def test_turns_under_their_own_policy_are_no_warning() -> None:
    sets = [f"{POLICY}=per_conversation", "kv_cache_config.block_reuse_config.max_num_turns=3"]
    assert config_warnings(load_config(None, sets)) == []


def test_more_than_the_model_can_is_a_warning() -> None:
    config = load_config(None, ["engine.max_seq_len=9000"])
    (warning,) = config_warnings(config, LIMITS)
    assert "8192" in warning
