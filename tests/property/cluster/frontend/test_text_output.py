"""Whatever the batches, the visible text is the decoded text up to the stop string that completes first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cluster.engine import HashTokenizer
from cluster.frontend.text_output import AnswerText

TOKENIZER = HashTokenizer()
ALPHABET = "ab€"


def reference(text: str, stops: list[str]) -> str:
    """Character by character: the answer ends as soon as some stop string is complete."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(len(stop) for stop in complete)]
    return text


@given(
    text=st.text(ALPHABET, max_size=30),
    stops=st.lists(st.text(ALPHABET, min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(1, 7), max_size=40),
)
def test_text_does_not_depend_on_batches(text: str, stops: list[str], cuts: list[int]) -> None:
    ids = TOKENIZER.encode(text)
    answer = AnswerText(TOKENIZER.stream(), stops=stops)
    emitted: list[str] = []
    at = 0
    for size in [*cuts, len(ids) + 1]:
        emitted.append(answer.push(ids[at : at + size]).text)
        at += size
    if not answer.stopped:
        emitted.append(answer.finish(at_end_token=False))
    assert "".join(emitted) == answer.text == reference(text, stops)
    assert list(answer.token_ids) == ids[: answer.num_tokens]
    visible = answer.visible_answer()
    assert TOKENIZER.decode(visible.token_ids) + visible.remainder == visible.text
    for stop in stops:
        assert stop not in visible.text


@given(ids=st.lists(st.integers(0, 258), max_size=40), cuts=st.lists(st.integers(1, 7), max_size=40))
def test_any_ids_come_out_as_their_decoding(ids: list[int], cuts: list[int]) -> None:
    answer = AnswerText(TOKENIZER.stream())
    at = 0
    for size in [*cuts, len(ids) + 1]:
        answer.push(ids[at : at + size])
        at += size
    answer.finish(at_end_token=False)
    assert answer.text == TOKENIZER.decode(ids)
    assert answer.visible_answer().token_ids == tuple(ids)
