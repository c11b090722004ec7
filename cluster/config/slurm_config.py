"""The section `slurm`: how a cluster is started as a Slurm job.

Read by `cluster.launch` alone; absent for clusters that are started otherwise. Values only: what can be checked
against a real Slurm is checked there.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, Strict, model_validator

from cluster.config.base import StrictModel

__all__ = ["SlurmConfig", "SlurmRayConfig"]

_Texts = Annotated[tuple[str, ...], Strict(False)]


class SlurmRayConfig(StrictModel):
    """How Ray is brought up on the job's nodes."""

    enabled: bool = Field(default=True, description="`false`: start no Ray; `slurm.command` runs alone.")
    port: int = Field(default=6379, ge=1024, le=65535, description="Port of Ray's head on the job's first node.")
    start_attempts: int = Field(default=3, ge=1, le=10, description="How often `ray start` is tried on a node.")
    start_timeout_s: float = Field(
        default=60.0, gt=0, description="Seconds until a node must be a live member, for each attempt."
    )
    cpus_per_node: int | None = Field(default=None, ge=1, description="CPUs told to Ray; `null`: what Ray finds.")
    object_store_mb: int | None = Field(
        default=None, ge=75, description="Object store of a node in MB; `null`: Ray's own choice."
    )
    dashboard: bool = Field(
        default=False, description="Run the dashboard (needed for `kvferry ray submit` to this cluster)."
    )
    dashboard_port: int = Field(default=8265, ge=1024, le=65535, description="Port of the dashboard.")
    agent_port: int = Field(default=52365, ge=1024, le=65535, description="Port of Ray's agent on every node.")


class SlurmConfig(StrictModel):
    """A Slurm job that serves this cluster."""

    partition: str = Field(min_length=1, description="Partition of the job.")
    account: str | None = Field(default=None, min_length=1, description="Account that pays; `null`: the default one.")
    time: str = Field(
        default="01:00:00",
        pattern=r"^(\d+|\d+:\d{1,2}|\d+:\d{1,2}:\d{1,2}|\d+-\d{1,2}(:\d{1,2}){0,2})$",
        description="Time limit as sbatch reads it: minutes, M:S, H:M:S, D-H, D-H:M or D-H:M:S.",
    )
    job_name: str = Field(default="kvferry", pattern=r"^[A-Za-z0-9._-]+$", description="Name of the job.")
    nodes: int | None = Field(default=None, ge=1, description="Nodes of the job; `null`: as many as the ranks need.")
    gpus_per_node: int = Field(default=0, ge=0, description="GPUs of a node that ranks may use; 0: a CPU cluster.")
    ranks_per_node: int = Field(
        default=1, ge=1, description="Ranks a node takes when `gpus_per_node` is 0; with GPUs a rank takes one GPU."
    )
    nodelist: str | None = Field(default=None, min_length=1, description="Only these nodes, as sbatch's `--nodelist`.")
    venv: str | None = Field(
        default=None, min_length=1, description="Virtual environment that every node sees; `null`: the submitter's."
    )
    container_image: str | None = Field(
        default=None, min_length=1, description="Container image (`srun --container-image`, pyxis) instead of a venv."
    )
    container_mounts: _Texts = Field(default=(), description="`srun --container-mounts`, one each.")
    work_dir: str = Field(default=".", min_length=1, description="Folder that every node sees; the job runs in it.")
    log_dir: str = Field(
        default="logs", min_length=1, description="Folder of the jobs' folders, seen by every node; below `work_dir`."
    )
    extra_args: _Texts = Field(default=(), description="More arguments of sbatch, such as --exclusive.")
    srun_args: _Texts = Field(default=(), description="More arguments of the job's srun.")
    env: dict[str, str] = Field(default_factory=dict, description="Environment of everything in the job.")
    context_env: dict[str, str] = Field(default_factory=dict, description="More environment of context workers.")
    generation_env: dict[str, str] = Field(default_factory=dict, description="More environment of generation workers.")
    server_env: dict[str, str] = Field(
        default_factory=dict, description="More environment of the HTTP front's process."
    )
    ray: SlurmRayConfig = Field(default_factory=SlurmRayConfig, description="How Ray is brought up on the nodes.")
    command: _Texts = Field(
        default=(), description="Run this on the first node instead of `kvferry serve`; its code is the job's."
    )
    clients: Annotated[tuple[_Texts, ...], Strict(False)] = Field(
        default=(),
        description=(
            "Commands run in turn on the first node once the server is ready (`KVFERRY_URL` tells where); then the job "
            "ends with the first code that is not 0. None: serve until the job is ended."
        ),
    )
    join_timeout_s: float = Field(default=120.0, gt=0, description="Seconds until every node must have reported.")
    ready_timeout_s: float = Field(default=600.0, gt=0, description="Seconds until the server must be ready.")
    drain_s: float = Field(
        default=20.0, ge=0, description="Seconds for requests in progress when the job is told to end; below KillWait."
    )
    signal_before_end_s: int = Field(
        default=60, ge=0, description="Begin to drain this many seconds before the time limit; 0: only at the limit."
    )
    max_requeues: int = Field(
        default=0, ge=0, le=100, description="How often the job is queued again after the loss of a node."
    )

    @model_validator(mode="after")
    def _consistent(self) -> SlurmConfig:
        if self.venv is not None and self.container_image is not None:
            raise ValueError("venv and container_image exclude each other: keep one of them")
        if not self.ray.enabled and not self.command:
            raise ValueError("ray.enabled: false leaves nothing to run: give a command, or let Ray start")
        return self

    @property
    def slots_per_node(self) -> int:
        """Ranks that a node can take."""
        return self.gpus_per_node or self.ranks_per_node
