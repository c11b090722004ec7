"""Byte-level tokenizer of the hash model: ids 0..2 are special, id 3 + b is the byte b (standard library only).

Its chat template has the shape of SmolLM2's, so that what is tested on the hash model carries over.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = ["EOS_ID", "VOCAB_SIZE", "HashTextStream", "HashTokenizer", "byte_id"]

_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_SPECIAL_PATTERN = re.compile("(" + "|".join(re.escape(text) for text in _SPECIAL) + ")")
_FIRST_BYTE_ID = len(_SPECIAL)
EOS_ID = 2
VOCAB_SIZE = _FIRST_BYTE_ID + 256


def byte_id(byte: int) -> int:
    """Token id of one byte (0..255)."""
    return _FIRST_BYTE_ID + byte


def _bytes_of(token_id: int) -> bytes:
    """Bytes of one id, empty for a special token."""
    if not 0 <= token_id < VOCAB_SIZE:
        raise ValueError(f"token id {token_id} is outside 0..{VOCAB_SIZE - 1}")
    return bytes([token_id - _FIRST_BYTE_ID]) if token_id >= _FIRST_BYTE_ID else b""


class HashTextStream:
    """Incremental UTF-8 decoder of one answer."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """See TextStream."""
        return self._decoder.decode(_bytes_of(token_id))

    def flush(self) -> str:
        """See TextStream."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


class HashTokenizer:
    """Tokenizer of the hash model."""

    @property
    def vocab_size(self) -> int:
        """256 bytes and the special tokens."""
        return VOCAB_SIZE

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The id of `<|im_end|>`."""
        return frozenset({EOS_ID})

    def encode(self, text: str) -> list[int]:
        """See Tokenizer. Lone surrogates become U+FFFD."""
        ids: list[int] = []
        for part in _SPECIAL_PATTERN.split(text):
            if part in _SPECIAL:
                ids.append(_SPECIAL.index(part))
            else:
                ids.extend(_FIRST_BYTE_ID + byte for byte in _utf8(part))
        return ids

    def decode(self, token_ids: Iterable[int]) -> str:
        """See Tokenizer."""
        return b"".join(_bytes_of(token_id) for token_id in token_ids).decode("utf-8", "replace")

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """See Tokenizer. Raises ValueError unless every message has a text `role` and `content`."""
        parts: list[str] = []
        for index, message in enumerate(messages):
            role, content = message.get("role"), message.get("content")
            if not isinstance(role, str) or not isinstance(content, str):
                raise ValueError(f"message {index} needs a text role and a text content")
            parts.append(f"<|im_start|>{role}\n{content}<|im_end|>\n")
        if add_generation_prompt:
            parts.append("<|im_start|>assistant\n")
        return "".join(parts)

    def stream(self) -> HashTextStream:
        """See Tokenizer."""
        return HashTextStream()


def _utf8(text: str) -> bytes:
    """UTF-8 of `text`; a lone surrogate (possible in JSON input) cannot be encoded and becomes U+FFFD."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace").encode()
