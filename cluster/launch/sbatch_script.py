"""Renders a job's sbatch script from the configuration. Pure text: writes and starts nothing."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

from cluster.config.slurm_config import SlurmConfig
from cluster.launch.allocation import Allocation

__all__ = ["job_python", "render_script"]


def job_python(slurm: SlurmConfig) -> str:
    """The interpreter on the nodes: the container's, the venv's, or the one that runs now."""
    if slurm.container_image is not None:
        return "python3"
    return str(Path(slurm.venv) / "bin" / "python") if slurm.venv is not None else sys.executable


def render_script(slurm: SlurmConfig, allocation: Allocation, folder: Path) -> str:
    """The sbatch script of a job whose files lie in `folder`."""
    python = job_python(slurm)
    values = {
        "DIRECTIVES": "\n".join(f"#SBATCH {line}" for line in _directives(slurm, allocation, folder)),
        "FOLDER": shlex.quote(str(folder)),
        "WORK_DIR": shlex.quote(str(Path(slurm.work_dir).resolve())),
        "EXPORTS": _exports(slurm.env),
        "CHECK": "" if slurm.container_image is not None else _check(python),
        "SRUN_ARGS": " ".join(shlex.quote(word) for word in _srun_args(slurm)),
        "PYTHON": shlex.quote(python),
        "MAX_REQUEUES": str(slurm.max_requeues),
    }
    text = (files("cluster.launch") / "templates" / "job.sbatch").read_text()
    for name, value in values.items():
        text = text.replace(f"@{name}@", value)
    return text


def _directives(slurm: SlurmConfig, allocation: Allocation, folder: Path) -> list[str]:
    lines = [
        f"--job-name={slurm.job_name}",
        f"--partition={slurm.partition}",
        f"--time={slurm.time}",
        f"--nodes={allocation.num_nodes}",
        "--ntasks-per-node=1",
        f"--output={shlex.quote(f'{folder}/0_batch.log')}",
        "--open-mode=append",
        f"--comment={shlex.quote(f'kvferry:{folder}')}",
        "--requeue" if slurm.max_requeues else "--no-requeue",
    ]
    if slurm.account is not None:
        lines.append(f"--account={slurm.account}")
    if slurm.gpus_per_node:
        lines.append(f"--gpus-per-node={slurm.gpus_per_node}")
    if slurm.nodelist is not None:
        lines.append(f"--nodelist={slurm.nodelist}")
    if slurm.signal_before_end_s:
        lines.append(f"--signal=B:USR1@{slurm.signal_before_end_s}")
    return lines + list(slurm.extra_args)


def _srun_args(slurm: SlurmConfig) -> list[str]:
    args = []
    if slurm.container_image is not None:
        args.append(f"--container-image={slurm.container_image}")
    if slurm.container_mounts:
        args.append(f"--container-mounts={','.join(slurm.container_mounts)}")
    return args + list(slurm.srun_args)


def _exports(env: Mapping[str, str]) -> str:
    return "\n".join(f"export {key}={shlex.quote(value)}" for key, value in env.items())


def _check(python: str) -> str:
    test = shlex.quote(f'[ -x {shlex.quote(python)} ] || echo "$SLURMD_NODENAME"')
    cause = f"no {python} on this node: is slurm.venv on a shared file system?"
    return "\n".join(
        [
            f'missing=$(srun --ntasks-per-node=1 --nodes="$SLURM_JOB_NUM_NODES" bash -c {test})',
            'if [ -n "$missing" ]; then',
            "    for node in $missing; do",
            f'        record venv "$node" {shlex.quote(cause)} 70',
            "    done",
            "    exit 70",
            "fi",
        ]
    )
