"""What the demo's figures must show: reuse of every retained turn on both sides, and only missing blocks on the wire.

Pure; called by `run_demo`. Each broken expectation is a sentence with the numbers in it.
"""

from __future__ import annotations

from collections.abc import Sequence

from cluster.demo.turn_row import TurnRow

__all__ = ["broken_expectations"]


def broken_expectations(
    rows: Sequence[TurnRow], *, tokens_per_block: int, retained_turns: int | None, transport: str, backend: str
) -> list[str]:
    """Every expectation that `rows` do not meet.

    `retained_turns` is how many completed turns must still be reusable; None means all of them.
    """
    found: list[str] = []
    for index, row in enumerate(rows):
        if row.ctx_reused_tokens + row.recomputed_tokens != row.prompt_tokens:
            found.append(
                f"turn {row.turn}: {row.ctx_reused_tokens} reused and {row.recomputed_tokens} recomputed tokens are "
                f"not the prompt's {row.prompt_tokens}"
            )
        found += _blocks(row, tokens_per_block)
        age = index - row.parent_turn + 1  # 1 when the parent is the turn completed last
        if row.parent_turn and (retained_turns is None or age <= retained_turns):
            found += _reuse(row, rows[row.parent_turn - 1], tokens_per_block)
    if not transport.startswith(backend):
        found.append(f"blocks travelled over {transport or 'nothing'}, not over {backend}")
    return found


def _blocks(row: TurnRow, tokens_per_block: int) -> list[str]:
    needed = -(-row.prompt_tokens // tokens_per_block)
    lacking = needed - row.gen_reused_tokens // tokens_per_block
    if row.ctx_to_gen_blocks > lacking:
        return [
            f"turn {row.turn}: {row.ctx_to_gen_blocks} blocks went to the generation side, which lacked "
            f"{lacking} at most"
        ]
    return []


def _reuse(row: TurnRow, parent: TurnRow, tokens_per_block: int) -> list[str]:
    # Every token that had KV at the parent's end is reusable: all but the last sampled one.
    endpoint = parent.prompt_tokens + len(parent.token_ids) - 1
    found: list[str] = []
    if row.recomputed_tokens > row.prompt_tokens - endpoint:
        found.append(
            f"turn {row.turn}: {row.recomputed_tokens} tokens recomputed; turn {parent.turn} ended at token "
            f"{endpoint} of {row.prompt_tokens}, so {row.prompt_tokens - endpoint} would do"
        )
    if row.gen_reused_tokens < endpoint // tokens_per_block * tokens_per_block:
        found.append(
            f"turn {row.turn}: the generation side reused {row.gen_reused_tokens} tokens of the {endpoint} at the end "
            f"of turn {parent.turn}"
        )
    return found
