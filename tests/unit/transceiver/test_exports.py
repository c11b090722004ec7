"""The package's public face is sorted, complete, and free of transports until one is started."""

from __future__ import annotations

import subprocess
import sys

import transceiver


def test_all_is_sorted_and_resolves() -> None:
    assert transceiver.__all__ == sorted(transceiver.__all__)
    for name in transceiver.__all__:
        assert getattr(transceiver, name) is not None


def test_import_loads_no_transport() -> None:
    code = "import sys, transceiver; print(sorted(m for m in ('ucxx', 'ray', 'torch', 'fastapi') if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
