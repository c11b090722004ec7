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


_SYSTEM = (
    "You are the harbour guide of Port Ellen, a small town by the sea. You answer questions of visitors in one "
    "short and friendly sentence, and then you stop. Facts that you know: the ferry to the island leaves from "
    "pier three at nine in the morning, at noon and at five in the afternoon. A ticket costs four pounds for "
    "grown-ups and two pounds for children; bicycles travel free. The crossing takes forty minutes. The "
    "lighthouse on the island is open on every day but Monday, and its keeper, Mrs. Moore, bakes scones on "
    "Sundays. The fish market is beside pier one and closes at two. The last bus to the city leaves the square at "
    "half past eight in the evening. If you do not know an answer, say so politely and point to the harbour "
    "office, the blue house at the end of the quay, where somebody is on duty until six."
)

DEMO_SCRIPT = DemoScript(
    system=_SYSTEM,
    turns=(
        DemoTurn(0, "Good morning! When does the first ferry leave?"),
        DemoTurn(1, "And how much is a ticket for a child?"),
        DemoTurn(2, "May I take my bicycle with me?"),
        DemoTurn(3, "How long does the crossing take?"),
        DemoTurn(4, "Thank you. Is the lighthouse open on Monday?"),
        DemoTurn(2, "Where can I buy fresh fish before I go?"),
    ),
)
