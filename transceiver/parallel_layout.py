"""How a model's KV is shared out over the ranks of one server: tensor, pipeline and attention-data parallel.

Values and pure arithmetic only. Heads and layers are global: rank r of T with H heads owns ``[rH/T, (r+1)H/T)`` when
H >= T and else the one head ``rH//T``; the first ``L mod pp`` stages hold one layer more.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Interval", "ParallelLayout", "RankShare", "head_interval", "layer_interval"]


@dataclass(frozen=True, slots=True, order=True)
class Interval:
    """Global indices ``start`` up to, not including, ``stop``."""

    start: int
    stop: int

    def __len__(self) -> int:
        return max(0, self.stop - self.start)

    def __and__(self, other: Interval) -> Interval:
        start = max(self.start, other.start)
        return Interval(start, max(start, min(self.stop, other.stop)))


def layer_interval(num_layers: int, pp: int, stage: int) -> Interval:
    """Layers of pipeline stage `stage`. Raises ValueError when a stage would be empty."""
    if not 0 <= stage < pp or num_layers < pp:
        raise ValueError(f"cannot put {num_layers} layers on stage {stage} of {pp}")
    size, longer = divmod(num_layers, pp)
    return Interval(stage * size + min(stage, longer), (stage + 1) * size + min(stage + 1, longer))


def head_interval(num_heads: int, ranks: int, rank: int) -> Interval:
    """Heads of `rank` out of `ranks`. Raises ValueError unless one of the two numbers divides the other."""
    if not 0 <= rank < ranks or num_heads < 1:
        raise ValueError(f"rank {rank} of {ranks} cannot hold a share of {num_heads} heads")
    if num_heads % ranks and ranks % num_heads:
        raise ValueError(f"{num_heads} KV heads cannot be shared out over {ranks} ranks: one must divide the other")
    if num_heads >= ranks:
        return Interval(rank * num_heads // ranks, (rank + 1) * num_heads // ranks)
    head = rank * num_heads // ranks
    return Interval(head, head + 1)


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """Sizes of one server. With `attention_dp` every tensor rank is a data-parallel group of its own."""

    tp: int = 1
    pp: int = 1
    attention_dp: bool = False

    def __post_init__(self) -> None:
        if self.tp < 1 or self.pp < 1:
            raise ValueError("tp and pp are at least 1")

    @property
    def ranks_per_dp(self) -> int:
        """Tensor ranks that share one request's heads."""
        return 1 if self.attention_dp else self.tp

    @property
    def dp(self) -> int:
        """Data-parallel groups."""
        return self.tp if self.attention_dp else 1

    @property
    def world(self) -> int:
        """Ranks of the server; rank = stage * tp + tensor rank."""
        return self.tp * self.pp

    def tensor_rank(self, rank: int) -> int:
        return rank % self.tp

    def stage(self, rank: int) -> int:
        return rank // self.tp

    def dp_rank(self, rank: int) -> int:
        return self.tensor_rank(rank) if self.attention_dp else 0

    def rank_in_dp(self, rank: int) -> int:
        return 0 if self.attention_dp else self.tensor_rank(rank)


@dataclass(frozen=True, slots=True)
class RankShare:
    """What one rank holds of a layer group: `heads` of `num_heads`; its layers are in the group's `layers`.

    For a recurrent group the interval is ``[rank, rank + 1)`` of the tensor ranks that share the state, and
    `state_sections` are the sizes, over all ranks, of the sections of one layer's state that are cut one by one.
    """

    num_heads: int
    heads: Interval
    state_sections: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.heads.start < self.heads.stop <= self.num_heads:
            raise ValueError(f"heads {self.heads} are not part of {self.num_heads}")
