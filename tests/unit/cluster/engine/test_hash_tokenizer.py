"""The hash model's byte tokenizer and the options in its name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.engine import HashTokenizer, ModelLoadError, describe_model, load_runner, load_tokenizer

TOKENIZER = HashTokenizer()


@given(st.text())
def test_text_comes_back(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert all(0 <= i < TOKENIZER.vocab_size for i in ids)
    for special in ("<|endoftext|>", "<|im_start|>", "<|im_end|>"):
        text = text.replace(special, "")
    assert TOKENIZER.decode(ids) == text


@given(st.lists(st.integers(0, 258)))
def test_a_stream_gives_the_same_text_as_decoding_at_once(ids: list[int]) -> None:
    stream = TOKENIZER.stream()
    assert "".join(stream.push(i) for i in ids) + stream.flush() == TOKENIZER.decode(ids)


def test_a_stream_never_gives_half_a_character() -> None:
    stream = TOKENIZER.stream()
    pieces = [stream.push(i) for i in TOKENIZER.encode("é漢😀")]
    assert pieces == ["", "é", "", "", "漢", "", "", "", "😀"]
    assert stream.push(3 + 0xF0) == ""
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""


def test_special_tokens_are_recognised_and_the_template_has_its_shape() -> None:
    text = TOKENIZER.apply_chat_template([{"role": "system", "content": "s"}, {"role": "user", "content": "u"}])
    assert text == "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n"
    ids = TOKENIZER.encode(text)
    assert ids.count(1) == 3
    assert ids.count(2) == 2
    assert not TOKENIZER.apply_chat_template([{"role": "user", "content": "u"}], False).endswith("assistant\n")


def test_a_lone_surrogate_is_replaced() -> None:
    assert TOKENIZER.decode(TOKENIZER.encode("a\ud800b")) == "a\ufffdb"


@pytest.mark.parametrize("message", [{"role": "user"}, {"content": "x"}, {"role": "user", "content": None}])
def test_incomplete_messages_are_refused(message: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="message 0"):
        TOKENIZER.apply_chat_template([message])


@pytest.mark.parametrize("token_id", [-1, 259])
def test_unknown_ids_are_refused(token_id: int) -> None:
    with pytest.raises(ValueError, match="outside"):
        TOKENIZER.decode([token_id])


def test_options_in_the_name_reach_the_runner_and_its_description() -> None:
    runner = load_runner("hash:layers=3,kv_heads=2,max_position=100,step_ms=0", tokens_per_block=8)
    described = describe_model("hash:layers=3,kv_heads=2,max_position=100", 8)
    assert runner.layout == described.layout
    assert runner.max_position == described.max_position == 100
    assert described.layout.groups[0].num_kv_heads == 2
    assert len(described.layout.groups[0].layers) == 3
    assert described.fingerprint != describe_model("hash", 8).fingerprint


@pytest.mark.parametrize("model", ["hash:layer=3", "hash:layers=0", "hash:layers=x", "hash:layers", "hash:step_ms=-1"])
def test_wrong_options_are_refused(model: str) -> None:
    for call in (lambda: load_runner(model, tokens_per_block=8), lambda: load_tokenizer(model)):
        with pytest.raises(ModelLoadError, match="hash:"):
            call()
