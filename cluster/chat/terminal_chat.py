"""The conversation of `kvferry chat`: turns, rewinds, and after each answer where the prompt's KV came from.

Driven by the chat command with a function that reads a line and one that prints. Keeps the history as text, as any
client does; the server keeps the tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.chat.answer import Answer
from cluster.chat.errors import ChatError
from cluster.chat.kvferry_client import KvferryClient

__all__ = ["TerminalChat"]

_HELP = "commands: /rewind K (keep the first K turns), /turns, /help, /quit"


@dataclass(frozen=True, slots=True)
class _Turn:
    user: str
    assistant: str


class TerminalChat:
    """One conversation with a server. `write` prints text as it is, without adding a line end."""

    def __init__(
        self,
        client: KvferryClient,
        write: Callable[[str], None],
        *,
        conversation_id: str,
        system: str | None = None,
        fields: dict[str, Any] | None = None,
    ) -> None:
        self._client = client
        self._write = write
        self._conversation_id = conversation_id
        self._system = system
        self._fields = fields or {}
        self._turns: list[_Turn] = []

    @property
    def num_turns(self) -> int:
        """Turns in the present history."""
        return len(self._turns)

    async def handle(self, line: str) -> bool:
        """Act on one line of the user; False when the chat should end. Blocks until the answer has ended."""
        text = line.strip()
        if not text:
            return True
        if text.startswith("/"):
            return self._command(text.split())
        try:
            await self._ask(text)
        except ChatError as error:
            self._write(f"\n{error}\n")
        return True

    def _command(self, words: Sequence[str]) -> bool:
        name = words[0]
        if name in ("/quit", "/exit"):
            return False
        if name == "/rewind":
            self._rewind(words[1:])
        elif name == "/turns":
            for number, turn in enumerate(self._turns, 1):
                self._write(f"{number:>3}  {_short(turn.user)}  ->  {_short(turn.assistant)}\n")
        elif name == "/help":
            self._write(f"{_HELP}\n")
        else:
            self._write(f"unknown command {name}; {_HELP}\n")
        return True

    def _rewind(self, words: Sequence[str]) -> None:
        count = int(words[0]) if len(words) == 1 and words[0].isdecimal() else -1
        if not 0 <= count <= len(self._turns):
            self._write(f"/rewind K keeps the first K turns; K is 0 to {len(self._turns)} now\n")
            return
        del self._turns[count:]
        self._write(f"back at the end of turn {count}; the next message starts a branch\n")

    async def _ask(self, text: str) -> None:
        messages = [{"role": "system", "content": self._system}] if self._system else []
        for turn in self._turns:
            messages += [{"role": "user", "content": turn.user}, {"role": "assistant", "content": turn.assistant}]
        messages.append({"role": "user", "content": text})
        answer = await self._client.chat(
            messages, conversation_id=self._conversation_id, on_text=self._write, **self._fields
        )
        self._turns.append(_Turn(text, answer.text))
        self._write(f"\n{_reuse_line(len(self._turns), answer)}\n")


def _reuse_line(turn: int, answer: Answer) -> str:
    usage = answer.usage
    moved = f"ctx->gen {usage.ctx_to_gen_blocks} blocks" if usage.ctx_to_gen_blocks else "ctx->gen nothing"
    return (
        f"[turn {turn}: prompt {answer.prompt_tokens}, reused {answer.cached_tokens} "
        f"(ctx {usage.ctx_cached_tokens}, gen {usage.gen_cached_tokens}), recomputed {usage.recomputed_tokens}, "
        f"{moved}, first token {answer.ttft_s * 1000:.0f} ms]"
    )


def _short(text: str, limit: int = 40) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= limit else f"{flat[: limit - 1]}…"
