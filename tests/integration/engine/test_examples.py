"""The engine's example runs on the hash model and shows the reuse that it promises."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_single_process_example() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "01_single_process.py"), "--model", "hash"],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    rows = [line.split()[:4] for line in done.stdout.splitlines()[1:]]
    assert [row[0] for row in rows] == ["1", "2", "3", "1'"]
    assert [int(row[2]) > 0 for row in rows] == [False, True, True, True]
    for name, prompt, reused, computed in rows[1:]:
        assert int(reused) + int(computed) == int(prompt), name
        assert int(computed) < 60  # the new message and the template's tokens, one byte a token
