"""What is said in the demo: a system message of several blocks, five turns, and a branch from the end of turn 2."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DEMO_SCRIPT", "DemoScript", "DemoTurn"]


@dataclass(frozen=True, slots=True)
class DemoTurn:
    """One user message, said at the end of turn `parent` (0: at the beginning). Turns are numbered from 1."""

    parent: int
    user: str


@dataclass(frozen=True, slots=True)
class DemoScript:
    """A whole conversation tree; a turn's parent comes before it."""

    system: str
    turns: tuple[DemoTurn, ...]

    def history(self, turn: int) -> list[int]:
        """Numbers of the turns before `turn` on its path, oldest first."""
        path: list[int] = []
        parent = self.turns[turn - 1].parent
        while parent:
            path.append(parent)
            parent = self.turns[parent - 1].parent
        return path[::-1]


# The small model ends each of these answers by itself.
_SYSTEM = (
    "You are a friendly and patient teacher who answers the questions of young pupils. Keep to these rules. "
    "Answer in one short and complete sentence, never in a list. Use simple words that a child of ten knows, and "
    "explain a hard word when you cannot avoid it. Say only what is true, and say that you do not know when you "
    "do not know. Do not repeat the question, do not greet, do not ask anything back, and do not add advice or "
    "jokes. Numbers are written as digits, and units are metric. The pupils come from many countries, so name "
    "things by their common English names. The lesson today is about the world we live in: countries and their "
    "capitals, oceans and rivers, mountains, animals and plants, the sky and the weather. When a pupil says thank "
    "you, answer that they are welcome."
)

DEMO_SCRIPT = DemoScript(
    system=_SYSTEM,
    turns=(
        DemoTurn(0, "What is the capital of France?"),
        DemoTurn(1, "Which river flows through it?"),
        DemoTurn(2, "What is the largest ocean?"),
        DemoTurn(3, "Which animals live there?"),
        DemoTurn(4, "Thank you for the lesson!"),
        DemoTurn(2, "And which river flows through London?"),
    ),
)
