"""Speed of the engine in tokens per CPU-second of one thread: load, prefill, batched decode.

    python tests/bench/engine_speed.py [--model smollm2-135m] [--contexts 512 2048] [--batches 1 4] [--steps 8]

CPU-seconds, not wall seconds: they hold on a machine with busy neighbours. The best of several rounds is printed.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from pathlib import Path
from typing import Any

import numpy as np

from cluster.engine import SequenceStep, StepPlan, load_runner, make_storage
from cluster.request import SamplingParams

GREEDY = SamplingParams()
BLOCK = 32


def _cpu(work: Any, rounds: int) -> float:
    """CPU-seconds of the fastest of `rounds` calls."""
    best = float("inf")
    for _ in range(rounds):
        started = time.process_time()
        work()
        best = min(best, time.process_time() - started)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--steps", type=int, default=8, help="decode steps a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures to this file, too")
    args = parser.parse_args()

    started, started_wall = time.process_time(), time.perf_counter()
    runner: Any = load_runner(args.model, tokens_per_block=BLOCK)
    figures: dict[str, float] = {
        "load_cpu_s": time.process_time() - started,
        "load_wall_s": time.perf_counter() - started_wall,
    }
    longest, widest = max(args.contexts), max(args.batches)
    blocks = -(-(longest + args.steps * args.rounds + 1) // BLOCK)
    storage = make_storage(runner, [blocks * widest])
    runner.bind(storage)
    rng = np.random.default_rng(0)
    tables = rng.permutation(blocks * widest).astype(np.int32).reshape(widest, blocks)
    ids = rng.integers(3, min(runner.vocab_size, 250), size=longest).astype(np.int32)

    for context in args.contexts:

        def prefill(row: int = 0, context: int = context) -> None:
            runner.execute(StepPlan([SequenceStep(ids[:context], 0, (tables[row],), GREEDY)]))

        figures[f"prefill_{context}"] = context / _cpu(prefill, args.rounds if context < 1024 else 1)
        for row in range(1, widest):  # the same content for every row: copied, not computed
            for source, target in zip(tables[0], tables[row], strict=True):
                storage.copy_page(int(source), int(target))
        for batch in args.batches:
            at = context

            def decode(batch: int = batch) -> None:
                nonlocal at
                for _ in range(args.steps):
                    rows = [SequenceStep(ids[:1], at, (tables[row],), GREEDY, True) for row in range(batch)]
                    runner.execute(StepPlan(rows))
                    at += 1

            figures[f"decode_b{batch}_{context}"] = batch * args.steps / _cpu(decode, args.rounds)
    figures["peak_rss_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    for name, value in figures.items():
        unit = "" if name.endswith(("_s", "_mb")) else " tokens/CPU-s"
        print(f"{name:20} {value:10.2f}{unit}")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))
    storage.close()


if __name__ == "__main__":
    main()
