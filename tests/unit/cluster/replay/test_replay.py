"""Traces, lanes, the Belady bound against brute force, and small replays through the real manager."""

from __future__ import annotations

import gzip
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from cluster.cli.app import app
from cluster.replay import ReplayOptions, TraceError, belady_hits, load_trace, replay, scheduled
from cluster.replay.belady import infinite_hits
from cluster.replay.pixel_text import draw_text, text_width
from cluster.replay.plot import write_plot
from cluster.replay.runner import block_tokens, make_budget, make_manager, serve
from kvcache import EvictionPolicyName, ReusePolicy

TRACES = Path(__file__).resolve().parents[5] / "shared" / "traces"


def weka_file(folder: Path, rows: list[dict]) -> Path:
    path = folder / "weka.jsonl.gz"
    with gzip.open(path, "wt") as out:
        out.writelines(json.dumps(row) + "\n" for row in rows)
    return path


def row(conversation: str, time: float, blocks: list[int], parent: str | None = None, tools: int = 0, system: int = 0):
    tokens = 64 * sum(blocks[1::2]) + 5
    return {
        "c": conversation, "p": parent, "k": 0, "t": time, "i": tokens, "o": 9, "tt": tools, "st": system, "a": 1.0,
        "s": "end_turn", "b": blocks,
    }  # fmt: skip


def test_weka_ids(tmp_path):
    rows = [
        row("one", 0.0, [1, 4], tools=64, system=64),
        row("one", 9.0, [1, 4, 9, 2], tools=64, system=64),
        row("two", 0.0, [1, 4], tools=64, system=128),
        row("two/agent", 3.0, [1, 2, 50, 1], parent="two", tools=64, system=0),
    ]
    trace = load_trace(weka_file(tmp_path, rows))
    one, longer, two, agent = (request.blocks for request in trace.requests)
    assert longer[:4].tolist() == one.tolist() and len(longer) == 6
    assert one[0] == two[0] == agent[0]  # the same tools
    assert one[1] != two[1]  # another system prompt
    assert set(one[2:]).isdisjoint(two[2:])  # local ids of two conversations
    assert trace.requests[3].root == "two"
    coarse = trace.coarsened(128)
    assert [len(request.blocks) for request in coarse.requests] == [2, 3, 2, 1]
    assert coarse.requests[0].blocks.tolist() == one[1::2].tolist()
    assert [len(request.blocks) for request in trace.coarsened(16).requests] == [16, 24, 16, 12]
    with pytest.raises(TraceError, match="multiple"):
        trace.coarsened(100)


def test_lanes_run_one_conversation_after_another(tmp_path):
    rows = [row("a", 0.0, [1, 1]), row("a", 5000.0, [1, 2]), row("b", 0.0, [1, 1]), row("b", 10.0, [1, 2])]
    arrivals = scheduled(load_trace(weka_file(tmp_path, rows)), lanes=1)
    names = [request.conversation for _, request in arrivals]
    assert names in (["a", "a", "b", "b"], ["b", "b", "a", "a"])
    gaps = {names[i]: arrivals[i + 1][0] - arrivals[i][0] for i in (0, 2)}
    assert gaps["a"] == pytest.approx(1800.0) and gaps["b"] == pytest.approx(10.0)
    assert arrivals[2][0] - arrivals[1][0] == pytest.approx(5.0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "no request"),
        ("[1]\n", "JSON object"),
        ("{", "not JSON lines"),
        ('{"b": [], "t": 0, "i": 1e999, "o": 1}', "lacks"),
        ('{"x": 1}', "unknown"),
        ('{"b": [1]}', "lacks"),
    ],
)
def test_bad_traces(tmp_path, content, message):
    path = tmp_path / "t.jsonl"
    path.write_text(content)
    with pytest.raises(TraceError, match=message):
        load_trace(path)
    with pytest.raises(TraceError, match="cannot read"):
        load_trace(tmp_path / "missing.jsonl")


def whole_and_gzipped(folder: Path) -> tuple[Path, bytes]:
    path = weka_file(folder, [row(f"c{k}", float(k), [k * 1000 + 1, 9]) for k in range(200)])
    return path, gzip.compress(gzip.decompress(path.read_bytes()), mtime=0)  # the header without a name


def test_a_compressed_trace_that_was_cut_off(tmp_path):
    path, content = whole_and_gzipped(tmp_path)
    for length in (5, 11, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(TraceError, match=r"weka\.jsonl\.gz ends early"):
            load_trace(path)
        code, text = command(str(path))
        assert code == 2 and "kvferry replay:" in text and "ends early" in " ".join(text.split())


def test_a_compressed_trace_that_is_damaged(tmp_path):
    path, content = whole_and_gzipped(tmp_path)
    messages = set()
    for at in range(10, len(content), max(1, len(content) // 40)):
        damaged = bytearray(content)
        damaged[at] ^= 0xFF
        path.write_bytes(bytes(damaged))
        with pytest.raises(TraceError, match=r"weka\.jsonl\.gz") as raised:
            load_trace(path)
        messages.add(type(raised.value.__cause__).__name__)
    assert {"error", "BadGzipFile"} & messages  # zlib's own, and its check sum
    path.write_bytes(content[:10] + bytes([0b111]) + content[11:])  # no kind of block
    with pytest.raises(TraceError, match=r"cannot read .*invalid block type"):
        load_trace(path)


def test_a_trace_that_is_no_text(tmp_path):
    for path, opener in ((tmp_path / "t.jsonl", open), (tmp_path / "t.jsonl.gz", gzip.open)):
        with opener(path, "wb") as out:
            out.write(b'{"b": "\xff\xfe"}\n')
        with pytest.raises(TraceError, match=r"cannot read .*utf-8"):
            load_trace(path)


@pytest.mark.parametrize("wrong", [{"s": "x" * 65}, {"o": -1}, {"o": 2**31}])
def test_a_turn_that_cannot_end_so(tmp_path, wrong):
    with pytest.raises(TraceError, match="at most 64 characters"):
        load_trace(weka_file(tmp_path, [row("a", 0.0, [1, 9]) | wrong]))


def test_raw_mooncake_and_sessions(tmp_path):
    path = tmp_path / "m.jsonl"
    rows = [
        {"timestamp": 1000, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]},
        {"timestamp": 2000, "input_length": 2000, "output_length": 5, "hash_ids": [0, 1, 3, 4]},
    ]
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    first, second = load_trace(path).requests
    assert (first.blocks.tolist(), first.time, first.conversation) == ([1, 2], 1.0, second.conversation)


def test_a_system_prompt_does_not_make_one_conversation_of_all(tmp_path):
    path = tmp_path / "m.jsonl"
    rows = [{"timestamp": k, "input_length": 1100, "output_length": 5, "hash_ids": [0, 10 + k]} for k in range(40)]
    rows.append({"timestamp": 50, "input_length": 2000, "output_length": 5, "hash_ids": [0, 17, 90]})
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    names = [request.conversation for request in load_trace(path).requests]
    assert len(set(names)) == 40 and names[40] == names[7]


def test_halves_share_no_conversation(tmp_path):
    rows = [row(f"c{k}", 0.0, [1, 2]) for k in range(5)] + [row("c1/agent", 3.0, [1, 2], parent="c1")]
    trace = load_trace(weka_file(tmp_path, rows))
    even, odd = ({one.conversation for one in trace.half(which).requests} for which in ("even", "odd"))
    assert (even, odd) == ({"c0", "c2", "c4"}, {"c1", "c1/agent", "c3"})
    assert trace.half("all") is trace
    with pytest.raises(TraceError, match="even"):
        trace.half("first")


def best_possible(paths: list[list[int]], capacity: int) -> int:
    """Try every set of blocks to keep after every request (prefix-closed on the tree)."""
    states = {frozenset(): 0}
    for path in paths:
        following: dict[frozenset, int] = {}
        for cached, hits in states.items():
            same = next((i for i, block in enumerate(path) if block not in cached), len(path))
            have = cached | set(path)
            spare = sorted(have - set(path))
            keep = capacity - len(path)
            for count in range(min(keep, len(spare)) + 1):
                for others in itertools.combinations(spare, count):
                    state = frozenset(path) | set(others)
                    following[state] = max(following.get(state, -1), hits + same)
        states = following
    return max(states.values())


def test_belady_is_the_optimum():
    rng = np.random.default_rng(7)
    for _ in range(30):
        tree = {1: 0, 2: 1, 3: 2, 4: 1, 5: 0, 6: 5, 7: 5, 8: 7}

        def path(block: int, tree: dict[int, int] = tree) -> list[int]:
            return [] if block == 0 else [*path(tree[block]), block]

        paths = [path(int(rng.integers(1, 9))) for _ in range(9)]
        capacity = 4
        found = belady_hits([np.array(one, dtype=np.int64) for one in paths], capacity)
        assert found == best_possible(paths, capacity)
        assert found <= infinite_hits([np.array(one, dtype=np.int64) for one in paths])


def test_tokens_of_blocks():
    ids = np.array([1, 2, 1, 300_000_000], dtype=np.int64)
    tokens = block_tokens(ids, 8).reshape(4, 8)
    assert (tokens[0] == tokens[2]).all() and tokens.min() >= 0
    assert len({int(first) for first in tokens[:, 0]}) == 3


@pytest.mark.parametrize("life_cycles", ["full", "swa", "ssm"])
@pytest.mark.parametrize("eviction", list(EvictionPolicyName))
def test_small_replay(tmp_path, life_cycles, eviction):
    rows = [row(f"c{k}", 10.0 * n, [1, 3 + n]) for k in range(4) for n in range(5)]
    trace = load_trace(weka_file(tmp_path, rows))
    result = replay(
        scheduled(trace, lanes=2),
        ReplayOptions(1_000_000, 64, ReusePolicy.PER_CONVERSATION, 5, eviction, life_cycles),
    )
    assert (result.requests, result.blocks) == (20, 4 * 25)
    assert result.hit_rate == result.infinite_hit_rate == result.belady_hit_rate == pytest.approx(4 * 18 / 100)
    assert result.resident_blocks == 4 * 7
    assert result.resident_states == (0 if life_cycles == "full" else 20)  # five turns a conversation, all retained


def test_a_request_larger_than_the_cache_is_counted_as_skipped(tmp_path):
    trace = load_trace(weka_file(tmp_path, [row("a", 0.0, [1, 9]), row("a", 1.0, [1, 2])]))
    result = replay(scheduled(trace), ReplayOptions(256, 64))
    assert (result.skipped, result.blocks, result.infinite_hit_rate) == (1, 2, 0.0)  # it is in no rate


@pytest.mark.parametrize("name", ["mooncake_conversation", "mooncake_synthetic"])
def test_infinite_rates_and_conversations_of_the_mooncake_traces(name):
    path = TRACES / f"{name}.jsonl.gz"
    if not path.exists():
        pytest.skip(f"{path} is not there")
    trace = load_trace(path)
    conversations = {"mooncake_conversation": 7401, "mooncake_synthetic": 2232}[name]
    assert len({request.conversation for request in trace.requests}) == conversations
    paths = [request.blocks for _, request in scheduled(trace)]
    expected = {"mooncake_conversation": 0.3819, "mooncake_synthetic": 0.6594}[name]
    assert infinite_hits(paths) / sum(map(len, paths)) == pytest.approx(expected, abs=5e-4)


@pytest.mark.parametrize("life_cycles", ["swa", "ssm"])
@pytest.mark.parametrize("policy", list(ReusePolicy))
def test_pages_and_states_keep_to_one_budget(tmp_path, life_cycles, policy):
    rows = [row(f"c{k}", 10.0 * n, [1, 6 + n]) for k in range(8) for n in range(6)]
    arrivals = scheduled(load_trace(weka_file(tmp_path, rows)), lanes=4)
    options = ReplayOptions(64 * 60, 64, policy, 5, life_cycles=life_cycles)
    manager = make_manager(options, lambda: 0.0)
    budget = make_budget(options, manager)
    peak = 0
    for _, request in arrivals:
        prompt = np.concatenate([block_tokens(request.blocks, 64), np.array([7], dtype=np.int32)])
        serve(manager, request, prompt, 64, budget)
        manager.check_integrity()
        peak = max(peak, budget.used_pages)
    assert 45 < peak <= 60
    evictions = manager.stats().evictions
    assert evictions["capacity"] + evictions["superseded"] + evictions["window"] > 0


def test_old_states_go_before_younger_blocks(tmp_path):
    """Pages and states are given up in one order of last use, whatever the pool."""
    rows = [row("old", 0.0, [1, 8]), row("new", 1.0, [1, 8]), row("more", 2.0, [1, 8])]
    arrivals = scheduled(load_trace(weka_file(tmp_path, rows)), lanes=1)
    options = ReplayOptions(64 * 40, 64, ReusePolicy.PER_REQUEST, life_cycles="ssm")
    manager = make_manager(options, lambda: 0.0)
    budget = make_budget(options, manager)
    for _, request in arrivals:
        prompt = np.concatenate([block_tokens(request.blocks, 64), np.array([7], dtype=np.int32)])
        serve(manager, request, prompt, 64, budget)
    probes = [
        manager.probe_reuse(np.concatenate([block_tokens(one.blocks, 64), np.array([7], dtype=np.int32)])) // 64
        for _, one in arrivals
    ]
    assert probes == [0, 8, 8]


KEYS = {
    "requests", "hit_rate", "infinite_hit_rate", "belady_hit_rate", "evictions", "cpu_ms_per_request",
    "cpu_us_per_block", "bytes_per_cached_block", "resident_blocks", "resident_states", "peers",
}  # fmt: skip


def command(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["replay", *arguments])
    return result.exit_code, result.output


def test_command_on_sessions_with_all_options(tmp_path):
    path = tmp_path / "sessions.jsonl"
    rows = [
        {"session_id": f"s{k}", "timestamp": 1000 * n, "input_length": 1100 + 512 * n, "output_length": 5,
         "hash_ids": [k * 100 + i for i in range(3 + n)]}
        for n in range(4) for k in range(3)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    figures, plot = tmp_path / "f.json", tmp_path / "p.png"
    code, text = command(
        str(path), "--policy", "all_reusable", "--max-num-turns", "3", "--eviction", "turn_aware", "--lanes", "2",
        "--capacity-tokens", "50K", "--block", "256", "--life-cycles", "swa", "--json", str(figures),
    )  # fmt: skip
    assert code == 0, text
    assert set(json.loads(figures.read_text())) == KEYS
    code, text = command(
        str(path), "--eviction", "lru,turn_aware", "--capacity-tokens", "6K,50K", "--json", str(figures),
        "--plot", str(plot),
    )  # fmt: skip
    assert code == 0, text
    runs = json.loads(figures.read_text())["runs"]
    assert [(one["capacity_tokens"], one["eviction"]) for one in runs] == [
        (6000, "lru"), (6000, "turn_aware"), (50_000, "lru"), (50_000, "turn_aware"),
    ]  # fmt: skip
    assert all(set(one) == KEYS | {"capacity_tokens", "policy", "eviction"} for one in runs)
    assert runs[2]["hit_rate"] == runs[2]["infinite_hit_rate"] == runs[2]["belady_hit_rate"] > runs[0]["hit_rate"]
    assert f"{runs[0]['hit_rate']:.4f}" in text and "…" not in text and "capacity" in text
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "none"], "use one of all_reusable"),
        (["--eviction", "fifo"], "use one of lru"),
        (["--capacity-tokens", "-3"], "positive"),
        (["--life-cycles", "mla"], "full, swa, ssm"),
        (["--conversations", "third"], "all, even, odd"),
        (["--block", "100"], "multiple"),
        (["--peer", "nobody"], "use one of vllm, sglang"),
    ],
)
def test_wrong_arguments_say_what_to_write(tmp_path, arguments, message):
    code, text = command(str(weka_file(tmp_path, [row("a", 0.0, [1, 9])])), *arguments)
    assert code == 2 and message in " ".join(text.split())


def test_small_capacities_are_named_by_their_tokens(tmp_path):
    path = str(weka_file(tmp_path, [row("a", 0.0, [1, 9])]))
    code, text = command(path, "--block", "64", "--capacity-tokens", "1,9999,10K,2M")
    assert code == 0, text
    for label in ("1 tokens, lru", "9999 tokens, lru", "0.01 M, lru", "2 M, lru"):
        assert f"\n{label}" in text
    assert "e-0" not in text


def test_a_peer_that_is_not_there_is_said_to_be_so(tmp_path):
    figures = tmp_path / "f.json"
    code, text = command(
        str(weka_file(tmp_path, [row("a", 0.0, [1, 9])])), "--block", "64", "--peer", "vllm",
        "--peer-python", str(tmp_path / "no-python"), "--json", str(figures),
    )  # fmt: skip
    assert code == 0 and "kvferry replay: vllm" in text and json.loads(figures.read_text())["peers"] == {}


def test_too_many_tokens_for_a_peer(tmp_path, monkeypatch):
    monkeypatch.setattr("cluster.replay.command._MOST_PEER_TOKENS", 1000)
    code, text = command(str(weka_file(tmp_path, [row("a", 0.0, [1, 40])])), "--peer", "vllm")
    assert code == 2 and "--limit" in text


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_defaults_reproduce_the_reference_values(tmp_path):
    """One capacity of the table beside the trace, and the share of the gap that the learned order closes."""
    path = TRACES / "weka_agentic.jsonl.gz"
    if not path.exists():
        pytest.skip(f"{path} is not there")
    figures = tmp_path / "f.json"
    code, text = command(str(path), "--eviction", "lru,turn_aware", "--json", str(figures))
    assert code == 0, text
    lru, learned = json.loads(figures.read_text())["runs"]
    assert lru["hit_rate"] == pytest.approx(0.7512, abs=0.005)
    assert lru["belady_hit_rate"] == pytest.approx(0.8595, abs=0.005)
    assert lru["infinite_hit_rate"] == pytest.approx(0.9645, abs=0.005)
    gap = lru["belady_hit_rate"] - lru["hit_rate"]
    assert learned["hit_rate"] - lru["hit_rate"] > 0.30 * gap


@pytest.mark.parametrize("text", ["lru", "turn_aware 0.5%", "10M"])
def test_letters_of_the_plot(text):
    image = np.full((20, text_width(text) + 4, 3), 255, dtype=np.uint8)
    draw_text(image, 2, 2, text)
    inked = [(image[:, 2 + 12 * i : 14 + 12 * i] == 0).any() for i in range(len(text))]
    assert inked == [character != " " for character in text]


def test_plot_is_a_png(tmp_path):
    records = [
        {"capacity_tokens": c, "eviction": "lru", "hit_rate": r, "belady_hit_rate": r + 0.1, "infinite_hit_rate": 0.9}
        for c, r in ((1_000_000, 0.3), (2_000_000, 0.6))
    ]
    write_plot(tmp_path / "p.png", records)
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
