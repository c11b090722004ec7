"""`kvferry demo` as its users run it, over real processes and UCX."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

KEYS = {
    "turn",
    "parent_turn",
    "prompt_tokens",
    "ctx_reused_tokens",
    "gen_reused_tokens",
    "ctx_to_gen_blocks",
    "ctx_to_gen_bytes",
    "gen_to_ctx_blocks",
    "gen_to_ctx_bytes",
    "recomputed_tokens",
    "ttft_ms",
    "text",
    "token_ids",
}


def run_demo(folder: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    figures = folder / "out.json"
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("KVFERRY_", "RAY_"))}
    done = subprocess.run(
        [sys.executable, "-m", "cluster", "demo", "--json", str(figures), *arguments],
        capture_output=True,
        text=True,
        timeout=840,
        env=environment,
        check=False,
    )
    return done, json.loads(figures.read_text()) if figures.exists() else {}


@pytest.mark.ray
@pytest.mark.ucx
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("model", ["hash", "smollm2-135m"])
def test_five_turns_and_a_rewind_are_reused_and_equal(model: str, tmp_path: Path) -> None:
    done, figures = run_demo(tmp_path, "--max-num-turns", "5", "--set", f"model={model}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "equality: ok" in done.stdout
    rows = figures["turns"]
    assert figures["equality"] is True
    assert figures["transport"].startswith("ucx/")
    assert [(row["turn"], row["parent_turn"]) for row in rows] == [(1, 0), (2, 1), (3, 2), (4, 3), (5, 4), (6, 2)]
    assert all(set(row) == KEYS for row in rows)
    for row in rows[1:]:
        parent = rows[row["parent_turn"] - 1]
        endpoint = parent["prompt_tokens"] + len(parent["token_ids"]) - 1
        assert row["recomputed_tokens"] <= row["prompt_tokens"] - endpoint
        assert row["gen_to_ctx_blocks"] > 0
        assert row["ctx_to_gen_blocks"] <= -(-row["prompt_tokens"] // 32) - row["gen_reused_tokens"] // 32


@pytest.mark.ray
def test_a_wrong_option_is_refused_before_anything_starts(tmp_path: Path) -> None:
    done, figures = run_demo(tmp_path, "--policy", "per_turn")
    assert done.returncode == 2
    assert "all_reusable, per_request, per_conversation" in done.stderr
    assert "Traceback" not in done.stderr
    assert figures == {}
