"""The public names of the package, and what importing it may not import."""

from __future__ import annotations

import subprocess
import sys

import pytest

import kvcache
import kvcache.eviction
import kvcache.storage


@pytest.mark.parametrize("module", [kvcache, kvcache.storage, kvcache.eviction])
def test_all_is_sorted_and_complete(module: object) -> None:
    names = module.__all__  # type: ignore[attr-defined]
    assert names == sorted(names)
    for name in names:
        assert getattr(module, name).__name__ == name
    public = {
        name
        for name, value in vars(module).items()
        if isinstance(value, type) and value.__module__.startswith("kvcache") and not name.startswith("_")
    }
    assert public == set(names)


def test_import_brings_no_heavy_package() -> None:
    code = "import kvcache, sys; print([m for m in ('torch', 'ray', 'ucxx', 'fastapi') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert out.stdout.strip() == "[]"
