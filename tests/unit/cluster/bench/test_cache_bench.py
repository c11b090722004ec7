"""The cache benchmark on a toy trace, and honest words about a peer that is not there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from cluster.bench.cache import PeerUnavailable, measure_growth, measure_peer, run_cache_bench
from cluster.bench.cache import peers as peer_file
from cluster.bench.cache.own import measure_own, prompts_of
from cluster.bench.cache.peers import PeerProcess
from cluster.cli.app import app
from cluster.replay.lanes import scheduled
from cluster.replay.runner import ReplayOptions
from cluster.replay.trace import load_trace

PEER_PYTHON = Path(__file__).resolve().parents[4] / ".venv-peers/bin/python"


@pytest.fixture
def trace(tmp_path) -> Path:
    path = tmp_path / "weka.jsonl"
    rows = [
        {"c": f"c{k}", "p": None, "k": n, "t": 10.0 * n, "i": 64 * (3 + n), "o": 5, "tt": 64, "st": 0, "a": 1.0,
         "s": "tool_use", "b": [1, 3 + n]}
        for k in range(3)
        for n in range(4)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_figures_of_a_toy_trace(trace, tmp_path):
    out = run_cache_bench(
        trace,
        requests=12,
        capacity_tokens=100_000,
        peers=("vllm",),
        peer_python=Path("/nonexistent/python"),
        growth=False,
        json_file=tmp_path / "out.json",
    )
    assert json.loads((tmp_path / "out.json").read_text()) == out
    assert list(out) == ["block_16", "block_32", "block_64"]
    for figures in out.values():
        assert figures["hit_rate"] == pytest.approx((3 * (3 + 4 + 5) + 2) / (3 * (3 + 4 + 5 + 6)))
        assert figures["cpu_us_per_block"] > 0 and figures["requests"] == 12
        assert "unavailable" in figures["peers"]["vllm"] and "hit_rate" not in figures["peers"]["vllm"]


def test_growth_measures_warm_turns():
    rows = measure_growth(cached_blocks=(2000,), prompts=(1024, 8192), repetitions=3)
    assert [(row.cached_blocks, row.prompt_tokens) for row in rows] == [(2000, 1024), (2000, 8192)]
    assert all(row.warm_ms > 0 for row in rows)


@pytest.mark.parametrize("name", ["vllm", "nobody"])
def test_a_missing_peer_is_named(name):
    with pytest.raises(PeerUnavailable, match=name):
        measure_peer(name, [np.arange(40, dtype=np.int32)], 16, 1000, Path(sys.executable))


@pytest.mark.slow
@pytest.mark.skipif(not PEER_PYTHON.exists(), reason="no .venv-peers: make bench-peers")
@pytest.mark.parametrize("name", peer_file.PEERS)
def test_a_peer_runs_rounds_and_finds_what_we_find(trace, name):
    chosen = [request for _, request in scheduled(load_trace(trace).coarsened(16))]
    prompts = prompts_of(chosen, 16)
    ours = measure_own(chosen, prompts, ReplayOptions(capacity_tokens=100_000, block=16, with_bounds=False))
    with PeerProcess(name, prompts, 16, 100_000, PEER_PYTHON) as peer:
        first, second = peer.one_round(), peer.one_round()
    assert first["hit_rate"] == second["hit_rate"] == pytest.approx(ours.hit_rate)
    assert first["cpu_us_per_block"] > ours.cpu_us_per_block > 0


def test_missing_packages_are_replaced_by_empty_ones_and_others_are_not():
    script = """
import importlib.metadata, json, sys
from stub_modules import install_stubs
install_stubs(frozenset({"no_kernels", "json"}))
import no_kernels.deep.inside as inside
assert isinstance(inside.Kernel, type) and not isinstance(3, inside.Kernel)
assert inside.Mode.FAST is not None and inside.launch(1, grid=2) is not None and inside.__version__ == "0.0.0"
assert importlib.metadata.version("no-kernels") == "0.0.0" and importlib.metadata.version("numpy") != "0.0.0"
assert json.loads("[1]") == [1]
for name in ("import not_listed_either", "importlib.metadata.version('not-listed-either')"):
    try:
        exec(name)
    except ImportError:
        continue
    raise SystemExit(name + " worked")
"""
    folder = Path(peer_file.__file__).parent
    done = subprocess.run([sys.executable, "-c", script], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_replay_command(trace, tmp_path):
    run = CliRunner().invoke(
        app,
        ["replay", str(trace), "--capacity-tokens", "1M,2M", "--eviction", "lru,turn_aware", "--block", "64", "--json",
         str(tmp_path / "r.json"), "--plot", str(tmp_path / "r.png")],
    )  # fmt: skip
    assert run.exit_code == 0, run.output
    runs = json.loads((tmp_path / "r.json").read_text())["runs"]
    assert [(one["capacity_tokens"], one["eviction"]) for one in runs] == [
        (1_000_000, "lru"), (1_000_000, "turn_aware"), (2_000_000, "lru"), (2_000_000, "turn_aware"),
    ]  # fmt: skip
    keys = "requests hit_rate infinite_hit_rate belady_hit_rate evictions cpu_ms_per_request cpu_us_per_block"
    assert {*keys.split(), "bytes_per_cached_block", "resident_blocks", "resident_states", "peers"} <= set(runs[0])
    assert (tmp_path / "r.png").stat().st_size > 100


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "x"], "per_conversation"),
        (["--eviction", "x"], "turn_aware"),
        (["--capacity-tokens", "-1M"], "positive"),
        (["--life-cycles", "x"], "ssm"),
        (["--block", "100"], "multiple"),
    ],
)
def test_wrong_arguments_are_named(trace, arguments, message):
    run = CliRunner().invoke(app, ["replay", str(trace), *arguments])
    assert run.exit_code == 2 and message in run.output
