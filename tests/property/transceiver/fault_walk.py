"""Many seeds of the random-fault machine; 500,000 steps are

    python -m tests.property.transceiver.fault_walk --seeds 0-99 --steps 5000 --jobs 4

Each seed is a process of its own; a line per seed says what was done, the last line adds up. Exit code 1 when a seed
failed: its output is printed, and ``--seeds N-N`` runs it again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from hypothesis import seed as seeded
from hypothesis.stateful import run_state_machine_as_test

from tests.property.transceiver.test_random_faults import TALLY, RandomFaults, walk_settings


def walk(seed: int, steps: int) -> None:
    """One seed, in this process; prints the tally as JSON."""
    run_state_machine_as_test(seeded(seed)(RandomFaults), settings=walk_settings(steps))
    print(json.dumps(TALLY))


def walk_apart(seed: int, steps: int) -> Counter[str] | None:
    """One seed in a child process; None when it failed."""
    began = time.monotonic()
    command = (sys.executable, "-m", __spec__.name, "--one", str(seed), "--steps", str(steps))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"seed {seed}: FAILED (exit {done.returncode})\n{done.stdout}{done.stderr}", flush=True)
        return None
    tally: Counter[str] = Counter(json.loads(done.stdout.splitlines()[-1]))
    print(f"seed {seed}: {text_of(tally)}, {time.monotonic() - began:.0f} s", flush=True)
    return tally


def text_of(tally: Counter[str]) -> str:
    """What was done, in words."""
    ends = ", ".join(f"{tally[name]} {name}" for name in ("done", "failed", "cancelled", "timed_out"))
    return f"{tally['steps']} steps, {tally['faults']} faults, {tally['deaths']} deaths; transfers: {ends}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Random faults over a range of seeds.")
    parser.add_argument("--seeds", default="0-99", help="first and last seed (default: 0-99)")
    parser.add_argument("--steps", type=int, default=5000, help="steps a seed (default: 5000)")
    parser.add_argument("--jobs", type=int, default=2, help="seeds at once (default: 2)")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        walk(options.one, options.steps)
        return 0
    first, _, last = options.seeds.partition("-")
    seeds = range(int(first), int(last or first) + 1)
    with ThreadPoolExecutor(options.jobs) as pool:
        tallies = list(pool.map(lambda seed: walk_apart(seed, options.steps), seeds))
    good = [tally for tally in tallies if tally is not None]
    print(f"seeds {options.seeds}: {len(good)} of {len(seeds)} good; {text_of(sum(good, Counter()))}")
    return 0 if len(good) == len(seeds) else 1


if __name__ == "__main__":
    sys.exit(main())
