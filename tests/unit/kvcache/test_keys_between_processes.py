"""What leaves a process is named alike in every process, whatever the seed of its own hashes."""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import numpy as np
from cluster.routing.prefix_index import PrefixIndex
from kvcache.block_keys import chain_keys
from kvcache.reuse_scope import ReuseScope
tokens = np.arange(64, dtype=np.int32)
scope = ReuseScope("adapter", "salt").digest()
keys = [scope, *chain_keys(scope, tokens, 16), *PrefixIndex(16).keys(tokens, "salt")]
print([key.hex() for key in keys])
print(hash("text"))
"""


def run(seed: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True,
        check=True, timeout=60,
    )  # fmt: skip
    return done.stdout.splitlines()


def test_keys_do_not_depend_on_the_process() -> None:
    first, second = run("1"), run("2")
    assert first[0] == second[0]
    assert first[0].count(",") == 8
    assert first[1] != second[1]  # Python's own hashes do differ between the two
