"""Kinds of fault from public reports, on the whole cluster: truthful counts, idle conversations, silent loss of use."""

from __future__ import annotations

import re

import numpy as np
import pytest

from cluster.local_cluster import local_cluster
from cluster.metrics import metrics_text
from cluster.orchestrator import Orchestrator
from tests.integration.cluster.quiet import quiet
from tests.integration.cluster.test_local_cluster import BLOCK, ask, config, extend, prompt


async def number(orchestrator: Orchestrator, series: str) -> float:
    """A value of the cluster's metrics; `series` is a name with its labels as they are printed."""
    text = (await metrics_text(orchestrator, model_name="hash")).decode()
    found = re.search(rf"^{re.escape(series)} (\S+)$", text, flags=re.MULTILINE)
    assert found is not None, text
    return float(found.group(1))


async def test_a_fresh_prompt_counts_nothing_as_cached_though_it_travelled():
    """What was transferred is no reuse: a prompt that nobody has seen is billed in full."""
    async with local_cluster(config()) as orchestrator:
        _, record = await ask(orchestrator, prompt(100))
        usage = record.usage
        assert (usage.ctx_cached_tokens, usage.ctx_pulled_tokens, usage.recomputed_tokens) == (0, 0, 100)
        assert usage.ctx_to_gen_blocks > 0 and usage.ctx_to_gen_bytes > 0
        await quiet(orchestrator)


async def test_idle_conversations_never_keep_a_new_one_out():
    """Retained turns are a cache, not a claim: they are counted, and go when somebody needs their pages."""
    pool = 16 * BLOCK
    small = {
        "tokens_per_block": BLOCK, "max_tokens": pool,
        "block_reuse_config": {"policy": "per_conversation", "max_num_turns": 5},
    }  # fmt: skip
    async with local_cluster(config(kv_cache_config=small)) as orchestrator:
        for index in range(8):  # together far more than the pool
            await ask(orchestrator, prompt(4 * BLOCK, index), conversation=f"idle-{index}")
        retained = await number(orchestrator, 'kvferry_retained_turns{role="context",worker="context-0"}')
        assert retained >= 1
        stream, record = await ask(orchestrator, prompt(pool - 3 * BLOCK, 99), conversation="new")
        assert len(stream.token_ids) == 20
        assert record.usage.recomputed_tokens == pool - 3 * BLOCK
        await quiet(orchestrator)


@pytest.mark.parametrize("local", [False, True])
async def test_the_metrics_say_where_prompts_were_computed_and_what_travelled(local: bool):
    """A cluster that silently serves without its context side, or whose blocks never travel, shows it."""
    changes = {"conditional_disagg_config": {"max_local_prefill_length": 64}} if local else {}
    async with local_cluster(config(**changes)) as orchestrator:
        tokens = prompt(5 * BLOCK)
        stream, _ = await ask(orchestrator, tokens)
        longer = extend(np.asarray(tokens), stream.token_ids, prompt(5, 3))
        await ask(orchestrator, longer)
        on_context = await number(orchestrator, 'kvferry_prefills_total{where="context"}')
        assert on_context == (1 if local else 2)
        if local:
            assert await number(orchestrator, 'kvferry_prefills_total{where="local"}') == 1
        assert await number(orchestrator, 'kvferry_kv_transfer_blocks_total{direction="ctx_to_gen"}') >= 5
        link = 'detail="memory copy in one process",peer="context-0",role="generation",transport="inproc"'
        series = f'kvferry_link_bytes_total{{{link},worker="generation-0"}}'
        received = await number(orchestrator, 'kvferry_received_bytes_total{role="generation",worker="generation-0"}')
        assert await number(orchestrator, series) == received > 0
        await quiet(orchestrator)
