"""The transceiver test as a user runs it: real processes over UCX; it passes, and it fails when told to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cluster.launch.process_tree import descendants

pytest.importorskip("ucxx", reason="needs ucxx")
pytestmark = [pytest.mark.ucx, pytest.mark.slow, pytest.mark.timeout(240)]

REPOSITORY = Path(__file__).parents[3]
SMALL = """
request_lengths: [40, 300]
requests_per_length: 2
directions: [ctx_to_gen]
layouts:
  - {name: full, num_layers: 2, num_kv_heads: 2}
  - {name: tp2-tp1, num_layers: 2, num_kv_heads: 2, context: {tp: 2}}
policies: [per_conversation]
max_num_turns: [2]
turn_cells: {turns: 3, rewind_to: 1, first_tokens: 70, turn_tokens: 20, answer_tokens: 10}
ucx_env_sweep: [{name: tcp, env: {UCX_TLS: tcp}, expect_transport: ucx/tcp}]
run: {timeout_per_cell_s: 20.0, max_sweep_s: 60.0}
"""


def run(tmp_path: Path, *args: str, config: str = SMALL) -> tuple[int, str, dict[str, Any]]:
    """Exit code, output and results.json of `kvferry transceiver-test`."""
    (tmp_path / "test.yaml").write_text(config)
    argv = [sys.executable, "-m", "cluster", "transceiver-test", "-c", str(tmp_path / "test.yaml")]
    argv += ["-o", str(tmp_path / "out"), *args]
    done = subprocess.run(argv, cwd=REPOSITORY, capture_output=True, text=True, timeout=200, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    left = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in descendants(os.getpid())]
    assert not any(b"rank_process" in command for command in left)
    return done.returncode, done.stdout, json.loads((tmp_path / "out" / "results.json").read_text())


def statuses(results: dict[str, Any]) -> dict[str, str]:
    return {cell["cell"]: cell["status"] for row in results["by_combination"] for cell in row["cells"]}


def test_everything_passes_and_the_turns_move_only_missing_blocks(tmp_path: Path) -> None:
    code, out, results = run(tmp_path, "--host-transfer")
    assert (code, set(statuses(results).values())) == (0, {"PASS"}), out
    assert len(statuses(results)) == 5
    assert results["host_transfer"][0]["byte_correct"]
    cells = {cell["cell"]: cell for row in results["by_combination"] for cell in row["cells"]}
    # turns of 70, 20, 20 and (after turn 1) 20 new tokens, answers of 10, blocks of 32: counted by hand
    assert cells["tcp/ucx/full/turns/per_conversation/2"]["blocks"] == 3 + 1 + 2 + 2 + 1 + 1 + 2 + 1
    assert not (tmp_path / "out" / "token").exists()


def test_a_forced_mismatch_fails_only_its_cell(tmp_path: Path) -> None:
    code, out, results = run(tmp_path, "--force-mismatch", "tp2-tp1/ctx_to_gen/40")
    found = statuses(results)
    assert code == 1
    assert found.pop("tcp/ucx/tp2-tp1/ctx_to_gen/40") == "MISMATCH"
    assert set(found.values()) == {"PASS"}
    assert "words differ" in out


def test_a_forced_mismatch_of_a_turn_cell_is_found_in_the_pages(tmp_path: Path) -> None:
    code, out, results = run(tmp_path, "--force-mismatch", "full/turns/")
    found = statuses(results)
    assert code == 1
    assert found.pop("tcp/ucx/full/turns/per_conversation/2") == "MISMATCH"
    assert set(found.values()) == {"PASS"}
    assert "mismatch in turn 1: turn-gen ends with wrong blocks [0]" in out


def test_a_forced_mismatch_can_be_allowed_by_its_name(tmp_path: Path) -> None:
    cell = "tcp/ucx/full/ctx_to_gen/300"
    code, _, results = run(tmp_path, "--force-mismatch", cell, "--allow", cell)
    assert (code, statuses(results)[cell]) == (0, "MISMATCH")


def test_a_forced_hang_ends_its_sweep_and_the_next_one_runs(tmp_path: Path) -> None:
    config = SMALL.replace("timeout_per_cell_s: 20.0", "timeout_per_cell_s: 6.0").replace(
        "ucx_env_sweep: [", "ucx_env_sweep: [{name: first, env: {UCX_TLS: tcp}}, "
    )
    code, out, results = run(tmp_path, "--force-hang", "first/ucx/full/ctx_to_gen/300", config=config)
    found = statuses(results)
    assert code == 1
    assert found["first/ucx/full/ctx_to_gen/40"] == "PASS"
    assert found["first/ucx/full/ctx_to_gen/300"] == "TIMEOUT"
    assert found["first/ucx/tp2-tp1/ctx_to_gen/40"] == "TIMEOUT"
    assert {status for name, status in found.items() if name.startswith("tcp/")} == {"PASS"}
    assert "not run: first/ucx/full/ctx_to_gen/300 ended its sweep" in out
    logs = (tmp_path / "out" / "logs" / "first" / "gen-0.log").read_text()
    assert "_do_hang" in logs  # the stacks of the rank that hung


def test_another_transport_than_expected_fails(tmp_path: Path) -> None:
    config = SMALL.replace("expect_transport: ucx/tcp", "expect_transport: ucx/rc_mlx5")
    code, out, results = run(tmp_path, config=config)
    assert (code, set(statuses(results).values())) == (1, {"TRANSFER_ERROR"})
    assert "ucx/tcp was used, not ucx/rc_mlx5" in out


def test_inproc_runs_both_ends_in_one_process(tmp_path: Path) -> None:
    config = "backends: [inproc]\n" + SMALL.replace("expect_transport: ucx/tcp", "")
    code, out, results = run(tmp_path, config=config.replace(", }]", "}]"))
    assert (code, set(statuses(results).values())) == (0, {"PASS"}), out
