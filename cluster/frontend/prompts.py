"""Turns a request's messages or prompt into token ids, generated ids of earlier turns spliced in.

Called by the generating routes; owns the SplicingStore. Checks what only a tokenizer can know: ids inside the
vocabulary, a template that takes the messages, a prompt that is neither empty nor too long.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cluster.engine import Tokenizer
from cluster.errors import InvalidRequestError, PromptTooLongError
from cluster.frontend.protocol import ChatMessage
from cluster.frontend.splicing import SplicingStore
from cluster.frontend.text_output import VisibleAnswer

__all__ = ["Prompt", "PromptEncoder", "find_turn_end"]

_THREAD_FROM_CHARS = 50_000  # a shorter text is encoded faster than a thread is entered
_SENTINEL = "sentinel"


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """A prompt ready to be served: int32 ids (n,), the text they stand for (None if ids were sent), ids spliced in."""

    token_ids: NDArray[np.int32]
    text: str | None
    spliced_tokens: int
    param: str


class PromptEncoder:
    """Encodes prompts of one model."""

    def __init__(self, tokenizer: Tokenizer, store: SplicingStore, *, max_seq_len: int) -> None:
        self._tokenizer = tokenizer
        self._store = store
        self._max_seq_len = max_seq_len
        self._turn_end = find_turn_end(tokenizer)

    async def from_messages(self, messages: Sequence[ChatMessage], cache_salt: str | None) -> Prompt:
        """Render and encode a conversation. Raises InvalidRequestError or PromptTooLongError."""
        return await self._from_text(self.render(messages), "messages", cache_salt)

    async def from_prompt(self, prompt: str | tuple[int, ...], cache_salt: str | None) -> Prompt:
        """Encode a text, or check ids. Raises InvalidRequestError or PromptTooLongError."""
        if isinstance(prompt, str):
            return await self._from_text(prompt, "prompt", cache_salt)
        ids = np.asarray(prompt, dtype=np.int32)
        if len(ids) and int(ids.max()) >= self._tokenizer.vocab_size:
            raise InvalidRequestError(
                f"prompt: token id {int(ids.max())} is outside the vocabulary; ids go from 0 to "
                f"{self._tokenizer.vocab_size - 1}",
                param="prompt",
            )
        return self._checked(Prompt(ids, None, 0, "prompt"))

    def render(self, messages: Sequence[ChatMessage], *, add_generation_prompt: bool = True) -> str:
        """The prompt text of a conversation. Raises InvalidRequestError for messages that the template refuses."""
        try:
            return self._tokenizer.apply_chat_template(
                [message.as_template() for message in messages], add_generation_prompt=add_generation_prompt
            )
        except ValueError as error:
            raise InvalidRequestError(f"messages: the chat template refuses them: {error}", param="messages") from error

    async def encode(self, text: str) -> list[int]:
        """Plain encoding of `text`; a long one is encoded in a thread."""
        if len(text) < _THREAD_FROM_CHARS:
            return self._tokenizer.encode(text)
        return await asyncio.to_thread(self._tokenizer.encode, text)

    def remember(self, prompt: Prompt, answer: VisibleAnswer, cache_salt: str | None) -> None:
        """Keep a finished turn's ids for the next one. Does nothing where text and ids do not belong together."""
        if prompt.text is None or self._turn_end is None:
            return
        answer_ids = list(answer.token_ids)
        if answer.remainder:
            answer_ids += self._tokenizer.encode(answer.remainder)
        if self._tokenizer.decode(answer_ids) != answer.text:
            return  # a cut inside a character, or text that the ids do not spell
        ids = np.concatenate([prompt.token_ids, np.asarray(answer_ids, dtype=np.int32)])
        self._store.remember(prompt.text + answer.text, ids, cache_salt=cache_salt)

    def forget_all(self) -> None:
        """Drop every remembered turn."""
        self._store.clear()

    async def _from_text(self, text: str, param: str, cache_salt: str | None) -> Prompt:
        splice = None
        if self._turn_end is not None:
            splice = self._store.find(text, self._turn_end, cache_salt=cache_salt)
        if splice is None:
            return self._checked(Prompt(np.asarray(await self.encode(text), dtype=np.int32), text, 0, param))
        # The rest begins with the end-of-turn token or is empty, so it has the same ids alone as in its place.
        rest = np.asarray(await self.encode(text[splice.num_chars :]), dtype=np.int32)
        return self._checked(Prompt(np.concatenate([splice.token_ids, rest]), text, len(splice.token_ids), param))

    def _checked(self, prompt: Prompt) -> Prompt:
        if len(prompt.token_ids) == 0:
            raise InvalidRequestError(f"{prompt.param}: is empty; send at least one token", param=prompt.param)
        if len(prompt.token_ids) >= self._max_seq_len:
            raise PromptTooLongError(
                f"{prompt.param}: {len(prompt.token_ids)} tokens leave no room for an answer within max_seq_len, which "
                f"is {self._max_seq_len}; shorten the prompt or serve with a larger engine.max_seq_len",
                param=prompt.param,
            )
        return prompt


def find_turn_end(tokenizer: Tokenizer) -> str | None:
    """The special text that the chat template puts right behind an answer, such as `<|im_end|>`; None if there is none.

    Only there may a text be cut so that both parts keep their ids: a special token is never merged with its neighbours.
    """
    try:
        rendered = tokenizer.apply_chat_template(
            [
                {"role": "user", "content": "x"},
                {"role": "assistant", "content": _SENTINEL},
                {"role": "user", "content": "x"},
            ],
            add_generation_prompt=False,
        )
    except ValueError:
        return None  # a template without conversations
    _, found, behind = rendered.partition(_SENTINEL)
    if not found:
        return None
    for size in range(1, min(len(behind), 64) + 1):
        ids = tokenizer.encode(behind[:size])
        if len(ids) == 1 and ids[0] in tokenizer.eos_token_ids:
            return behind[:size]
    return None
