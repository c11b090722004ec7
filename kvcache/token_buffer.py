"""A sequence's tokens: the prompt as the caller gave it, then what was computed beyond it."""

from __future__ import annotations

import numpy as np

from kvcache.errors import InvalidTokensError
from kvcache.radix_node import Tokens
from kvcache.token_ids import check_signs

__all__ = ["TokenBuffer"]


class TokenBuffer:
    """Uses the caller's prompt without a copy, never writes to it, and replaces it when tokens come behind it."""

    __slots__ = ("_request_id", "_tokens", "prompt_tokens")

    def __init__(self, request_id: str, prompt: Tokens) -> None:
        self._request_id = request_id
        self._tokens = prompt
        self.prompt_tokens = len(prompt)

    def view(self, start: int, end: int) -> Tokens:
        """Tokens `start` .. `end`, which were put or belong to the prompt."""
        return self._tokens[start:end]

    def put(self, start: int, tokens: Tokens) -> None:
        """`tokens` stand from `start` on. Raises InvalidTokensError, with nothing changed, when they contradict the
        prompt or are negative.
        """
        end = start + len(tokens)
        known = min(self.prompt_tokens, end) - start
        # as bytes: a few hundred tokens are compared several times faster than as arrays
        if known > 0 and tokens[:known].tobytes() != self._tokens[start : start + known].tobytes():
            raise InvalidTokensError(
                f"request {self._request_id}: computed tokens from position {start} on differ from its prompt"
            )
        if end <= self.prompt_tokens:
            return
        check_signs(tokens[max(0, known) :])
        if end > len(self._tokens):
            grown = np.empty(max(end + 64, len(self._tokens) * 5 // 4), dtype=np.int32)
            grown[:start] = self._tokens[:start]
            self._tokens = grown
        self._tokens[start:end] = tokens
