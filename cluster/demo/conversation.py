"""Holds the demo's conversation with a running server, over HTTP as any client would.

History goes back as text, so the server's splicing of generated tokens is part of what is shown. Called by `run_demo`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cluster.chat import Answer, KvferryClient
from cluster.demo.errors import DemoError
from cluster.demo.script import DemoScript
from cluster.demo.turn_row import TurnRow

__all__ = ["ConversationResult", "TurnResult", "hold_conversation", "repeat_prompts"]

_BACKFLOW_WAIT_S = 20.0


@dataclass(frozen=True, slots=True)
class TurnResult:
    """One turn: its row and the whole answer behind it."""

    row: TurnRow
    answer: Answer


@dataclass(frozen=True, slots=True)
class ConversationResult:
    """All turns and the transport that carried their blocks ("" when none moved)."""

    turns: tuple[TurnResult, ...]
    transport: str


async def hold_conversation(
    client: KvferryClient,
    script: DemoScript,
    *,
    conversation_id: str,
    max_tokens: int,
    on_turn: Callable[[int, str], None],
    on_answer: Callable[[TurnResult], None],
) -> ConversationResult:
    """Say every turn of `script`, greedily. Waits for each turn's back-flow before the next, so figures are exact.

    `on_turn` is told of a turn's beginning, `on_answer` of its end. Raises ChatError, or DemoError when the server does
    not tell the token ids.
    """
    results: list[TurnResult] = []
    for number, turn in enumerate(script.turns, 1):
        on_turn(number, turn.user)
        messages = [{"role": "system", "content": script.system}]
        for earlier in script.history(number):
            messages.append({"role": "user", "content": script.turns[earlier - 1].user})
            messages.append({"role": "assistant", "content": results[earlier - 1].answer.text})
        messages.append({"role": "user", "content": turn.user})
        answer = await client.chat(
            messages, conversation_id=conversation_id, max_tokens=max_tokens, temperature=0.0, return_token_ids=True
        )
        if not answer.prompt_token_ids or not answer.token_ids:
            raise DemoError("the server did not return token ids although return_token_ids was sent")
        record = await client.request_record(answer.request_id, wait_s=_BACKFLOW_WAIT_S)
        result = TurnResult(TurnRow.of(number, turn.parent, answer, record), answer)
        results.append(result)
        on_answer(result)
    transports = [result.answer.usage.transport for result in results if result.answer.usage.transport]
    return ConversationResult(tuple(results), ", ".join(dict.fromkeys(transports)))


async def repeat_prompts(
    client: KvferryClient, turns: tuple[TurnResult, ...], *, max_tokens: int, on_turn: Callable[[int], None]
) -> list[Answer]:
    """Answer the same prompts, token by token the same, each as a request of its own."""
    answers: list[Answer] = []
    for result in turns:
        on_turn(result.row.turn)
        answers.append(
            await client.complete(
                result.answer.prompt_token_ids, max_tokens=max_tokens, temperature=0.0, return_token_ids=True
            )
        )
    return answers
