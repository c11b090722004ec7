"""`submit_job`: from a configuration to a job in the queue, or to the list of everything that is wrong with it.

Called by `kvferry slurm submit` and `slurm/submit.py`. Writes the job's folder only after every check has passed.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import yaml

from cluster.config import ClusterConfig, ConfigProblem
from cluster.config.slurm_config import SlurmConfig
from cluster.launch.allocation import Allocation, allocate
from cluster.launch.errors import LaunchConfigError, SlurmCommandError
from cluster.launch.job_folder import JobFolder, JobPhase, JobState, replace_json
from cluster.launch.node_pool import make_token_file
from cluster.launch.preflight import check_before_submit, check_on_nodes, log_dir_of
from cluster.launch.sbatch_script import render_script
from cluster.launch.slurm_client import SlurmClient

__all__ = ["Submission", "submit_job"]


@dataclass(frozen=True, slots=True)
class Submission:
    """What was, or with `job_id` None would be, submitted."""

    job_id: int | None
    folder: Path
    allocation: Allocation
    script: str
    notes: tuple[str, ...] = ()


def submit_job(
    config: ClusterConfig,
    *,
    name: str,
    client: SlurmClient,
    dry_run: bool = False,
    on_nodes: bool = True,
    clock: Callable[[], float] = time.time,
    more_problems: tuple[ConfigProblem, ...] = (),
) -> Submission:
    """Check, write the folder `<log_dir>/<time>-<name>` and call sbatch. `dry_run` checks and renders, writes nothing.

    Raises LaunchConfigError with every problem, and SlurmCommandError when sbatch itself refuses.
    """
    slurm = config.slurm
    if slurm is None:
        problem = ConfigProblem("slurm", "the section is missing", "add `slurm:` with at least `partition:`")
        raise LaunchConfigError([*more_problems, problem])
    allocation, problems = allocate(config, slurm)
    found, partition = check_before_submit(config, slurm, allocation, client)
    problems = [*more_problems, *problems, *found]
    notes: list[str] = []
    if on_nodes and partition is not None and allocation.num_nodes <= partition.nodes:
        if partition.idle < allocation.num_nodes:
            notes.append(f"only {partition.idle} nodes are idle: venv and ports are checked when the job starts")
        else:
            try:
                problems += check_on_nodes(config, slurm, allocation, client)
            except SlurmCommandError as error:
                notes.append(f"venv and ports are checked when the job starts, no node could be asked now ({error})")
    if problems:
        raise LaunchConfigError(problems)

    folder = _free_folder(log_dir_of(slurm), name, clock())
    script = render_script(slurm, allocation, folder)
    if dry_run:
        return Submission(None, folder, allocation, script, tuple(notes))
    job = JobFolder(folder, clock)
    _write(job, config, slurm, allocation, script)
    job_id = client.submit(job.script)
    replace_json(job.submission, {"job_id": job_id, "time": clock(), "name": name})
    return Submission(job_id, folder, allocation, script, tuple(notes))


def _write(job: JobFolder, config: ClusterConfig, slurm: SlurmConfig, allocation: Allocation, script: str) -> None:
    job.path.mkdir(parents=True)
    replace_json(job.submission, {"job_id": None, "time": job.now(), "name": slurm.job_name})
    text = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)
    job.config.write_text("# Resolved: defaults, file, environment and --set merged.\n" + text)
    replace_json(job.allocation, allocation.to_dict())
    make_token_file(job.token)
    make_token_file(job.ray_token)
    job.script.write_text(script)
    job.write_state(JobState(JobPhase.SUBMITTED, job.now()))


def _free_folder(log_dir: Path, name: str, now: float) -> Path:
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now))
    base = f"{stamp}-{re.sub(r'[^A-Za-z0-9._-]+', '-', name)}"
    folder, number = log_dir / base, 1
    while folder.exists():
        number += 1
        folder = log_dir / f"{base}-{number}"
    return folder
