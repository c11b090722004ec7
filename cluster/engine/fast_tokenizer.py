"""The real models' tokenizer: the `tokenizers` library and a chat template, nothing of torch or transformers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from cluster.engine.chat_template import ChatTemplate
from cluster.engine.errors import ModelLoadError

__all__ = ["FastTextStream", "FastTokenizer", "tokenizer_from_folder"]

_REPLACEMENT = "\ufffd"


class FastTextStream:
    """Decodes one answer. Text is given out once it can no longer change: never half a character.

    `_ids[_sent:]` is what is not given out yet; `_ids[_context:_sent]` precedes it in decoding, because a decoder may
    treat the first token of its input in its own way.
    """

    def __init__(self, tokenizer: FastTokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._context = 0
        self._sent = 0

    def push(self, token_id: int) -> str:
        """See TextStream."""
        self._ids.append(token_id)
        text = self._pending()
        if text.endswith(_REPLACEMENT):
            return ""
        return self._take(text)

    def flush(self) -> str:
        """See TextStream."""
        text = self._take(self._pending())
        self._ids.clear()
        self._context = self._sent = 0
        return text

    def _pending(self) -> str:
        before = self._tokenizer.decode(self._ids[self._context : self._sent])
        return self._tokenizer.decode(self._ids[self._context :])[len(before) :]

    def _take(self, text: str) -> str:
        if text:
            self._context, self._sent = self._sent, len(self._ids)
        return text


class FastTokenizer:
    """Tokenizer over a `tokenizers.Tokenizer`."""

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        template: ChatTemplate | None,
    ) -> None:
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._template = template

    @property
    def vocab_size(self) -> int:
        """Size of the model's output, which may exceed the number of ids that have a text."""
        return self._vocab_size

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Ids that end an answer."""
        return self._eos_token_ids

    def encode(self, text: str) -> list[int]:
        """See Tokenizer. Lone surrogates become U+FFFD."""
        try:
            text.encode()
        except UnicodeEncodeError:
            text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: Iterable[int]) -> str:
        """See Tokenizer. An id within the vocabulary that has no text decodes to nothing."""
        ids = list(token_ids)
        for token_id in ids:
            if not 0 <= token_id < self._vocab_size:
                raise ValueError(f"token id {token_id} is outside 0..{self._vocab_size - 1}")
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """See Tokenizer. Raises ValueError when the model has no chat template, too."""
        if self._template is None:
            raise ValueError("this model has no chat template: send a plain prompt to /v1/completions instead")
        return self._template.render(messages, add_generation_prompt)

    def stream(self) -> FastTextStream:
        """See Tokenizer."""
        return FastTextStream(self)


def tokenizer_from_folder(folder: Path, vocab_size: int, eos_token_ids: frozenset[int]) -> FastTokenizer:
    """The tokenizer of a Hugging Face folder. Raises ModelLoadError when tokenizer.json is missing or damaged."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelLoadError(f"{folder} has no tokenizer.json: save the model's fast tokenizer there")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises a bare Exception
        raise ModelLoadError(f"cannot read {path}: {error}; fetch the file again") from error
    config = _read_config(folder / "tokenizer_config.json")
    template_file = folder / "chat_template.jinja"
    try:
        source = template_file.read_text() if template_file.is_file() else config.get("chat_template")
    except OSError as error:
        raise ModelLoadError(f"cannot read {template_file}: {error}") from error
    template = None
    if isinstance(source, str):
        template = ChatTemplate(source, bos_token=_token(config, "bos_token"), eos_token=_token(config, "eos_token"))
    return FastTokenizer(tokenizer, vocab_size, eos_token_ids, template)


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"cannot read {path}: {error}; fetch the file again") from error
    return config if isinstance(config, dict) else {}


def _token(config: Mapping[str, Any], name: str) -> str:
    """Text of a special token, given as a string or as an object with `content`."""
    value = config.get(name)
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else ""
