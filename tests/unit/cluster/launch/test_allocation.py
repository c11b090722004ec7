"""Ranks on nodes: the order, nodes that are not split, whole nodes for big workers, and what cannot be placed."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from cluster.config import ClusterConfig
from cluster.config.slurm_config import SlurmConfig
from cluster.launch import allocate, job_addresses


def place(slurm: dict[str, Any], **servers: dict[str, Any]) -> Any:
    config = ClusterConfig(model="hash", slurm=SlurmConfig(partition="p", **slurm), **servers)  # type: ignore[arg-type]
    assert config.slurm is not None
    return allocate(config, config.slurm)


def rows(allocation: Any) -> list[tuple[str, int, int, int, int]]:
    return [(p.section[:3], p.instance, p.rank, p.node, p.slot) for p in allocation.placements]


def test_generation_first_then_context_along_one_cursor() -> None:
    allocation, problems = place(
        {"gpus_per_node": 4}, generation_servers={"num_instances": 3}, context_servers={"num_instances": 3}
    )
    assert problems == []
    assert rows(allocation) == [
        ("gen", 0, 0, 0, 0),
        ("gen", 1, 0, 0, 1),
        ("gen", 2, 0, 0, 2),
        ("con", 0, 0, 0, 3),
        ("con", 1, 0, 1, 0),
        ("con", 2, 0, 1, 1),
    ]
    assert allocation.resources(0) == {"kvferry_generation": 3, "kvferry_context": 1}
    assert allocation.resources(1) == {"kvferry_context": 2}


def test_a_worker_that_fits_a_node_is_not_split() -> None:
    allocation, problems = place(
        {"gpus_per_node": 4},
        generation_servers={"tensor_parallel_size": 3},
        context_servers={"tensor_parallel_size": 2},
    )
    assert problems == []
    assert {p.node for p in allocation.placements if p.section == "context_servers"} == {1}


def test_big_workers_take_whole_nodes_or_are_refused() -> None:
    allocation, problems = place({"gpus_per_node": 4}, generation_servers={"tensor_parallel_size": 8})
    assert (allocation.num_nodes, problems) == (3, [])
    _, problems = place({"gpus_per_node": 4}, generation_servers={"tensor_parallel_size": 6})
    assert "do not fill whole nodes of 4" in problems[0].message


def test_more_ranks_than_the_nodes_have() -> None:
    _, problems = place({"gpus_per_node": 1, "nodes": 2}, context_servers={"num_instances": 2})
    [problem] = problems
    assert problem.path == "slurm.nodes"
    assert "3 ranks need 3 nodes of 1" in problem.message


def test_hosts_take_the_place_of_node_numbers() -> None:
    allocation, _ = place({"ranks_per_node": 1, "nodes": 3})
    assert [row["host"] for row in allocation.to_dict()["ranks"]] == ["<node0>", "<node1>"]
    assert [row["host"] for row in allocation.to_dict(("a", "b", "c"))["ranks"]] == ["a", "b"]


@given(st.integers(1, 8), st.integers(1, 5), st.integers(1, 5), st.integers(1, 4), st.integers(1, 4), st.integers(1, 2))
def test_no_slot_is_given_twice(slots: int, generation: int, context: int, tp: int, ctx_tp: int, pp: int) -> None:
    allocation, problems = place(
        {"gpus_per_node": slots},
        generation_servers={"num_instances": generation, "tensor_parallel_size": tp},
        context_servers={"num_instances": context, "tensor_parallel_size": ctx_tp, "pipeline_parallel_size": pp},
    )
    places = [(p.node, p.slot) for p in allocation.placements]
    assert len(set(places)) == len(places) == generation * tp + context * ctx_tp * pp
    assert all(0 <= slot < slots and node < allocation.num_nodes for node, slot in places)
    if not problems:
        for section, world in (("generation_servers", tp), ("context_servers", ctx_tp * pp)):
            nodes: dict[int, set[int]] = {}
            for p in allocation.placements:
                if p.section == section:
                    nodes.setdefault(p.instance, set()).add(p.node)
            assert all(len(used) == 1 for used in nodes.values()) or world > slots


def test_addresses_come_from_slurm_and_else_from_the_name() -> None:
    told = {"KVFERRY_JOB_ADDRESSES": "n1=10.0.0.1 n2=10.0.0.2 "}
    assert job_addresses(["n1", "n2", "n3"], told) == {"n1": "10.0.0.1", "n2": "10.0.0.2", "n3": "n3"}
