"""The demo's conversation against the real frontend and real workers in this process, on the hash model."""

from __future__ import annotations

import contextlib
import io
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
from rich.console import Console

from cluster.chat import KvferryClient
from cluster.config import ClusterConfig
from cluster.demo import DEMO_SCRIPT, DemoOptions, ReuseRules, broken_expectations, demo_config, hold_conversation
from cluster.demo.conversation import repeat_prompts
from cluster.demo.table import print_rows
from cluster.engine import load_tokenizer
from cluster.frontend import create_app
from cluster.local_cluster import local_cluster

SETS = ("model=hash", "cache_transceiver_config.backend=inproc", "kv_cache_config.max_tokens=8192")


@contextlib.asynccontextmanager
async def served(config: ClusterConfig, *, aggregated: bool = False) -> AsyncIterator[KvferryClient]:
    async with local_cluster(config, aggregated=aggregated) as orchestrator:
        app = create_app(
            orchestrator,
            load_tokenizer("hash"),
            model_name="hash",
            server_config=config.server,
            max_seq_len=config.engine.max_seq_len,
            metrics_text=lambda: "",
        )
        async with KvferryClient("http://local", transport=httpx.ASGITransport(app=app)) as client:
            yield client


async def test_the_conversation_is_reused_and_equal_to_an_aggregated_run() -> None:
    options = DemoOptions(sets=SETS)
    config = demo_config(options, {})
    said: list[int] = []
    async with served(config) as client:
        result = await hold_conversation(
            client,
            DEMO_SCRIPT,
            conversation_id="demo",
            max_tokens=16,
            on_turn=lambda number, text: said.append(number),
            on_answer=lambda turn: None,
        )
    async with served(demo_config(options, {}, reuse=False), aggregated=True) as client:
        plain = await repeat_prompts(client, result.turns, max_tokens=16, on_turn=said.append)
    rows = [turn.row for turn in result.turns]
    assert said == [1, 2, 3, 4, 5, 6] * 2
    assert [answer.token_ids for answer in plain] == [row.token_ids for row in rows]
    assert [answer.cached_tokens for answer in plain] == [0] * 6
    rules = ReuseRules(tokens_per_block=32, backend="inproc", retained_turns=5)
    assert broken_expectations(rows, rules, transport=result.transport) == []
    assert all(row.gen_to_ctx_blocks > 0 for row in rows)
    output = io.StringIO()
    print_rows(Console(file=output, width=80), rows, [answer.ttft_s * 1000 for answer in plain])
    assert "2->6" in output.getvalue()
    assert max(len(line) for line in output.getvalue().splitlines()) <= 80


def test_options_become_settings(tmp_path: Path) -> None:
    config = demo_config(DemoOptions(), {})
    reuse = config.context_servers.kv_cache_config.block_reuse_config
    assert (reuse.policy.value, reuse.max_num_turns, config.server.port) == ("per_conversation", 5, 0)
    reuse = demo_config(DemoOptions(policy="all_reusable"), {}).kv_cache_config.block_reuse_config
    assert (reuse.policy.value, "max_num_turns" in reuse.model_fields_set) == ("all_reusable", False)
    assert demo_config(DemoOptions(max_num_turns=2), {}).kv_cache_config.block_reuse_config.max_num_turns == 2
    path = tmp_path / "c.yaml"
    path.write_text("model: hash\nserver: {port: 8000}\ngeneration_servers: {num_instances: 2}\n")
    config = demo_config(DemoOptions(config=path), {})
    assert (config.model, config.server.port, config.generation_servers.num_instances) == ("hash", 0, 2)
    assert config.kv_cache_config.block_reuse_config.policy.value == "all_reusable"
    plain = demo_config(DemoOptions(config=path), {}, reuse=False)
    assert not plain.context_servers.kv_cache_config.enable_block_reuse
