"""The cache manager against a slow, obvious model: `actions.py` has the steps, `checked_manager.py` the checks.

The suite takes more than 20,000 steps, the same every time. A long run by hand takes seeds of its own:

    KVFERRY_STATE_MACHINE_STEPS=1000000 KVFERRY_STATE_MACHINE_SEED=1 python -m pytest tests/property/kvcache -k long -s

It prints which seeds it has used, each with every machine; KVFERRY_STATE_MACHINE_KIND picks one machine. To shrink what
hypothesis found set KVFERRY_STATE_MACHINE_SHRINK=1.
"""

from __future__ import annotations

import os
import sys
import time

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.property.kvcache.cache_machine import CacheMachine, walk
from tests.property.kvcache.checked_manager import CheckedManager
from tests.property.kvcache.machine_kinds import KINDS, settings_of

STEPS = int(os.environ.get("KVFERRY_STATE_MACHINE_STEPS", "0"))
FIRST_SEED = int(os.environ.get("KVFERRY_STATE_MACHINE_SEED", "1"))
SHRINK = "KVFERRY_STATE_MACHINE_SHRINK" in os.environ  # shrinking a machine's failure takes minutes
# of at most 50 steps each, for each machine; fewer where the suite runs for every mutant
EXAMPLES = int(os.environ.get("KVFERRY_STATE_MACHINE_EXAMPLES", "10"))
WALK = 500 * EXAMPLES // 10  # steps of a seeded walk, for each machine
LONG_WALK = 250
MOST_MORE = 40  # rounds that look for what was not reached yet
NEVER = {"host: errors", "host: lifted_blocks"}  # only the disk has these
RUN: set[str] = set()  # the kinds that ran to the end in this process


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", KINDS)
def test_machine(kind: str) -> None:
    cls = type("ConfiguredMachine", (CacheMachine,), {"kind": settings_of(kind)})
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        cls,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=50,
            deadline=None,
            derandomize=True,
            database=None,
            phases=(Phase.generate, Phase.shrink) if SHRINK else (Phase.generate,),
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", KINDS)
def test_walk(kind: str) -> None:
    walk(settings_of(kind), f"suite {kind}", WALK)
    RUN.add(kind)


def test_everything_was_reached() -> None:
    """A rule that never gets to what it is for tests nothing: here is what the machines above came to. What their few
    steps missed more of them, with seeds of their own, must reach: whatever the steps are, it does not depend on luck.
    """
    if not set(KINDS) <= RUN or EXAMPLES < 10:
        pytest.skip("not all machines were run before")
    assert CheckedManager.steps > 20_000
    assert len(CheckedManager.reached) > 30
    for seed in range(MOST_MORE):
        for kind in KINDS:
            missed = sorted(name for name, count in CheckedManager.reached.items() if not count and name not in NEVER)
            if not missed:
                return
            tiers_only = all(name.startswith(("host: ", "disk: ")) for name in missed)
            if not tiers_only or {"host_bytes", "disk_bytes"} & set(KINDS[kind]):
                walk(settings_of(kind), f"more {seed} {kind}", LONG_WALK)
    raise AssertionError(f"never reached: {missed}")


@pytest.mark.skipif(STEPS == 0, reason="set KVFERRY_STATE_MACHINE_STEPS for a long run")
@pytest.mark.timeout(0)
def test_long_run() -> None:
    kinds = [k for k in KINDS if os.environ.get("KVFERRY_STATE_MACHINE_KIND", k) == k]
    seed, began, before = FIRST_SEED, time.monotonic(), CheckedManager.steps
    failed: list[str] = []
    while CheckedManager.steps - before < STEPS:
        for kind in kinds:
            try:
                walk(settings_of(kind), f"{seed} {kind}", LONG_WALK)
            except Exception as error:
                failed.append(f"{kind}, seed {seed}: {type(error).__name__}: {error} {getattr(error, '__notes__', '')}")
                print(failed[-1], file=sys.stderr, flush=True)
        took, done = time.monotonic() - began, CheckedManager.steps - before
        print(f"{done} steps, seeds {FIRST_SEED}..{seed}, {took:.0f} s", file=sys.stderr, flush=True)
        seed += 1
    assert not failed, "\n".join(failed)
