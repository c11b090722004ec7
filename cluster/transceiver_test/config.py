"""The configuration of a transceiver test: what is moved, between which layouts, over which transports.

One YAML file, strict like the cluster's. Values only. Read by `run_transceiver_test` and by the Slurm submission.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, Strict, ValidationError, model_validator

from cluster.config.base import StrictModel
from cluster.config.errors import ConfigError, ConfigProblem
from cluster.config.explain import explain
from cluster.config.slurm_config import SlurmConfig
from cluster.config.yaml_source import read_yaml
from kvcache.config import ReusePolicy

__all__ = [
    "Direction",
    "HostTransferConfig",
    "LayoutConfig",
    "LayoutKind",
    "ParallelConfig",
    "RunConfig",
    "SweepConfig",
    "TransceiverTestConfig",
    "TurnConfig",
    "load_test_config",
]

_Ints = Annotated[tuple[Annotated[int, Field(ge=1)], ...], Strict(False)]


class LayoutKind(StrEnum):
    """Which life cycles a layout has."""

    FULL = "full"
    MLA = "mla"
    SLIDING = "sliding"
    HYBRID = "hybrid"


class Direction(StrEnum):
    """Which side holds and which pulls."""

    CTX_TO_GEN = "ctx_to_gen"
    GEN_TO_CTX = "gen_to_ctx"


class ParallelConfig(StrictModel):
    """Ranks of one side."""

    tp: int = Field(default=1, ge=1, description="Ranks that share each layer's heads.")
    pp: int = Field(default=1, ge=1, description="Ranks that share the layers.")
    attention_dp: bool = Field(default=False, description="Every tensor rank serves requests of its own.")


class LayoutConfig(StrictModel):
    """A model's KV geometry and how each side shares it out."""

    name: str = Field(pattern=r"^[a-z0-9_-]+$", description="Part of the cells' names.")
    kind: Annotated[LayoutKind, Strict(False)] = Field(default=LayoutKind.FULL, description="Life cycles.")
    num_layers: int = Field(default=4, ge=1, description="Layers, all kinds together.")
    num_kv_heads: int = Field(default=4, ge=1, description="KV heads of an attention layer (an MLA latent has 1).")
    head_dim: int = Field(default=64, ge=8, multiple_of=8, description="Elements of a head (of the latent for MLA).")
    dtype: Literal["float32", "float16", "bfloat16", "float8_e4m3fn"] = Field(default="float16", description="Element.")
    tokens_per_block: int = Field(default=32, ge=1, description="Tokens of a block.")
    window: int = Field(default=256, ge=1, description="Tokens of a sliding window.")
    state_bytes_per_layer: int = Field(default=65536, ge=8, multiple_of=8, description="A recurrent layer's state.")
    context: ParallelConfig = Field(default_factory=ParallelConfig, description="The context side's ranks.")
    generation: ParallelConfig = Field(default_factory=ParallelConfig, description="The generation side's ranks.")

    @model_validator(mode="after")
    def _shareable(self) -> LayoutConfig:
        heads = 1 if self.kind is LayoutKind.MLA else self.num_kv_heads
        for side in (self.context, self.generation):
            if side.pp > self.num_layers:
                raise ValueError(f"{self.num_layers} layers cannot be shared out over {side.pp} stages")
            ranks = 1 if side.attention_dp else side.tp
            if heads % ranks and ranks % heads:
                raise ValueError(f"{heads} KV heads cannot be shared out over {ranks} ranks")
            if self.kind in (LayoutKind.SLIDING, LayoutKind.HYBRID) and (side.tp, side.pp) != (1, 1):
                raise ValueError(f"a {self.kind} layout is tested with tp 1 and pp 1")
        return self


class SweepConfig(StrictModel):
    """One set of transport variables; every sweep has processes of its own."""

    name: str = Field(pattern=r"^[A-Za-z0-9_,.-]+$", description="Part of the cells' names.")
    env: dict[str, str] = Field(default_factory=dict, description="UCX_* variables of the sweep's processes.")
    expect_transport: str | None = Field(
        default=None, description="Fail the sweep's cells when another transport was really used, such as ucx/tcp."
    )


class TurnConfig(StrictModel):
    """Turn cells: a conversation with a rewind through the real cache managers, counting what moves."""

    enabled: bool = Field(default=True, description="Run them.")
    turns: int = Field(default=5, ge=2, le=50, description="Turns before the rewind.")
    rewind_to: int = Field(default=2, ge=1, description="The turn after whose end the conversation branches.")
    first_tokens: int = Field(default=300, ge=2, description="Tokens of the first prompt.")
    turn_tokens: int = Field(default=50, ge=1, description="New tokens of every later prompt.")
    answer_tokens: int = Field(default=40, ge=2, description="Tokens of an answer.")

    @model_validator(mode="after")
    def _rewinds_back(self) -> TurnConfig:
        if self.rewind_to >= self.turns:
            raise ValueError(f"rewind_to must be before turn {self.turns}, not {self.rewind_to}")
        return self


class RunConfig(StrictModel):
    """Deadlines."""

    timeout_per_cell_s: float = Field(default=60.0, gt=5.0, description="Seconds for one cell.")
    max_sweep_s: float = Field(default=600.0, gt=5.0, description="Seconds for one sweep.")
    start_timeout_s: float = Field(default=60.0, gt=0, description="Seconds until a sweep's processes have reported.")

    @model_validator(mode="after")
    def _ordered(self) -> RunConfig:
        if self.max_sweep_s <= self.timeout_per_cell_s:
            raise ValueError("max_sweep_s must be above timeout_per_cell_s")
        return self


class HostTransferConfig(StrictModel):
    """The raw fabric between the same two processes, without blocks: a TCP socket and one large read."""

    bytes_per_transfer: int = Field(default=16 << 20, ge=4096, description="Bytes of one transfer.")
    samples: int = Field(default=8, ge=1, description="Timed transfers.")
    warmup: int = Field(default=2, ge=0, description="Transfers before.")


class TransceiverTestConfig(StrictModel):
    """A whole test."""

    request_lengths: _Ints = Field(default=(100, 1000, 8000), min_length=1, max_length=100, description="Tokens.")
    requests_per_length: int = Field(default=4, ge=1, le=9000, description="Timed requests of a cell.")
    warmup_requests: int = Field(default=1, ge=0, le=999, description="Requests of a cell before the timed ones.")
    backends: Annotated[tuple[Literal["ucx", "inproc"], ...], Strict(False)] = Field(
        default=("ucx",), min_length=1, description="`inproc` needs no processes and ignores the sweeps' variables."
    )
    directions: Annotated[tuple[Annotated[Direction, Strict(False)], ...], Strict(False)] = Field(
        default=(Direction.CTX_TO_GEN, Direction.GEN_TO_CTX), min_length=1, description="Who pulls from whom."
    )
    layouts: Annotated[tuple[LayoutConfig, ...], Strict(False)] = Field(
        default_factory=lambda: _default_layouts(), min_length=1, description="Geometries."
    )
    policies: Annotated[tuple[Annotated[ReusePolicy, Strict(False)], ...], Strict(False)] = Field(
        default=tuple(ReusePolicy), min_length=1, description="Reuse policies of the turn cells."
    )
    max_num_turns: _Ints = Field(default=(1, 5), min_length=1, description="Retained turns, for per_conversation.")
    turn_cells: TurnConfig = Field(default_factory=TurnConfig, description="Conversations through the managers.")
    ucx_env_sweep: Annotated[tuple[SweepConfig, ...], Strict(False)] = Field(
        default=(
            SweepConfig(name="tcp", env={"UCX_TLS": "tcp"}, expect_transport="ucx/tcp"),
            SweepConfig(name="default", env={"UCX_TLS": "tcp,cma"}),
        ),
        min_length=1,
        description="Transport variables, one set after the other.",
    )
    verify_digests: bool = Field(default=True, description="The transceiver's own check, beside the test's.")
    host_transfer: HostTransferConfig = Field(default_factory=HostTransferConfig, description="For --host-transfer.")
    run: RunConfig = Field(default_factory=RunConfig, description="Deadlines.")
    slurm: SlurmConfig | None = Field(default=None, description="How `--submit` runs the test over nodes.")

    @model_validator(mode="after")
    def _names_are_unique(self) -> TransceiverTestConfig:
        for what, names in (
            ("layouts", [layout.name for layout in self.layouts]),
            ("ucx_env_sweep", [sweep.name for sweep in self.ucx_env_sweep]),
        ):
            if len(set(names)) != len(names):
                raise ValueError(f"{what}: every name once, not {', '.join(names)}")
        return self


def _default_layouts() -> tuple[LayoutConfig, ...]:
    one, two, four = ParallelConfig(), ParallelConfig(tp=2), ParallelConfig(tp=4)
    stages, dp = ParallelConfig(pp=2), ParallelConfig(tp=2, attention_dp=True)
    return (
        LayoutConfig(name="full"),
        LayoutConfig(name="tp2-tp2", context=two, generation=two),
        LayoutConfig(name="tp2-tp1", context=two, generation=one),
        LayoutConfig(name="tp1-tp4", num_kv_heads=2, context=one, generation=four),
        LayoutConfig(name="pp2-pp1", context=stages, generation=one),
        LayoutConfig(name="pp1-tp2", context=one, generation=two),
        LayoutConfig(name="dp2-tp2", context=dp, generation=two),
        LayoutConfig(name="mla", kind=LayoutKind.MLA, head_dim=576),
        LayoutConfig(name="mla-tp2-tp1", kind=LayoutKind.MLA, head_dim=576, context=two, generation=one),
        LayoutConfig(name="sliding", kind=LayoutKind.SLIDING),
        LayoutConfig(name="hybrid", kind=LayoutKind.HYBRID),
    )


def load_test_config(path: Path | None) -> TransceiverTestConfig:
    """Read a file (None: the defaults). Raises ConfigError with every problem."""
    if path is None:
        return TransceiverTestConfig()
    file = read_yaml(path)
    problems: list[ConfigProblem] = list(file.problems)
    try:
        config = TransceiverTestConfig.model_validate(file.values)
    except ValidationError as error:
        problems += explain(error, TransceiverTestConfig, (), file.where)
        raise ConfigError(problems) from None
    if problems:
        raise ConfigError(problems)
    return config
