"""The real model says what three unrelated engines say, however its work is cut up and batched."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest


def _place(engine: Any, cases: list[dict[str, Any]]) -> list[tuple[list[int], Any]]:
    """Pages for every case, and all prompt tokens but the last computed, in one mixed step after the other."""
    placed, at = [], 0
    for case in cases:
        ids = case["prompt_ids"]
        count = -(-(len(ids) + len(case["greedy_ids"])) // 32)
        placed.append((ids, engine.pages[at : at + count]))
        at += count
    cut = 16
    first = [engine.step(ids[:-1][:cut], 0, pages, False) for ids, pages in placed]
    rest = [engine.step(ids[cut:-1], cut, pages, False) for ids, pages in placed if len(ids) - 1 > cut]
    assert engine.logits(*first) == []
    assert engine.logits(*rest) == []
    return placed


def test_all_cases_in_one_batch(engine: Any, golden: list[dict[str, Any]]) -> None:
    assert len(golden) == 6
    outs = engine.decode(_place(engine, golden), [len(case["greedy_ids"]) for case in golden])
    for case, out in zip(golden, outs, strict=True):
        assert out == case["greedy_ids"], case["name"]


def test_one_case_alone_from_a_whole_prompt(engine: Any, golden: list[dict[str, Any]]) -> None:
    case = next(case for case in golden if case["name"] == "A2")
    ids = case["prompt_ids"]
    first = int(np.argmax(engine.logits(engine.step(ids, 0, engine.pages))[0]))
    rest = engine.decode([(ids + [first], engine.pages)], [len(case["greedy_ids"]) - 1])[0]
    assert [first, *rest] == case["greedy_ids"]


def test_the_shared_cases_are_the_copied_ones(
    golden: list[dict[str, Any]], shared_golden: list[dict[str, Any]]
) -> None:
    def essence(cases: list[dict[str, Any]]) -> dict[str, Any]:
        return {case["name"]: (case["prompt_ids"], case["greedy_ids"]) for case in cases}

    assert essence(golden) == essence(shared_golden)


def test_prompt_ids(tokenizer: Any, golden: list[dict[str, Any]]) -> None:
    chats: dict[str, list[dict[str, str]]] = {}
    for case in golden:
        if "prompt" in case:
            assert tokenizer.encode(case["prompt"]) == case["prompt_ids"]
            continue
        messages = chats.setdefault(case["chat"], [])
        messages.append({"role": "user", "content": case["user"]})
        assert tokenizer.encode(tokenizer.apply_chat_template(messages)) == case["prompt_ids"], case["name"]
        messages.append({"role": "assistant", "content": tokenizer.decode(case["greedy_ids"])})


def test_an_answer_may_re_encode_to_other_ids(golden: list[dict[str, Any]]) -> None:
    """Why a server keeps the generated ids: chat A's history, sent as text, returns only 39 of the 46 cached ones."""
    a1, a2 = (next(case for case in golden if case["name"] == name) for name in ("A1", "A2"))
    cached = a1["prompt_ids"] + a1["greedy_ids"]
    shared = next(i for i, (x, y) in enumerate(zip(cached, a2["prompt_ids"], strict=False)) if x != y)
    assert (shared, len(cached)) == (39, 46)


@pytest.mark.parametrize(
    "text", ["", "plain", "héllo 😀 漢字\n\n  two  spaces\t1234567", "<|im_start|>user\nhi<|im_end|>\n"]
)
def test_text_comes_back(tokenizer: Any, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text.replace("<|im_start|>", "").replace("<|im_end|>", "")
    stream = tokenizer.stream()
    pieces = [stream.push(i) for i in ids]
    assert "".join(pieces) + stream.flush() == tokenizer.decode(ids)
    assert not any("\ufffd" in piece for piece in pieces)


def test_special_tokens_in_text_are_recognised(tokenizer: Any) -> None:
    assert tokenizer.encode("<|im_start|>") == [1]
    assert tokenizer.encode("a<|im_end|>b").count(2) == 1
    assert tokenizer.eos_token_ids == {2}
    assert tokenizer.vocab_size == 49152
