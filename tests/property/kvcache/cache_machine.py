"""The actions as a hypothesis state machine, and driven by a seed: the same steps, the same checks after each.

Hypothesis finds and shrinks; the seeded walk takes many more steps in the same time.
"""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.property.kvcache.actions import Actions
from tests.property.kvcache.choices import Choices, Drawn, Seeded

__all__ = ["CacheMachine", "walk"]

# how often the seeded walk takes each step
WEIGHTS = {
    "turn": 8,
    "next_turn": 6,
    "create": 5,
    "step": 12,
    "receive": 2,
    "end_turn": 4,
    "close": 4,
    "move": 4,
    "peer": 4,
    "tier": 3,
    "operate": 3,
    "misuse": 2,
}


class CacheMachine(RuleBasedStateMachine):
    """Each action is a rule; `kind` are the settings of `Actions`."""

    kind: type[Actions] = Actions

    def __init__(self) -> None:
        super().__init__()
        self.world = self.kind()

    @invariant()
    def sound(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        self.world.teardown()


def _rule(name: str) -> object:
    def run(self: CacheMachine, data: st.DataObject) -> None:
        getattr(self.world, name)(Drawn(data))

    run.__name__ = name
    able = precondition(lambda self: getattr(self.world, f"can_{name}")())
    return able(rule(data=st.data())(run))


for _name in WEIGHTS:
    setattr(CacheMachine, _name, _rule(_name))


def walk(kind: type[Actions], seed: str, steps: int) -> None:
    """Take `steps` steps that the seed decides, checking after each."""
    choose: Choices = Seeded(seed)
    names = [name for name, weight in WEIGHTS.items() for _ in range(weight)]
    world = kind()
    trail: list[str] = []
    try:
        for _ in range(steps):
            able = [name for name in names if getattr(world, f"can_{name}")()]
            trail.append(choose.pick(able))
            getattr(world, trail[-1])(choose)
            world.check()
        world.teardown()
    except Exception as error:
        error.add_note(f"seed {seed!r}, {len(trail)} steps, the last ones {trail[-8:]}")
        raise
