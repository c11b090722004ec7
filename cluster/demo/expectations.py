"""What the demo's figures must show: reuse of every retained turn on both sides, and only missing blocks on the wire.

Pure; called by `run_demo`. Each broken expectation is a sentence with the numbers in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.demo.turn_row import TurnRow

__all__ = ["ReuseRules", "broken_expectations"]


@dataclass(frozen=True, slots=True)
class ReuseRules:
    """What the configuration promises.

    retained_turns  completed turns that must still be reusable; None means all of them
    partial_reuse   reuse may end inside a block
    backflow        the context side always gets the answer's blocks back
    """

    tokens_per_block: int
    backend: str
    retained_turns: int | None = None
    partial_reuse: bool = True
    backflow: bool = True

    def reusable(self, tokens: int) -> int:
        """How many of the first `tokens` tokens, which have KV, can be reused."""
        return tokens if self.partial_reuse else self.whole_blocks(tokens)

    def whole_blocks(self, tokens: int) -> int:
        """`tokens` rounded down to whole blocks."""
        return tokens // self.tokens_per_block * self.tokens_per_block


def broken_expectations(rows: Sequence[TurnRow], rules: ReuseRules, *, transport: str) -> list[str]:
    """Every expectation that `rows` do not meet."""
    found: list[str] = []
    for index, row in enumerate(rows):
        if row.ctx_reused_tokens + row.recomputed_tokens != row.prompt_tokens:
            found.append(
                f"turn {row.turn}: {row.ctx_reused_tokens} reused and {row.recomputed_tokens} recomputed tokens are "
                f"not the prompt's {row.prompt_tokens}"
            )
        found += _blocks(row, rules)
        age = index - row.parent_turn + 1  # 1 when the parent is the turn completed last
        if row.parent_turn and (rules.retained_turns is None or age <= rules.retained_turns):
            found += _reuse(row, rows[row.parent_turn - 1], rules)
    if not transport.startswith(rules.backend):
        found.append(f"blocks travelled over {transport or 'nothing'}, not over {rules.backend}")
    return found


def _blocks(row: TurnRow, rules: ReuseRules) -> list[str]:
    needed = -(-row.prompt_tokens // rules.tokens_per_block)
    lacking = needed - row.gen_reused_tokens // rules.tokens_per_block
    if row.ctx_to_gen_blocks > lacking:
        return [
            f"turn {row.turn}: {row.ctx_to_gen_blocks} blocks went to the generation side, which lacked "
            f"{lacking} at most"
        ]
    return []


def _reuse(row: TurnRow, parent: TurnRow, rules: ReuseRules) -> list[str]:
    # Every token that had KV at the parent's end is reusable: all but the last sampled one.
    endpoint = parent.prompt_tokens + len(parent.token_ids) - 1
    on_context = rules.reusable(endpoint if rules.backflow else parent.prompt_tokens)
    found: list[str] = []
    if row.recomputed_tokens > row.prompt_tokens - on_context:
        found.append(
            f"turn {row.turn}: {row.recomputed_tokens} tokens recomputed; the context side had {on_context} of the "
            f"{row.prompt_tokens} since turn {parent.turn}, so {row.prompt_tokens - on_context} would do"
        )
    if row.gen_reused_tokens < rules.whole_blocks(endpoint):
        found.append(
            f"turn {row.turn}: the generation side reused {row.gen_reused_tokens} tokens of the {endpoint} at the end "
            f"of turn {parent.turn}"
        )
    return found
