"""The demo notices reuse that did not happen, blocks that need not travel, and the wrong transport."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.demo import DEMO_SCRIPT, ReuseRules, TurnRow, broken_expectations


def row(turn: int, parent: int, prompt: int, reused: int, answer: int, blocks: int, gen: int | None = None) -> TurnRow:
    return TurnRow(
        turn=turn,
        parent_turn=parent,
        prompt_tokens=prompt,
        ctx_reused_tokens=reused,
        gen_reused_tokens=reused if gen is None else gen,
        ctx_to_gen_blocks=blocks,
        ctx_to_gen_bytes=0,
        gen_to_ctx_blocks=1,
        gen_to_ctx_bytes=0,
        recomputed_tokens=prompt - reused,
        ttft_ms=1.0,
        text="",
        token_ids=tuple(range(answer)),
    )


GOOD = (
    row(1, 0, 190, 0, 8, 6),  # ends at 197
    row(2, 1, 214, 197, 13, 1),  # ends at 226
    row(3, 2, 243, 226, 9, 1),
    row(4, 2, 240, 226, 12, 1),
)


RULES = ReuseRules(tokens_per_block=32, backend="ucx", retained_turns=5)


def broken(rows: tuple[TurnRow, ...], rules: ReuseRules = RULES, transport: str = "ucx/cma") -> list[str]:
    return broken_expectations(rows, rules, transport=transport)


def test_a_good_run_breaks_nothing() -> None:
    assert broken(GOOD) == []


@pytest.mark.parametrize(
    ("index", "change", "words"),
    [
        (1, {"ctx_reused_tokens": 196, "recomputed_tokens": 18}, "18 tokens recomputed"),
        (3, {"ctx_reused_tokens": 190, "recomputed_tokens": 50}, "50 tokens recomputed"),
        (1, {"recomputed_tokens": 16}, "are not the prompt's 214"),
        (1, {"ctx_to_gen_blocks": 2}, "lacked 1 at most"),
        (1, {"gen_reused_tokens": 160}, "generation side reused 160"),
    ],
)
def test_one_wrong_figure_is_one_sentence(index: int, change: dict[str, int], words: str) -> None:
    rows = tuple(replace(item, **change) if at == index else item for at, item in enumerate(GOOD))
    (sentence,) = broken(rows)
    assert words in sentence
    assert f"turn {index + 1}:" in sentence


def test_a_dropped_turn_may_be_recomputed() -> None:
    rewound = (*GOOD[:3], row(4, 2, 240, 0, 12, 1))
    assert broken(rewound, replace(RULES, retained_turns=2))
    assert broken(rewound, replace(RULES, retained_turns=1)) == []
    assert broken(rewound, replace(RULES, retained_turns=None))


def test_less_is_expected_of_less() -> None:
    whole = tuple(row(r.turn, r.parent_turn, r.prompt_tokens, r.ctx_reused_tokens // 32 * 32, 8, 1) for r in GOOD[1:])
    assert broken((GOOD[0], *whole))
    assert broken((GOOD[0], *whole), replace(RULES, partial_reuse=False)) == []
    prompt_only = (GOOD[0], row(2, 1, 214, 190, 13, 1, gen=197))
    assert broken(prompt_only)
    assert broken(prompt_only, replace(RULES, backflow=False)) == []


@pytest.mark.parametrize("transport", ["", "inproc"])
def test_another_transport_is_told(transport: str) -> None:
    assert broken(GOOD, transport=transport)


def test_the_script_has_five_turns_and_a_branch_from_the_second() -> None:
    assert [turn.parent for turn in DEMO_SCRIPT.turns] == [0, 1, 2, 3, 4, 2]
    assert DEMO_SCRIPT.history(5) == [1, 2, 3, 4]
    assert DEMO_SCRIPT.history(6) == [1, 2]
    assert DEMO_SCRIPT.history(1) == []
