"""`run_demo`: the disaggregated conversation, the same prompts aggregated without reuse, and the verdict.

Called by the demo command. Starts the clusters in this process through `cluster.serve` and stops them again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from cluster.chat import Answer, KvferryClient
from cluster.config import ClusterConfig, load_config
from cluster.demo.conversation import ConversationResult, TurnResult, hold_conversation, repeat_prompts
from cluster.demo.expectations import ReuseRules, broken_expectations
from cluster.demo.script import DEMO_SCRIPT, DemoScript
from cluster.demo.table import print_rows
from kvcache.config import ReusePolicy
from transceiver.config import BackflowMode

__all__ = ["DemoOptions", "DemoReport", "demo_config", "run_demo"]

# What the demo runs on when no file is named: small pools, back-flow always, so that its figures are the same on every
# machine.
_DEFAULTS = (
    "engine.max_seq_len=4096",
    "kv_cache_config.max_tokens=16384",
    "cache_transceiver_config.kv_backflow=eager",
    "kv_cache_config.block_reuse_config.policy=per_conversation",
)
_DEFAULT_MAX_NUM_TURNS = 5
_NO_REUSE = ("kv_cache_config", "context_servers.kv_cache_config", "generation_servers.kv_cache_config")


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """The demo command's options."""

    config: Path | None = None
    sets: tuple[str, ...] = ()
    policy: str | None = None
    max_num_turns: int | None = None
    max_tokens: int = 48
    json_file: Path | None = None


@dataclass(frozen=True, slots=True)
class DemoReport:
    """Everything the demo found; `failures` is empty when all is as it should be."""

    conversation: ConversationResult
    equality: bool
    failures: tuple[str, ...]
    plain_ttft_ms: tuple[float, ...]
    startup_s: float

    def to_json(self) -> dict[str, Any]:
        """What `--json` writes."""
        return {
            "turns": [turn.row.to_json() for turn in self.conversation.turns],
            "equality": self.equality,
            "transport": self.conversation.transport,
            "failures": list(self.failures),
            "ttft_ms_without_reuse": list(self.plain_ttft_ms),
            "startup_s": self.startup_s,
        }


def demo_config(options: DemoOptions, env: Mapping[str, str], *, reuse: bool = True) -> ClusterConfig:
    """The configuration of the demo's cluster, or with `reuse` False that of the one it is compared with.

    Raises ConfigError.
    """
    reuse_section = "kv_cache_config.block_reuse_config"
    defaults = [] if options.config is not None else list(_DEFAULTS)
    sets: list[str] = []
    if options.policy is not None:
        sets.append(f"{reuse_section}.policy={options.policy}")
    if options.max_num_turns is not None:
        sets.append(f"{reuse_section}.max_num_turns={options.max_num_turns}")
    elif options.config is None and options.policy in (None, ReusePolicy.PER_CONVERSATION.value):
        defaults.append(f"{reuse_section}.max_num_turns={_DEFAULT_MAX_NUM_TURNS}")
    sets += [*options.sets, "server.host=127.0.0.1", "server.port=0", "server.api_keys_file=null"]
    if not reuse:
        sets += [f"{section}.enable_block_reuse=false" for section in _NO_REUSE]
    return load_config(options.config, sets, env, defaults=defaults)


async def run_demo(
    options: DemoOptions, env: Mapping[str, str], console: Console, script: DemoScript = DEMO_SCRIPT
) -> DemoReport:
    """Run the demo and print what happens. Raises ConfigError, ChatError, ClusterError or DemoError."""
    config = demo_config(options, env)
    plain_config = demo_config(options, env, reuse=False)
    started = time.perf_counter()
    conversation, plain, startup_s = await _both_runs(config, plain_config, options, script, console)

    rows = [turn.row for turn in conversation.turns]
    different = [
        row.turn for row, answer in zip(rows, plain, strict=True) if tuple(answer.token_ids) != tuple(row.token_ids)
    ]
    failures = [f"turn {turn}: the answer differs from the aggregated run without reuse" for turn in different]
    failures += broken_expectations(rows, _rules(config), transport=conversation.transport)
    plain_ttft_ms = tuple(round(answer.ttft_s * 1000, 1) for answer in plain)
    report = DemoReport(conversation, not different, tuple(failures), plain_ttft_ms, round(startup_s, 2))
    print_rows(console, rows, plain_ttft_ms)
    if options.json_file is not None:
        options.json_file.write_text(json.dumps(report.to_json(), indent=2) + "\n")
        console.print(f"figures written to {options.json_file}", highlight=False)
    _print_verdict(report, time.perf_counter() - started, console)
    return report


def _rules(config: ClusterConfig) -> ReuseRules:
    """What `config` promises. The pools hold the whole conversation, so only a policy that drops turns bounds them; the
    smaller bound of the two roles counts.
    """
    caches = [section.kv_cache_config for section in (config.context_servers, config.generation_servers)]
    bounds = [
        cache.block_reuse_config.max_num_turns
        for cache in caches
        if cache.block_reuse_config.policy is ReusePolicy.PER_CONVERSATION
    ]
    if not all(cache.enable_block_reuse for cache in caches):
        bounds.append(0)
    transceiver = config.context_servers.cache_transceiver_config
    return ReuseRules(
        tokens_per_block=config.kv_cache_config.tokens_per_block,
        backend=transceiver.backend.value,
        retained_turns=min(bounds, default=None),
        partial_reuse=all(cache.enable_partial_reuse for cache in caches),
        backflow=transceiver.kv_backflow is BackflowMode.EAGER,
    )


async def _converse(
    client: KvferryClient, options: DemoOptions, script: DemoScript, console: Console
) -> ConversationResult:
    def on_turn(number: int, text: str) -> None:
        console.print(f"turn {number}/{len(script.turns)}  user: {text}", markup=False, highlight=False)

    def on_answer(result: TurnResult) -> None:
        row = result.row
        console.print(
            f"  assistant: {row.text.strip()}\n"
            f"  {row.prompt_tokens} prompt tokens, {row.recomputed_tokens} computed, "
            f"{row.ctx_to_gen_blocks} blocks sent",
            markup=False,
            highlight=False,
        )

    return await hold_conversation(
        client,
        script,
        conversation_id=f"demo-{uuid.uuid4().hex}",
        max_tokens=options.max_tokens,
        on_turn=on_turn,
        on_answer=on_answer,
    )


async def _both_runs(
    config: ClusterConfig, plain_config: ClusterConfig, options: DemoOptions, script: DemoScript, console: Console
) -> tuple[ConversationResult, list[Answer], float]:
    """The conversation on a disaggregated cluster, then its prompts on an aggregated worker; one Ray serves both, which
    saves a start. Also returns the seconds until the first cluster served.
    """
    from cluster.controller import Controller
    from cluster.serve import running_cluster

    def progress(text: str) -> None:
        console.print(f"  {text}", markup=False, highlight=False)

    reuse = config.kv_cache_config.block_reuse_config
    console.print(
        f"starting a local cluster: {config.context_servers.num_instances} context and "
        f"{config.generation_servers.num_instances} generation worker(s), {config.model}, policy {reuse.policy.value}, "
        f"max_num_turns {reuse.max_num_turns}",
        markup=False,
        highlight=False,
    )
    begun = time.perf_counter()
    async with contextlib.AsyncExitStack() as stack:
        ray_holder = Controller(config)
        stack.push_async_callback(asyncio.to_thread, ray_holder.close)
        await asyncio.to_thread(ray_holder.connect)
        async with running_cluster(config, progress=progress) as cluster:
            startup_s = time.perf_counter() - begun
            console.print(f"serving at {cluster.base_url} after {startup_s:.1f} s", highlight=False)
            async with KvferryClient(cluster.base_url) as client:
                conversation = await _converse(client, options, script, console)
        console.print("now one aggregated worker without reuse, for comparison")
        async with (
            running_cluster(plain_config, aggregated=True, progress=progress) as plain,
            KvferryClient(plain.base_url) as client,
        ):
            answers = await repeat_prompts(
                client,
                conversation.turns,
                max_tokens=options.max_tokens,
                on_turn=lambda number: console.print(f"  prompt of turn {number} again", highlight=False),
            )
    return conversation, answers, startup_s


def _print_verdict(report: DemoReport, seconds: float, console: Console) -> None:
    for failure in report.failures:
        console.print(f"[bold red]failed[/bold red] {failure}", highlight=False)
    console.print(f"transport: {report.conversation.transport or 'none'}", highlight=False)
    console.print(f"reuse: {'as expected' if not report.failures else 'see above'}; {seconds:.0f} s in all")
    console.print(f"equality: {'ok' if report.equality else 'FAILED'}")
