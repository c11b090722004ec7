"""Everything that can be known to be wrong before a job is submitted, all at once.

Called by `submit_job`. Looks at the configuration, this machine and what Slurm answers; changes nothing but for one
short srun on idle nodes where there are enough of them.
"""

from __future__ import annotations

import os
import re
import shlex
import socket
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from cluster.config import ClusterConfig, ConfigProblem
from cluster.config.slurm_config import SlurmConfig
from cluster.launch.allocation import Allocation
from cluster.launch.errors import SlurmCommandError
from cluster.launch.sbatch_script import job_python
from cluster.launch.slurm_client import Partition, SlurmClient

__all__ = [
    "check_before_submit",
    "check_on_nodes",
    "folder_problems",
    "log_dir_of",
    "no_partition",
    "placeholder_problems",
    "slurm_problems",
]

_NOT_IN_LOGS = re.compile(r"[%\\\x00-\x1f]")  # patterns and line ends to sbatch --output; spaces and quotes are fine
_PLACEHOLDER = re.compile(r"<[A-Za-z_][^<>]*>")


def log_dir_of(slurm: SlurmConfig) -> Path:
    """Absolute path of the folder of the jobs' folders."""
    return (Path(slurm.work_dir) / slurm.log_dir).resolve()


def check_before_submit(
    config: ClusterConfig, slurm: SlurmConfig, allocation: Allocation, client: SlurmClient
) -> tuple[list[ConfigProblem], Partition | None]:
    """Problems of the configuration on this machine and in this Slurm, and the partition if it exists."""
    problems = list(placeholder_problems(config.model_dump(mode="json", exclude_none=True)))
    problems += folder_problems(slurm)
    problems += _ports(config, slurm)
    partitions, found = slurm_problems(client)
    problems += found
    partition = partitions.get(slurm.partition) if partitions is not None else None
    if partitions is not None:
        problems += _partition(slurm, allocation, partition, sorted(partitions))
    return problems, partition


def slurm_problems(client: SlurmClient) -> tuple[dict[str, Partition] | None, list[ConfigProblem]]:
    """The partitions by name, or None with the reason why this Slurm cannot be asked."""
    if missing := client.missing_commands():
        cause = f"commands of Slurm are missing: {', '.join(missing)}"
        return None, [ConfigProblem("slurm", cause, "submit from a login node of the cluster")]
    try:
        return client.partitions(), []
    except SlurmCommandError as error:
        return None, [ConfigProblem("slurm", str(error), "check that Slurm answers: sinfo")]


def no_partition(name: str, known: Iterable[str]) -> ConfigProblem:
    """The problem of a partition that this Slurm does not have."""
    remedy = f"write one of: {', '.join(sorted(known))}"
    return ConfigProblem("slurm.partition", f"there is no partition {name!r}", remedy)


def check_on_nodes(
    config: ClusterConfig, slurm: SlurmConfig, allocation: Allocation, client: SlurmClient
) -> list[ConfigProblem]:
    """Look for the venv and the ports on nodes that are idle now. Raises SlurmCommandError when srun gets no nodes."""
    ports = _used_ports(config, slurm)
    script = ['n="$SLURMD_NODENAME"']
    if slurm.container_image is None:
        script.append(f'[ -x {shlex.quote(job_python(slurm))} ] || echo "kvferry-venv $n"')
    script += [f'(exec 3<>/dev/tcp/127.0.0.1/{port}) 2>/dev/null && echo "kvferry-port $n {port}"' for port in ports]
    args = [f"--partition={slurm.partition}", f"--nodes={allocation.num_nodes}", "--ntasks-per-node=1"]
    args += ["--immediate=10", "--time=1", "--job-name=kvferry-preflight", "--cpu-bind=none"]
    args += [f"--account={slurm.account}"] if slurm.account else []
    args += [f"--nodelist={slurm.nodelist}"] if slurm.nodelist else []
    out = client.run_on_nodes(args, "\n".join([*script, "true"]), timeout_s=60.0)
    problems = []
    for words in sorted(line.split() for line in out.splitlines() if line.startswith("kvferry-")):
        if words[0] == "kvferry-venv":
            remedy = "set slurm.venv to an environment on a file system that every node sees"
            problems.append(ConfigProblem("slurm.venv", f"{words[1]} has no {job_python(slurm)}", remedy))
        else:
            key = ports[int(words[2])]
            problems.append(ConfigProblem(key, f"port {words[2]} is taken on {words[1]}", "choose another one"))
    return problems


def placeholder_problems(value: Any, path: str = "") -> Iterator[ConfigProblem]:
    """Every `<word>` that is left in a tree of plain values."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from placeholder_problems(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from placeholder_problems(item, f"{path}.{index}")
    elif isinstance(value, str) and (found := _PLACEHOLDER.search(value)):
        yield ConfigProblem(path, f"the placeholder {found.group()} is still there", "write the value of your cluster")


def folder_problems(slurm: SlurmConfig) -> Iterator[ConfigProblem]:
    """What is wrong with `work_dir`, `log_dir` and `venv` on this machine."""
    work_is_there = True
    for problem in _work_dir(Path(slurm.work_dir)):
        work_is_there = False
        yield problem
    if work_is_there or Path(slurm.log_dir).is_absolute():
        yield from _log_dir(log_dir_of(slurm))
    if slurm.container_image is None and not os.access(job_python(slurm), os.X_OK):
        remedy = "make it (python -m venv, pip install kvferry) where every node sees it, or set slurm.container_image"
        yield ConfigProblem("slurm.venv", f"there is no {job_python(slurm)} here", remedy)


def _work_dir(work: Path) -> Iterator[ConfigProblem]:
    try:
        if work.is_dir():
            return
    except OSError as error:  # a folder above it that this user may not search
        why = error.strerror or str(error)
        yield ConfigProblem("slurm.work_dir", f"{work} cannot be searched: {why}", "choose a folder that you may enter")
        return
    yield ConfigProblem("slurm.work_dir", f"{work} is not a folder", "make it, on a file system that every node sees")


def _log_dir(log_dir: Path) -> Iterator[ConfigProblem]:
    if found := _NOT_IN_LOGS.search(str(log_dir)):
        cause = f"sbatch cannot write logs to {str(log_dir)!r}: it reads the character {found.group()!r} as its own"
        yield ConfigProblem(
            "slurm.log_dir", cause, "choose a folder without it (work_dir counts when log_dir is relative)"
        )
    try:
        existing = next(path for path in (log_dir, *log_dir.parents) if path.exists())
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        why = error.strerror or str(error)
        yield ConfigProblem(
            "slurm.log_dir", f"{log_dir} is not writable: {why}", "choose a folder that you may write to"
        )


def _used_ports(config: ClusterConfig, slurm: SlurmConfig) -> dict[int, str]:
    ports = {}
    if slurm.ray.enabled:
        ports[slurm.ray.port] = "slurm.ray.port"
    if not slurm.command:
        ports[config.server.port] = "server.port"
    return ports


def _ports(config: ClusterConfig, slurm: SlurmConfig) -> Iterator[ConfigProblem]:
    if slurm.ray.enabled and not slurm.command and slurm.ray.port == config.server.port:
        yield ConfigProblem("server.port", f"{config.server.port} is slurm.ray.port too", "give them different ports")
    for node in _plain_names(slurm.nodelist or ""):
        for port, key in _used_ports(config, slurm).items():
            try:
                socket.create_connection((node, port), timeout=1.0).close()
            except OSError:
                continue  # nobody listens, or the login node cannot reach it: the job's first step looks again
            yield ConfigProblem(key, f"port {port} is taken on {node}", "choose another one")


def _plain_names(nodelist: str) -> list[str]:
    return nodelist.split(",") if nodelist and "[" not in nodelist else []


def _partition(
    slurm: SlurmConfig, allocation: Allocation, partition: Partition | None, known: list[str]
) -> Iterator[ConfigProblem]:
    if partition is None:
        yield no_partition(slurm.partition, known)
        return
    if allocation.num_nodes > partition.nodes:
        yield ConfigProblem(
            "slurm.nodes",
            f"the job needs {allocation.num_nodes} nodes, partition {partition.name} has {partition.nodes}",
            "start fewer workers, put more ranks on a node, or choose another partition",
        )
    if slurm.gpus_per_node > partition.gpus:
        yield ConfigProblem(
            "slurm.gpus_per_node",
            f"nodes of partition {partition.name} have {partition.gpus} GPUs, not {slurm.gpus_per_node}",
            f"write at most {partition.gpus}" + ("" if partition.gpus else " (a CPU cluster)"),
        )
