"""A turn cell: n turns and a rewind between a context and a generation manager, counting what moves.

Drives two `TurnEnd`s through commands. A turn is what a cluster does with one: match on both sides, compute on the
context side, pull the missing blocks on the generation side, decode there, take the answer's blocks back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cluster.transceiver_test.cells import CellResult, CellStatus, TurnCell
from cluster.transceiver_test.config import TurnConfig
from cluster.transceiver_test.rank_pool import RankPool
from kvcache.config import ReusePolicy
from kvcache.layout import KvLayout

__all__ = ["drive_turns", "missing_blocks", "turn_tokens"]


@dataclass(frozen=True, slots=True)
class _Turn:
    """Tokens of a turn: its prompt and its answer; KV exists for all but the answer's last."""

    prompt: list[int]
    answer: list[int]

    @property
    def endpoint(self) -> int:
        return len(self.prompt) + len(self.answer) - 1


def turn_tokens(turn: int, count: int, kind: int) -> list[int]:
    """Token ids that no other turn and no other kind (1: user, 2: answer) has."""
    return [turn * 100_000 + kind * 10_000 + index for index in range(count)]


def missing_blocks(reused: int, upto: int, tokens_per_block: int) -> int:
    """Blocks that hold tokens `reused` .. `upto`: a partly filled one counts."""
    return -(-upto // tokens_per_block) - reused // tokens_per_block


def drive_turns(
    pool: RankPool,
    cell: TurnCell,
    turns: TurnConfig,
    layout: KvLayout,
    context: str,
    generation: str,
    transceiver: dict[str, Any],
    result: CellResult,
    left: Callable[[], float],
    *,
    damage: bool,
) -> None:
    """Run the conversation and set `result`. Raises RankCallError and RankHungError.

    `damage` flips a bit of a page that the generation side has pulled, before it ends its first turn: the result is a
    mismatch only if the cell's own check finds it.
    """
    longest = turns.first_tokens + (turns.turns + 1) * (turns.turn_tokens + turns.answer_tokens)
    pages = 4 * -(-longest // layout.tokens_per_block) + 8
    for rank, end in ((context, "turn-ctx"), (generation, "turn-gen")):
        pool.call(
            rank, "turn_open", left(), end=end, layout=layout.to_dict(), pages=pages, policy=str(cell.policy),
            max_num_turns=cell.max_num_turns, config=transceiver,
        )  # fmt: skip
    history: list[_Turn] = []
    problems: list[str] = []
    for number in range(1, turns.turns + 2):
        rewinds = number == turns.turns + 1
        parent = history[turns.rewind_to - 1] if rewinds else (history[-1] if history else None)
        new = turn_tokens(number, turns.turn_tokens if parent else turns.first_tokens, 1)
        prompt = [*parent.prompt, *parent.answer, *new] if parent else new
        turn = _Turn(prompt, turn_tokens(number, turns.answer_tokens, 2))
        problems += _one_turn(pool, cell, layout, context, generation, number, turn, parent, result, left, damage)
        history.append(turn)
        if problems:
            break
    for rank, end in ((context, "turn-ctx"), (generation, "turn-gen")):
        pool.call(rank, "turn_close", left(), end=end)
    if not problems:
        result.status = CellStatus.PASS
    else:
        mismatch = any(problem.startswith("mismatch") for problem in problems)
        result.status = CellStatus.MISMATCH if mismatch else CellStatus.TRANSFER_ERROR
        result.detail = "; ".join(problems[:3])


def _one_turn(
    pool: RankPool, cell: TurnCell, layout: KvLayout, context: str, generation: str, number: int, turn: _Turn,
    parent: _Turn | None, result: CellResult, left: Callable[[], float], damage: bool,
) -> list[str]:  # fmt: skip
    size, name = layout.tokens_per_block, f"turn {number}"
    prompt, known = len(turn.prompt), parent.endpoint if parent else 0
    problems: list[str] = []

    reused = {
        side: pool.call(rank, "turn_begin", left(), end=side, request=f"{name}-{side}", tokens=turn.prompt)
        for rank, side in ((context, "turn-ctx"), (generation, "turn-gen"))
    }
    for side, tokens in reused.items():
        expected = _reusable(cell, known, size)
        if tokens < expected:
            problems.append(f"mismatch in {name}: {side} reused {tokens} tokens, {expected} were there")
    pool.call(context, "turn_compute", left(), end="turn-ctx", upto=prompt, end_of_prompt=True)
    problems += _move(
        pool, context, "turn-ctx", generation, "turn-gen", f"{name} hand-off", reused["turn-gen"], prompt, size,
        result, left, end_of_prompt=True,
    )  # fmt: skip
    if problems:
        return problems
    for rank, side in ((context, "turn-ctx"), (generation, "turn-gen")):
        pool.call(rank, "turn_extend", left(), end=side, tokens=turn.answer)
    pool.call(generation, "turn_compute", left(), end="turn-gen", upto=turn.endpoint, end_of_prompt=False)
    problems += _move(
        pool, generation, "turn-gen", context, "turn-ctx", f"{name} back-flow", prompt, turn.endpoint, size, result,
        left, end_of_prompt=False,
    )  # fmt: skip
    if damage and not problems:
        pool.call(generation, "turn_damage", left(), end="turn-gen")
    for rank, side in ((context, "turn-ctx"), (generation, "turn-gen")):
        wrong = pool.call(rank, "turn_end", left(), end=side)
        if wrong:
            problems.append(f"mismatch in {name}: {side} ends with wrong blocks {wrong[:5]}")
    return problems


def _reusable(cell: TurnCell, known: int, size: int) -> int:
    """Tokens of the parent's path that both sides must still have (the pools are large enough for everything)."""
    return known if cell.policy is ReusePolicy.PER_CONVERSATION else known // size * size


def _move(
    pool: RankPool, holder: str, holder_end: str, receiver: str, receiver_end: str, what: str, start: int, upto: int,
    size: int, result: CellResult, left: Callable[[], float], *, end_of_prompt: bool,
) -> list[str]:  # fmt: skip
    """Pull the blocks of tokens `start` .. `upto`; complain unless exactly those moved."""
    timeout_s = max(1.0, left() - 5.0)
    ticket = pool.call(
        holder, "turn_publish", left(), end=holder_end, transfer=what, start=start, upto=upto, lease_s=timeout_s
    )
    answer = pool.call(
        receiver, "turn_pull", left(), end=receiver_end, ticket=ticket, start=start, upto=upto, timeout_s=timeout_s,
        end_of_prompt=end_of_prompt,
    )  # fmt: skip
    published = pool.call(holder, "turn_published", left(), end=holder_end, timeout_s=5.0)
    result.blocks_moved += answer["blocks"]
    result.bytes_moved += answer["bytes"]
    result.transport = answer["transport"] or result.transport
    if answer["status"] != "done" or published != "done":
        return [f"{what}: {answer['status']} ({answer['reason']}), holder: {published}"]
    if answer["wrong"]:
        return [f"mismatch in {what}: wrong blocks {answer['wrong'][:5]}"]
    expected = missing_blocks(start, upto, size)
    if answer["blocks"] != expected:
        return [f"mismatch in {what}: {answer['blocks']} blocks moved, {expected} were missing"]
    return []
