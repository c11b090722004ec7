"""Which rank of which worker runs on which node and GPU of a job.

Pure: made from the configuration before anything is submitted. Generation workers come first, then context workers,
along one cursor over (node, slot). The runner turns node numbers into host names.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from cluster.config import ClusterConfig, ConfigProblem
from cluster.config.slurm_config import SlurmConfig

__all__ = ["CONTEXT_RESOURCE", "GENERATION_RESOURCE", "Allocation", "RankPlacement", "allocate"]

CONTEXT_RESOURCE = "kvferry_context"
GENERATION_RESOURCE = "kvferry_generation"
_SECTIONS = (("generation_servers", GENERATION_RESOURCE), ("context_servers", CONTEXT_RESOURCE))


@dataclass(frozen=True, slots=True)
class RankPlacement:
    """One rank: `node` counts the job's nodes from 0, `slot` the GPUs (or CPU slots) of a node from 0."""

    section: str
    instance: int
    rank: int
    node: int
    slot: int


@dataclass(frozen=True, slots=True)
class Allocation:
    """All ranks of a cluster on `num_nodes` nodes of `slots_per_node` slots."""

    num_nodes: int
    slots_per_node: int
    placements: tuple[RankPlacement, ...]

    def resources(self, node: int) -> dict[str, int]:
        """Ray resources that a node offers: one unit for each rank placed there, by role."""
        names = dict(_SECTIONS)
        return dict(Counter(names[placement.section] for placement in self.placements if placement.node == node))

    def to_dict(self, hosts: tuple[str, ...] = ()) -> dict[str, Any]:
        """Plain values for allocation.json; node names are `<nodeK>` until the job knows its hosts."""
        rows = []
        for placement in self.placements:
            host = hosts[placement.node] if hosts else f"<node{placement.node}>"
            rows.append({**asdict(placement), "host": host})
        return {"num_nodes": self.num_nodes, "slots_per_node": self.slots_per_node, "ranks": rows}


def allocate(config: ClusterConfig, slurm: SlurmConfig) -> tuple[Allocation, list[ConfigProblem]]:
    """Place every rank; with problems, the allocation is as good as it gets and must not be used."""
    slots = slurm.slots_per_node
    slot_key = "slurm.gpus_per_node" if slurm.gpus_per_node else "slurm.ranks_per_node"
    problems: list[ConfigProblem] = []
    placements: list[RankPlacement] = []
    cursor = 0
    for section, _ in _SECTIONS:
        servers = getattr(config, section)
        world = servers.tensor_parallel_size * servers.pipeline_parallel_size
        if world > slots and world % slots:
            problems.append(
                ConfigProblem(
                    section,
                    f"tensor_parallel_size x pipeline_parallel_size = {world} ranks do not fill whole nodes of {slots}",
                    f"make the product a multiple of {slot_key} ({slots}), or at most {slots}",
                )
            )
        for instance in range(servers.num_instances):
            used = cursor % slots
            if used and used + world > slots:
                cursor += slots - used  # a worker that fits one node is not split over two
            for rank in range(world):
                placements.append(RankPlacement(section, instance, rank, cursor // slots, cursor % slots))
                cursor += 1
    needed = -(-cursor // slots)
    if slurm.nodes is not None and slurm.nodes < needed:
        ranks = len(placements)
        problems.append(
            ConfigProblem(
                "slurm.nodes",
                f"{ranks} ranks need {needed} nodes of {slots} ({slot_key}), the job asks for {slurm.nodes}",
                f"write {needed} or more, leave it out, or start fewer workers",
            )
        )
    return Allocation(max(needed, slurm.nodes or 0), slots, tuple(placements)), problems
