from __future__ import annotations

import pytest

from cluster.engine import HashTokenizer
from cluster.frontend.text_output import AnswerText

TOKENIZER = HashTokenizer()
END = 2


def make(**options: object) -> AnswerText:
    return AnswerText(TOKENIZER.stream(), **options)  # type: ignore[arg-type]


def test_text_without_stops_comes_at_once() -> None:
    answer = make()
    assert answer.push(TOKENIZER.encode("hello")).text == "hello"
    assert answer.finish(at_end_token=False) == ""
    assert answer.visible_answer().token_ids == tuple(TOKENIZER.encode("hello"))


def test_beginning_of_a_stop_string_is_held_back_until_it_is_decided() -> None:
    answer = make(stops=["END"])
    assert answer.push(TOKENIZER.encode("abEN")).text == "ab"
    assert answer.push(TOKENIZER.encode("x")).text == "ENx"
    assert answer.push(TOKENIZER.encode("E")).text == ""
    assert answer.finish(at_end_token=False) == "E"
    assert answer.text == "abENxE"


def test_stop_string_cuts_the_text_and_leaves_later_tokens_unconsumed() -> None:
    answer = make(stops=["END"])
    delta = answer.push(TOKENIZER.encode("okEND more"))
    assert (delta.text, answer.stopped) == ("ok", True)
    assert TOKENIZER.decode(delta.token_ids) == "okEND"
    assert answer.visible_answer().token_ids == tuple(TOKENIZER.encode("ok"))
    assert answer.push(TOKENIZER.encode("z")).token_ids == ()


def test_stop_string_is_kept_on_request() -> None:
    answer = make(stops=["END"], include_stop=True)
    assert answer.push(TOKENIZER.encode("okEND more")).text == "okEND"
    assert TOKENIZER.decode(answer.visible_answer().token_ids) == "okEND"


@pytest.mark.parametrize("stops", [["abcd", "c"], ["c", "abcd"]])
def test_the_stop_string_that_completes_first_wins(stops: list[str]) -> None:
    answer = make(stops=stops)
    assert answer.push(TOKENIZER.encode("xabcd")).text == "xab"


def test_stop_strings_count_only_after_min_tokens() -> None:
    answer = make(stops=["a"], min_tokens=3)
    assert answer.push(TOKENIZER.encode("aaaba")).text == "aaab"
    assert answer.stopped


def test_end_token_at_the_end_is_hidden_and_no_part_of_the_visible_answer() -> None:
    answer = make(end_ids=frozenset({END}))
    assert answer.push([*TOKENIZER.encode("hi"), END]).text == "hi"
    assert answer.finish(at_end_token=True) == ""
    assert answer.token_ids[-1] == END
    assert answer.visible_answer().token_ids == tuple(TOKENIZER.encode("hi"))


def test_stop_token_with_a_text_is_hidden_only_when_it_ends_the_answer() -> None:
    mark = TOKENIZER.encode("!")[0]
    answer = make(end_ids=frozenset({mark}))
    assert answer.push(TOKENIZER.encode("a!")).text == "a"
    assert answer.push(TOKENIZER.encode("b!")).text == "!b"
    assert answer.finish(at_end_token=True) == ""
    other = make(end_ids=frozenset({mark}))
    other.push(TOKENIZER.encode("a!"))
    assert other.finish(at_end_token=False) == "!"
    assert other.visible_answer().token_ids == tuple(TOKENIZER.encode("a!"))


def test_incomplete_character_waits_and_is_replaced_at_the_end() -> None:
    euro = TOKENIZER.encode("€")
    answer = make()
    assert answer.push(euro[:2]).text == ""
    assert answer.push(euro[2:]).text == "€"
    assert answer.push(euro[:1]).text == ""
    assert answer.finish(at_end_token=False) == "\ufffd"


class WordStream:
    """Tokens that are words, so that a stop string can cut inside one."""

    def __init__(self, words: list[str]) -> None:
        self.words = words

    def push(self, token_id: int) -> str:
        return self.words[token_id]

    def flush(self) -> str:
        return ""


def test_stop_string_inside_a_token_leaves_a_remainder() -> None:
    answer = AnswerText(WordStream(["one ", "tw#o", "three"]), stops=["#"])
    assert answer.push([0, 1, 2]).text == "one tw"
    visible = answer.visible_answer()
    assert (visible.token_ids, visible.remainder, answer.token_ids) == ((0,), "tw", (0, 1))


def test_stop_string_at_the_very_beginning_keeps_no_token() -> None:
    answer = AnswerText(WordStream(["#a"]), stops=["#"])
    assert answer.push([0]).text == ""
    visible = answer.visible_answer()
    assert (visible.text, visible.token_ids, visible.remainder) == ("", (), "")
