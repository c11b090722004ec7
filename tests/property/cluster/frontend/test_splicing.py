"""Conversations with arbitrary generated ids: spliced prompts spell the rendered text, and reuse the generated ids.

The model here is a tokenizer with several spellings of a text, so that encoding an answer again loses its ids.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from cluster.engine import HashTokenizer
from cluster.frontend.prompts import Prompt, PromptEncoder
from cluster.frontend.protocol import ChatMessage
from cluster.frontend.splicing import SplicingStore
from cluster.frontend.text_output import AnswerText

PAIR = 259
END = 2


class PairTokenizer(HashTokenizer):
    """Bytes, and one id for the pair "ab", which encoding prefers."""

    @property
    def vocab_size(self) -> int:
        return 260

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for index, part in enumerate(text.split("ab")):
            ids += ([PAIR] if index else []) + super().encode(part)
        return ids

    def decode(self, token_ids: Iterable[int]) -> str:
        flat: list[int] = []
        for token in token_ids:
            flat += super().encode("ab") if token == PAIR else [token]
        return super().decode(flat)


TOKENIZER = PairTokenizer()
LETTERS = st.text("abc é", max_size=8)
ANSWER_IDS = st.lists(st.sampled_from([*HashTokenizer().encode("abc é"), 0, 1, PAIR]), max_size=8)
TURNS = st.lists(st.tuples(LETTERS, ANSWER_IDS, st.booleans()), min_size=1, max_size=5)


class Talk:
    """A conversation that its client keeps as text."""

    def __init__(self, prompts: PromptEncoder, salt: str | None) -> None:
        self.prompts = prompts
        self.salt = salt
        self.messages: list[ChatMessage] = []
        self.generated: list[int] = []

    def turn(self, question: str, answer_ids: list[int], ended: bool) -> tuple[Prompt, str]:
        self.messages.append(ChatMessage(role="user", content=question))
        prompt = asyncio.run(self.prompts.from_messages(self.messages, self.salt))
        answer = AnswerText(SpellingStream(), end_ids=frozenset({END}))
        all_ids = [*answer_ids, END] if ended else answer_ids
        answer.push(all_ids)
        answer.finish(at_end_token=ended)
        self.prompts.remember(prompt, answer.visible_answer(), self.salt)
        self.messages.append(ChatMessage(role="assistant", content=answer.text))
        self.generated = prompt.token_ids.tolist() + answer_ids
        return prompt, self.prompts.render(self.messages[:-1])


class SpellingStream:
    """TextStream of PairTokenizer."""

    def __init__(self) -> None:
        self._stream = HashTokenizer().stream()

    def push(self, token_id: int) -> str:
        ids = HashTokenizer().encode("ab") if token_id == PAIR else [token_id]
        return "".join(self._stream.push(one) for one in ids)

    def flush(self) -> str:
        return self._stream.flush()


def encoder() -> PromptEncoder:
    return PromptEncoder(TOKENIZER, SplicingStore(100_000), max_seq_len=100_000)


@given(turns=TURNS)
def test_spliced_ids_spell_the_rendered_text_and_continue_the_generated_ones(
    turns: list[tuple[str, list[int], bool]],
) -> None:
    talk = Talk(encoder(), None)
    for number, (question, answer_ids, ended) in enumerate(turns):
        before = talk.generated
        prompt, rendered = talk.turn(question, answer_ids, ended)
        assert TOKENIZER.decode(prompt.token_ids.tolist()) == TOKENIZER.decode(TOKENIZER.encode(rendered))
        if number:
            assert prompt.token_ids.tolist()[: len(before) + 1] == [*before, END]
            assert prompt.spliced_tokens == len(before)


@given(turns=TURNS, where=st.integers(0, 10**6), letter=st.sampled_from("abcx"), salted=st.booleans())
def test_altered_history_is_encoded_as_its_text(
    turns: list[tuple[str, list[int], bool]], where: int, letter: str, salted: bool
) -> None:
    prompts = encoder()
    talk = Talk(prompts, "salt" if salted else None)
    for turn in turns:
        talk.turn(*turn)
    altered = [*talk.messages, ChatMessage(role="user", content="next")]
    index = where % len(talk.messages)
    old = altered[index].content
    position = where % (len(old) + 1)
    altered[index] = ChatMessage(role=altered[index].role, content=old[:position] + letter + old[position:])
    prompt = asyncio.run(prompts.from_messages(altered, talk.salt))
    common = TOKENIZER.decode(TOKENIZER.encode(prompts.render(altered[:index], add_generation_prompt=False)))
    spliced_text = TOKENIZER.decode(prompt.token_ids[: prompt.spliced_tokens].tolist())
    assert len(spliced_text) <= len(common)  # nothing at or behind the change
    fresh = asyncio.run(encoder().from_messages(altered, talk.salt))
    assert TOKENIZER.decode(prompt.token_ids.tolist()) == TOKENIZER.decode(fresh.token_ids.tolist())
    other = asyncio.run(prompts.from_messages([*talk.messages, altered[-1]], "another salt"))
    assert other.spliced_tokens == 0
