"""load_config: order of the layers, inheritance of sections, and errors that say what to write."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import yaml

from cluster.config import ClusterConfig, ConfigError, ConfigProblem, load_config
from kvcache.config import ReusePolicy

POLICY = "kv_cache_config.block_reuse_config.policy"
TURNS = "kv_cache_config.block_reuse_config.max_num_turns"


def write(folder: Path, text: str) -> Path:
    path = folder / "cluster.yaml"
    path.write_text(text)
    return path


def problems_of(
    path: Path | None, sets: list[str] | None = None, env: dict[str, str] | None = None
) -> list[ConfigProblem]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, sets or [], env)
    return list(caught.value.problems)


def test_nothing_given_is_the_defaults() -> None:
    config = load_config()
    assert config == ClusterConfig()
    assert config.model == "smollm2-135m"
    assert config.context_servers.router.type == "conversation"
    assert config.generation_servers.router.type == "kv_cache_aware"


@pytest.mark.parametrize("text", ["", "# only a comment\n", "---\n", "null\n", "{}\n"])
def test_an_empty_file_is_the_defaults(tmp_path: Path, text: str) -> None:
    assert load_config(write(tmp_path, text)) == ClusterConfig()


def test_each_layer_wins_over_the_one_before(tmp_path: Path) -> None:
    path = write(tmp_path, "server: {port: 1001, host: 0.0.0.0, max_queued_requests: 7}\nmodel: hash\n")
    env = {"KVFERRY_SERVER__PORT": "1002", "KVFERRY_SERVER__HOST": "10.0.0.1", "KVFERRY_MODEL": "smollm2-135m"}
    config = load_config(path, ["server.port=1003"], env)
    assert (config.server.port, config.server.host, config.server.max_queued_requests) == (1003, "10.0.0.1", 7)
    assert config.model == "smollm2-135m"


def test_a_later_set_wins() -> None:
    assert load_config(None, ["server.port=1", "server.port=2"]).server.port == 2


def test_the_environment_is_read_only_when_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_SERVER__PORT", "1234")
    assert load_config().server.port == 8000


def test_variables_of_others_are_left_alone() -> None:
    env = {"KVFERRY_URL": "http://x", "KVFERRY_API_KEY": "k", "PATH": "/bin", "KVFERRYX__Y": "1"}
    assert load_config(None, [], env) == ClusterConfig()


def test_a_section_inherits_the_top_level_and_overrides_single_keys(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """
kv_cache_config:
  tokens_per_block: 16
  block_reuse_config: {policy: per_conversation, max_num_turns: 5}
engine: {max_batch_size: 4}
generation_servers:
  kv_cache_config: {block_reuse_config: {max_num_turns: 2}}
  engine: {max_num_tokens: 64}
""",
    )
    config = load_config(path)
    context, generation = config.context_servers, config.generation_servers
    assert context.kv_cache_config == config.kv_cache_config
    assert context.engine.max_batch_size == generation.engine.max_batch_size == 4
    assert generation.engine.max_num_tokens == 64
    assert context.engine.max_num_tokens == 2048
    assert generation.kv_cache_config.tokens_per_block == 16
    assert generation.kv_cache_config.block_reuse_config.policy is ReusePolicy.PER_CONVERSATION
    assert generation.kv_cache_config.block_reuse_config.max_num_turns == 2
    assert context.kv_cache_config.block_reuse_config.max_num_turns == 5


def test_values_given_in_python_inherit_too() -> None:
    base = load_config(None, [f"{POLICY}=per_conversation", f"{TURNS}=3"])
    config = ClusterConfig(kv_cache_config=base.kv_cache_config)
    assert config.generation_servers.kv_cache_config.block_reuse_config.max_num_turns == 3


def test_the_older_spelling_is_an_alias_across_layers(tmp_path: Path) -> None:
    path = write(tmp_path, "kv_cache_config: {block_reuse_config: {block_reuse_policy: per_request}}\n")
    assert load_config(path).kv_cache_config.block_reuse_config.policy is ReusePolicy.PER_REQUEST
    changed = load_config(path, [f"{POLICY}=per_conversation"])
    assert changed.context_servers.kv_cache_config.block_reuse_config.policy is ReusePolicy.PER_CONVERSATION


def test_both_spellings_together_are_refused_once(tmp_path: Path) -> None:
    text = "kv_cache_config: {block_reuse_config: {block_reuse_policy: per_request, policy: per_request}}\n"
    (problem,) = problems_of(write(tmp_path, text))
    assert problem.path == "kv_cache_config.block_reuse_config"
    assert "block_reuse_policy" in problem.message


@pytest.mark.parametrize("prefix", ["", "context_servers.", "generation_servers."])
def test_the_flat_policy_is_refused_with_its_new_place(prefix: str) -> None:
    (problem,) = problems_of(None, [f"{prefix}kv_cache_config.block_reuse_policy=per_request"])
    assert problem.path == f"{prefix}kv_cache_config.block_reuse_policy"
    assert f"{prefix}kv_cache_config.block_reuse_config.policy" in problem.remedy


def test_no_warning_escapes_and_max_num_turns_is_accepted_under_any_policy() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = load_config(None, [f"{TURNS}=4"])
    assert config.kv_cache_config.block_reuse_config.max_num_turns == 4


@pytest.mark.parametrize(
    ("setting", "path", "words"),
    [
        (f"{TURNS}=0", TURNS, "at least 1"),
        (f"{TURNS}=-3", TURNS, "at least 1"),
        (f"{TURNS}='5'", TURNS, "integer without quotes"),
        (f"{TURNS}=true", TURNS, "integer"),
        (f"{TURNS}=5.0", TURNS, "integer"),
        (f"{POLICY}=per_turn", POLICY, "all_reusable, per_request, per_conversation"),
        (f"{POLICY}=per_conversatoin", POLICY, "did you mean per_conversation?"),
        (f"{POLICY}=3", POLICY, "all_reusable, per_request, per_conversation"),
        (
            "cache_transceiver_config.kv_transfer_timeout_ms=null",
            "cache_transceiver_config.kv_transfer_timeout_ms",
            "60000",
        ),
        ("cache_transceiver_config.kv_transfer_timeout_ms=0", "cache_transceiver_config.kv_transfer_timeout_ms", "1"),
        ("cache_transceiver_config.backend=nccl", "cache_transceiver_config.backend", "ucx, nixl, inproc"),
        ("server.port=70000", "server.port", "at most 65535"),
        ("server.port=-1", "server.port", "at least 0"),
        ("server.prot=1", "server.prot", "did you mean server.port?"),
        ("engine.device=gpu", "engine.device", "cuda"),
        ("modle=hash", "modle", "did you mean model?"),
        ("model=", "model", "text"),
        ("max_batch_size=4", "max_batch_size", "engine.max_batch_size"),
        ("hostname=x", "hostname", "server.host"),
        ("zzz.yyy=1", "zzz", "known here"),
        ("engine=5", "engine", "mapping"),
        ("context_servers.num_instances=0", "context_servers.num_instances", "at least 1"),
        ("context_servers.router.type=sticky", "context_servers.router.type", "round_robin"),
        ("context_servers.router.load_weight=.inf", "context_servers.router.load_weight", "finite"),
    ],
)
def test_one_mistake_is_one_problem_with_a_remedy(setting: str, path: str, words: str) -> None:
    (problem,) = problems_of(None, [setting])
    assert problem.path == path
    assert words in f"{problem.message} {problem.remedy}"
    assert problem.source == f"--set {setting}"


def test_all_mistakes_are_told_at_once_with_their_places(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """
modle: hash
server:
  port: 99999
kv_cache_config:
  block_reuse_policy: per_request
  tokens_per_blok: 3
  block_reuse_config:
    max_num_turns: 0
server: {}
""",
    )
    problems = problems_of(path, ["nonsense"], {"KVFERRY_ENGINE__DTYPE": "fp4", "KVFERRY_MODLE": "x"})
    where = {problem.path: problem.source for problem in problems}
    assert where == {
        "modle": f"{path}:2",
        "server": f"{path}:10",
        "kv_cache_config.block_reuse_policy": f"{path}:6",
        "kv_cache_config.tokens_per_blok": f"{path}:7",
        "kv_cache_config.block_reuse_config.max_num_turns": f"{path}:9",
        "engine.dtype": "environment KVFERRY_ENGINE__DTYPE",
        "": "--set nonsense",
    }
    assert any(problem.source == "environment KVFERRY_MODLE" for problem in problems)


def test_an_inherited_mistake_is_told_once_and_an_own_one_by_its_path() -> None:
    problems = problems_of(None, ["engine.max_batch_size=0", "generation_servers.engine.max_num_tokens=0"])
    assert [problem.path for problem in problems] == [
        "engine.max_batch_size",
        "generation_servers.engine.max_num_tokens",
    ]


def test_the_message_holds_every_problem_a_line() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, ["server.port=70000", "a=1"])
    lines = str(caught.value).splitlines()
    assert lines[0] == "configuration: 2 errors"
    assert len(lines) == 3


def test_a_missing_file_and_a_folder_are_problems(tmp_path: Path) -> None:
    assert "does not exist" in problems_of(tmp_path / "none.yaml")[0].message
    assert "folder" in problems_of(tmp_path)[0].message


def test_the_merged_tree_is_a_configuration_again(tmp_path: Path) -> None:
    config = load_config(None, [f"{POLICY}=per_conversation", f"{TURNS}=5", "model=hash"])
    path = write(tmp_path, yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
    assert load_config(path) == config


def test_the_tree_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load_config().model = "hash"  # type: ignore[misc]


@pytest.mark.parametrize("value", ["'60000'", "true", "60000.0"])
def test_the_transceiver_section_converts_nothing_either(value: str) -> None:
    (problem,) = problems_of(None, [f"cache_transceiver_config.kv_transfer_timeout_ms={value}"])
    assert "integer" in problem.remedy
