"""A client of a cluster that runs as a Slurm job: five turns, a rewind to turn 2, and the figures of each.

Named in `slurm.clients`, it runs on the job's first node once the server is ready and its exit code is the job's:
1 when turns were not reused as the configuration promises. Also runs by hand:

    KVFERRY_URL=http://node1:8000 python examples/slurm/converse.py --json conversation.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from pathlib import Path

from rich.console import Console

from cluster.chat import KvferryClient
from cluster.config import load_config
from cluster.demo import DEMO_SCRIPT, ConversationResult, TurnResult, hold_conversation
from cluster.demo.expectations import ReuseRules, broken_expectations
from cluster.demo.table import print_rows


def show(result: TurnResult) -> None:
    """Print one turn as it ends."""
    row, usage = result.row, result.answer.usage
    print(f"turn {row.turn} (after {row.parent_turn}): {row.text.strip()[:70]!r}", flush=True)
    print(f"    {usage.ctx_worker} -> {usage.gen_worker} over {usage.transport or 'nothing to send'}", flush=True)


async def converse(url: str, max_tokens: int) -> ConversationResult:
    """Hold the conversation of `kvferry demo`."""
    async with KvferryClient(url) as client:
        return await hold_conversation(
            client,
            DEMO_SCRIPT,
            conversation_id="slurm-example",
            max_tokens=max_tokens,
            on_turn=lambda number, text: print(f"turn {number} user: {text}", flush=True),
            on_answer=show,
        )


def main() -> int:
    """Returns 0 when every retained turn was reused on both sides."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("-c", "--config", type=Path, help="the job's configuration, to check the figures against")
    options = parser.parse_args()
    result = asyncio.run(converse(os.environ["KVFERRY_URL"], options.max_tokens))
    rows = [turn.row for turn in result.turns]
    print_rows(Console(width=160), rows, ())
    failures: list[str] = []
    if options.config is not None:
        config = load_config(options.config)
        reuse = config.kv_cache_config.block_reuse_config
        rules = ReuseRules(
            tokens_per_block=config.kv_cache_config.tokens_per_block,
            backend=config.cache_transceiver_config.backend.value,
            retained_turns=reuse.max_num_turns,
            backflow=config.cache_transceiver_config.kv_backflow.value == "eager",
        )
        failures = broken_expectations(rows, rules, transport=result.transport)
    if options.json is not None:
        turns = [
            {
                **turn.row.to_json(),
                "prompt_token_ids": list(turn.answer.prompt_token_ids),
                "ctx_worker": turn.answer.usage.ctx_worker,
                "gen_worker": turn.answer.usage.gen_worker,
            }
            for turn in result.turns
        ]
        options.json.write_text(json.dumps({"turns": turns, "transport": result.transport, "failures": failures}))
    for failure in failures:
        print(f"failed: {failure}")
    print(f"transport: {result.transport}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
