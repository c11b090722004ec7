"""One Slurm job that starts Ray on three nodes of different addresses and serves a conversation with a rewind."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cluster.config import load_config
from cluster.local_cluster import local_cluster
from cluster.request import SamplingParams
from cluster.serve_request import ServeRequest
from tests.slurm.jobs import Job, submit, write_config
from tests.slurm.virtual_slurm import VirtualSlurm

pytestmark = [pytest.mark.slurm, pytest.mark.ray, pytest.mark.ucx, pytest.mark.slow, pytest.mark.timeout(420)]

ANSWER_TOKENS = 24


@pytest.fixture(scope="module")
def served(slurm: VirtualSlurm, slurm_root: Path) -> tuple[Job, dict[str, Any]]:
    """The finished job and the figures that its client wrote."""
    if not slurm.machines.separate_addresses:
        pytest.skip("needs root and network namespaces: Ray needs an address of its own on every node")
    folder = slurm_root / "served"
    folder.mkdir()
    figures, config = folder / "figures.json", folder / "served.yaml"
    client = ["python", "examples/slurm/converse.py", "--json", str(figures), "--config", str(config)]
    section = {
        "nodes": 3,
        "time": "7",
        "ray": {"cpus_per_node": 2, "object_store_mb": 80, "start_timeout_s": 75.0},
        "context_env": {"KVFERRY_TEST_ROLE": "context"},
        "clients": [[*client, "--max-tokens", str(ANSWER_TOKENS)]],
        "ready_timeout_s": 180.0,
    }
    write_config(
        folder,
        "served",
        section,
        engine={"max_seq_len": 4096},
        kv_cache_config={"max_tokens": 32768, "block_reuse_config": {"policy": "per_conversation", "max_num_turns": 5}},
        cache_transceiver_config={"kv_backflow": "eager"},
        context_servers={"num_instances": 2},
    )
    job = submit(slurm, config, "--no-preflight")
    info = slurm.wait_job(job.job_id, ["COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"], 400)
    assert (info.state, info.exit_code) == ("COMPLETED", 0), f"{job.failures()}\n{job.log('nodes')}\n{job.log('serve')}"
    return job, json.loads(figures.read_text())


def test_every_role_is_on_the_node_that_the_allocation_names(served: tuple[Job, dict[str, Any]]) -> None:
    job, _ = served
    ranks = json.loads((job.folder / "allocation.json").read_text())["ranks"]
    assert [rank["section"] for rank in ranks] == ["generation_servers", "context_servers", "context_servers"]
    assert len({rank["host"] for rank in ranks}) == 3
    assert job.log("nodes").count("alive after") == 3


def test_the_conversation_moved_over_tcp_between_nodes(served: tuple[Job, dict[str, Any]]) -> None:
    _, figures = served
    assert figures["transport"] == "ucx/tcp"
    assert figures["failures"] == []
    first, *later = figures["turns"]
    assert first["ctx_to_gen_blocks"] > 1
    assert all(turn["ctx_reused_tokens"] > 0 and turn["gen_reused_tokens"] > 0 for turn in later)
    rewind = figures["turns"][-1]
    assert (rewind["turn"], rewind["parent_turn"]) == (6, 2)


def test_every_token_equals_an_aggregated_run_without_reuse(served: tuple[Job, dict[str, Any]]) -> None:
    _, figures = served
    sets = ["model=hash", "kv_cache_config.enable_block_reuse=false", "cache_transceiver_config.backend=inproc"]
    config = load_config(sets=sets)

    async def answer(number: int, prompt: list[int]) -> list[int]:
        request = ServeRequest(
            f"plain-{number}", np.array(prompt, np.int32), SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0.0)
        )
        return [token for batch in [tokens async for tokens in await cluster.serve(request)] for token in batch]

    async def all_answers() -> list[list[int]]:
        nonlocal cluster
        async with local_cluster(config, aggregated=True) as cluster:
            return [await answer(turn["turn"], turn["prompt_token_ids"]) for turn in figures["turns"]]

    cluster: Any = None
    assert asyncio.run(all_answers()) == [turn["token_ids"] for turn in figures["turns"]]


def test_nothing_of_the_job_is_left_on_its_nodes(
    served: tuple[Job, dict[str, Any]], separate_nodes: VirtualSlurm
) -> None:
    job, _ = served
    assert job.failures() == []
    for name in job.state()["nodes"]:
        processes = separate_nodes.run(["ps", "-e", "-o", "comm"], on_node=name).stdout.split()
        assert set(processes) <= {"COMMAND", "bash", "slurmd", "ps"}
        assert separate_nodes.run(["ls", "/dev/shm"], on_node=name).stdout.split() == []
