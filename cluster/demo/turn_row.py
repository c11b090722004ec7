"""One turn of the demo in figures: the row that is printed and written to the JSON file."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from cluster.chat import Answer, KvUsage

__all__ = ["TurnRow"]


@dataclass(frozen=True, slots=True)
class TurnRow:
    """Field names are the keys of the JSON rows; ctx_reused_tokens + recomputed_tokens = prompt_tokens.

    parent_turn is 0 for a turn at the beginning; ttft_ms is what the client saw.
    """

    turn: int
    parent_turn: int
    prompt_tokens: int
    ctx_reused_tokens: int
    gen_reused_tokens: int
    ctx_to_gen_blocks: int
    ctx_to_gen_bytes: int
    gen_to_ctx_blocks: int
    gen_to_ctx_bytes: int
    recomputed_tokens: int
    ttft_ms: float
    text: str
    token_ids: tuple[int, ...]

    @staticmethod
    def of(turn: int, parent_turn: int, answer: Answer, record: KvUsage) -> TurnRow:
        """The row of an answer and of the record that the server kept of it (with the back-flow)."""
        usage = answer.usage
        return TurnRow(
            turn=turn,
            parent_turn=parent_turn,
            prompt_tokens=answer.prompt_tokens,
            ctx_reused_tokens=usage.ctx_cached_tokens + usage.ctx_pulled_tokens,
            gen_reused_tokens=usage.gen_cached_tokens,
            ctx_to_gen_blocks=usage.ctx_to_gen_blocks,
            ctx_to_gen_bytes=usage.ctx_to_gen_bytes,
            gen_to_ctx_blocks=record.gen_to_ctx_blocks,
            gen_to_ctx_bytes=record.gen_to_ctx_bytes,
            recomputed_tokens=usage.recomputed_tokens,
            ttft_ms=round(answer.ttft_s * 1000, 1),
            text=answer.text,
            token_ids=answer.token_ids,
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "token_ids": list(self.token_ids)}
