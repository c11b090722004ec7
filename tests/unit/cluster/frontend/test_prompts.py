from __future__ import annotations

from typing import Any

import pytest

from cluster.engine import HashTokenizer
from cluster.errors import InvalidRequestError, PromptTooLongError
from cluster.frontend.prompts import PromptEncoder, find_turn_end
from cluster.frontend.protocol import ChatMessage
from cluster.frontend.splicing import SplicingStore
from cluster.frontend.text_output import VisibleAnswer

TOKENIZER = HashTokenizer()


class NoTemplate(HashTokenizer):
    def apply_chat_template(self, messages: Any, add_generation_prompt: bool = True) -> str:
        raise ValueError("this model has no chat template")


class PlainTemplate(HashTokenizer):
    def apply_chat_template(self, messages: Any, add_generation_prompt: bool = True) -> str:
        return "\n".join(message["content"] for message in messages)


class PairTokenizer(HashTokenizer):
    """Encodes "ab" as one id of its own, so that a text has more than one spelling in ids."""

    vocab_size = 260

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for index, part in enumerate(text.split("ab")):
            ids += ([259] if index else []) + super().encode(part)
        return ids

    def decode(self, token_ids: Any) -> str:
        flat: list[int] = []
        for token in token_ids:
            flat += super().encode("ab") if token == 259 else [token]
        return super().decode(flat)


def make(tokenizer: HashTokenizer = TOKENIZER, max_seq_len: int = 200) -> PromptEncoder:
    return PromptEncoder(tokenizer, SplicingStore(10_000), max_seq_len=max_seq_len)


def chat(*contents: str) -> list[ChatMessage]:
    roles = ("user", "assistant")
    return [ChatMessage(role=roles[index % 2], content=text) for index, text in enumerate(contents)]  # type: ignore[arg-type]


def test_turn_end_is_read_off_the_template() -> None:
    assert find_turn_end(TOKENIZER) == "<|im_end|>"
    assert find_turn_end(NoTemplate()) is None
    assert find_turn_end(PlainTemplate()) is None


async def test_generated_ids_come_back_where_encoding_would_give_others() -> None:
    prompts = make(PairTokenizer())
    first = await prompts.from_messages(chat("hello"), None)
    a, b = HashTokenizer().encode("ab")
    prompts.remember(first, VisibleAnswer("ab", (a, b), ""), None)
    second = await prompts.from_messages(chat("hello", "ab", "again"), None)
    expected = [*first.token_ids.tolist(), a, b, 2]
    assert second.token_ids[: len(expected)].tolist() == expected
    assert second.spliced_tokens == len(expected) - 1
    plain = await make(PairTokenizer()).from_messages(chat("hello", "ab", "again"), None)
    assert plain.token_ids.tolist() != second.token_ids.tolist()
    assert PairTokenizer().decode(plain.token_ids.tolist()) == PairTokenizer().decode(second.token_ids.tolist())


async def test_answer_cut_inside_a_token_is_remembered_with_its_rest_encoded() -> None:
    prompts = make(PairTokenizer())
    first = await prompts.from_messages(chat("hello"), None)
    kept = HashTokenizer().encode("x")
    prompts.remember(first, VisibleAnswer("xab", tuple(kept), "ab"), None)
    second = await prompts.from_messages(chat("hello", "xab", "more"), None)
    assert second.spliced_tokens == len(first.token_ids) + 2


async def test_ids_that_do_not_spell_the_text_are_not_remembered() -> None:
    prompts = make()
    first = await prompts.from_messages(chat("hello"), None)
    prompts.remember(first, VisibleAnswer("other", tuple(TOKENIZER.encode("text")), ""), None)
    second = await prompts.from_messages(chat("hello", "other", "x"), None)
    assert second.spliced_tokens == 0


async def test_text_completion_that_goes_on_behind_an_end_token_is_spliced() -> None:
    prompts = make(PairTokenizer())
    first = await prompts.from_prompt("question: ", None)
    a, b = HashTokenizer().encode("ab")
    prompts.remember(first, VisibleAnswer("ab", (a, b), ""), None)
    second = await prompts.from_prompt("question: ab<|im_end|>\nnext", None)
    assert second.spliced_tokens == len(first.token_ids) + 2
    glued = await prompts.from_prompt("question: ab next", None)
    assert glued.spliced_tokens == 0


async def test_prompt_of_ids_is_checked_against_the_vocabulary() -> None:
    prompts = make()
    assert (await prompts.from_prompt((1, 2, 3), None)).token_ids.tolist() == [1, 2, 3]
    with pytest.raises(InvalidRequestError, match="259") as caught:
        await prompts.from_prompt((1, 259), None)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("prompt", ["", ()])
async def test_empty_prompt_is_refused(prompt: Any) -> None:
    with pytest.raises(InvalidRequestError, match="empty"):
        await make().from_prompt(prompt, None)


async def test_prompt_must_leave_room_for_one_token() -> None:
    prompts = make(max_seq_len=5)
    assert len((await prompts.from_prompt("abcd", None)).token_ids) == 4
    with pytest.raises(PromptTooLongError, match="max_seq_len") as caught:
        await prompts.from_prompt("abcde", None)
    assert caught.value.http_status == 413


async def test_refusal_of_the_template_is_the_clients_error() -> None:
    with pytest.raises(InvalidRequestError, match="no chat template"):
        await make(NoTemplate()).from_messages(chat("hello"), None)


async def test_long_text_is_encoded_as_a_short_one_would_be() -> None:
    text = "xy" * 40_000
    prompts = make(max_seq_len=10**6)
    assert (await prompts.from_prompt(text, None)).token_ids.tolist() == TOKENIZER.encode(text)
