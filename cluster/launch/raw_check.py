"""What can be said of a job whose configuration the schema refused, so that its errors do not hide all the others.

Called by `kvferry slurm submit` with the values as they stand in the file; reports what they show beyond the schema's
own errors. Guesses nothing: a value that cannot be used is left out of the checks.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cluster.config import ConfigProblem
from cluster.config.slurm_config import SlurmConfig
from cluster.launch.preflight import folder_problems, no_partition, placeholder_problems, slurm_problems
from cluster.launch.slurm_client import SlurmClient

__all__ = ["check_raw"]

_FOLDERS = ("work_dir", "log_dir", "venv", "container_image")


def check_raw(values: Mapping[str, Any], client: SlurmClient) -> list[ConfigProblem]:
    """Placeholders, folders, commands of Slurm and the partition. Reads folders and asks sinfo; changes nothing."""
    problems = list(placeholder_problems(values))
    section = values.get("slurm")
    if isinstance(section, Mapping):
        problems += _folders(section)
    elif values and section is None:
        problems.append(ConfigProblem("slurm", "the section is missing", "add `slurm:` with at least `partition:`"))
    partitions, found = slurm_problems(client)
    problems += found
    name = section.get("partition") if isinstance(section, Mapping) else None
    if partitions is not None and _usable(name) and name not in partitions:
        problems.append(no_partition(str(name), partitions))
    return problems


def _folders(section: Mapping[str, Any]) -> list[ConfigProblem]:
    named = {key: section[key] for key in _FOLDERS if section.get(key) is not None}
    usable = {key: value for key, value in named.items() if _usable(value)}
    if "container_image" in named:
        usable.pop("venv", None)
    slurm = SlurmConfig(partition="unknown", **usable)
    skipped = {f"slurm.{key}" for key in named if key not in usable}
    if "slurm.work_dir" in skipped and not Path(slurm.log_dir).is_absolute():
        skipped.add("slurm.log_dir")  # nobody knows below what
    if "container_image" in named:
        skipped.add("slurm.venv")
    return [problem for problem in folder_problems(slurm) if problem.path not in skipped]


def _usable(value: object) -> bool:
    return isinstance(value, str) and value != "" and not list(placeholder_problems(value))
