"""The cache manager against a slow, obvious model: `cache_machine.py` has the rules, `checked_manager.py` the checks.

The suite takes more than 20,000 steps, the same every time. A long run by hand takes seeds of its own:

    KVFERRY_STATE_MACHINE_STEPS=1000000 KVFERRY_STATE_MACHINE_SEED=1 python -m pytest tests/property/kvcache -k long -s

It prints which seeds it has used, each with every machine; KVFERRY_STATE_MACHINE_KIND picks one machine,
KVFERRY_STATE_MACHINE_SHRINK=1 shrinks what it finds.
"""

from __future__ import annotations

import os
import sys
import time

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.property.kvcache.checked_manager import CheckedManager
from tests.property.kvcache.machine_kinds import KINDS, machine

STEPS = int(os.environ.get("KVFERRY_STATE_MACHINE_STEPS", "0"))
FIRST_SEED = int(os.environ.get("KVFERRY_STATE_MACHINE_SEED", "1"))
SHRINK = "KVFERRY_STATE_MACHINE_SHRINK" in os.environ  # shrinking a machine's failure takes minutes
# of at most 50 steps each, for each machine; fewer where the suite runs for every mutant
EXAMPLES = int(os.environ.get("KVFERRY_STATE_MACHINE_EXAMPLES", "28"))


def run(kind: str, examples: int, seed: int | None = None) -> int:
    """Returns the steps taken."""
    cls, before = machine(kind), CheckedManager.steps
    if seed is not None:
        cls = hypothesis.seed(seed)(cls)
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        cls,
        settings=settings(
            max_examples=examples,
            stateful_step_count=50,
            deadline=None,
            derandomize=seed is None,
            database=None,
            phases=(Phase.generate, Phase.shrink) if SHRINK else (Phase.generate,),
            suppress_health_check=list(HealthCheck),
        ),
    )
    return CheckedManager.steps - before


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", KINDS)
def test_machine(kind: str) -> None:
    assert run(kind, EXAMPLES) > 20_000 / len(KINDS) * EXAMPLES / 28


@pytest.mark.skipif(STEPS == 0, reason="set KVFERRY_STATE_MACHINE_STEPS for a long run")
@pytest.mark.timeout(0)
def test_long_run() -> None:
    kinds = [k for k in KINDS if os.environ.get("KVFERRY_STATE_MACHINE_KIND", k) == k]
    done, seed, began = 0, FIRST_SEED, time.monotonic()
    failed: list[str] = []
    while done < STEPS:
        for kind in kinds:
            try:
                done += run(kind, 40, seed * len(KINDS) + list(KINDS).index(kind))
            except Exception as error:
                failed.append(f"{kind}, seed {seed}: {type(error).__name__}: {error}")
                print(failed[-1], file=sys.stderr, flush=True)
        print(
            f"{done} steps, seeds {FIRST_SEED}..{seed}, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True
        )
        seed += 1
    assert not failed, "\n".join(failed)
