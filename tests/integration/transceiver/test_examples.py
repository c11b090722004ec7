"""The transceiver's example runs as it is documented."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ucxx", reason="needs ucxx")
ROOT = Path(__file__).parents[3]


@pytest.mark.ucx
@pytest.mark.timeout(120)
def test_two_processes() -> None:
    command = (sys.executable, ROOT / "examples" / "transceiver_two_processes.py")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert "receiver: first: done, 65536 bytes over ucx/" in done.stdout
    assert "receiver: second: done, 1 block over ucx/" in done.stdout
    assert "holder: second: done" in done.stdout
