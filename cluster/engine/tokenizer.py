"""The tokenizer seam: text to token ids and back, with a chat template.

The frontend and the demo call it; workers never do. Implementations must not import torch or transformers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

__all__ = ["TextStream", "Tokenizer"]


class TextStream(Protocol):
    """Decodes one answer token by token."""

    def push(self, token_id: int) -> str:
        """Text that became certain with this token; empty while a character is still incomplete."""
        ...

    def flush(self) -> str:
        """What is still held back, incomplete characters as U+FFFD. The stream is empty afterwards."""
        ...


class Tokenizer(Protocol):
    """Maps between text and token ids of one model."""

    @property
    def vocab_size(self) -> int:
        """Number of ids that the model's output ranges over."""
        ...

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Ids that end an answer."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids of `text`. Special tokens spelt out in the text are recognised; nothing is added."""
        ...

    def decode(self, token_ids: Iterable[int]) -> str:
        """Text of ids, special tokens left out, invalid UTF-8 as U+FFFD. Raises ValueError for an unknown id."""
        ...

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """The prompt text of a conversation. Raises ValueError for messages that the template refuses."""
        ...

    def stream(self) -> TextStream:
        """A fresh decoder for one answer."""
        ...
