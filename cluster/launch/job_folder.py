"""The folder of one job: configuration, logs numbered by step, the state, and every failure in one file.

Written by the submission and by the job's first node; read by `kvferry slurm status` and `logs`. The other nodes write
their processes' logs, and the loss of the first node.

    <log_dir>/<stamp>-<name>/
        config.yaml  allocation.json  job.sbatch  submission.json
        token  ray_token (for this user only)
        state.json       phase, address, exit code: replaced as a whole
        failures.jsonl   one line a failure, with its cause
        0_batch.log
        run-0/           one folder for each start of the job (a requeue makes run-1)
            1_nodes.log  2_ray-node1.log  ...  exit_code
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from cluster.launch.errors import JobNotFoundError

__all__ = ["Failure", "JobFolder", "JobPhase", "JobState", "RunFolder", "find_job_folder"]


class JobPhase(StrEnum):
    """How far a job is."""

    SUBMITTED = "submitted"
    JOINING = "joining"
    STARTING_RAY = "starting_ray"
    STARTING_SERVER = "starting_server"
    READY = "ready"
    RUNNING = "running"
    DRAINING = "draining"
    STOPPING = "stopping"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class JobState:
    """The content of state.json. `exit_code` is set when the phase is ENDED."""

    phase: JobPhase
    since: float
    attempt: int = 0
    nodes: tuple[str, ...] = ()
    url: str = ""
    ray_address: str = ""
    exit_code: int | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """One line of failures.jsonl. `tail` holds the last lines of `log`."""

    time: float
    attempt: int
    node: str
    step: str
    cause: str
    exit_code: int | None = None
    log: str = ""
    tail: str = ""


class JobFolder:
    """Paths and small files of a job."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self.path = path
        self._clock = clock

    config = property(lambda self: self.path / "config.yaml")
    allocation = property(lambda self: self.path / "allocation.json")
    script = property(lambda self: self.path / "job.sbatch")
    submission = property(lambda self: self.path / "submission.json")
    token = property(lambda self: self.path / "token")
    ray_token = property(lambda self: self.path / "ray_token")

    def run(self, attempt: int) -> RunFolder:
        """The folder of one start of the job; made when missing."""
        return RunFolder(self, attempt)

    def runs(self) -> list[Path]:
        """Folders of all starts, oldest first."""
        return sorted(self.path.glob("run-*"), key=lambda path: int(path.name.removeprefix("run-")))

    def write_state(self, state: JobState) -> None:
        """Replace state.json."""
        replace_json(self.path / "state.json", asdict(state))

    def read_state(self) -> JobState | None:
        """The last state, or None before the first one."""
        try:
            data = json.loads((self.path / "state.json").read_text())
        except FileNotFoundError:
            return None
        return JobState(**{**data, "phase": JobPhase(data["phase"]), "nodes": tuple(data["nodes"])})

    def add_failure(self, failure: Failure) -> None:
        """Append one line, in one write."""
        with (self.path / "failures.jsonl").open("a") as file:
            file.write(json.dumps(asdict(failure)) + "\n")

    def failures(self) -> list[Failure]:
        """All failures so far, oldest first. A half-written line is reported as a failure of its own."""
        try:
            lines = (self.path / "failures.jsonl").read_text().splitlines()
        except FileNotFoundError:
            return []
        found = []
        for line in lines:
            try:
                found.append(Failure(**json.loads(line)))
            except (ValueError, TypeError):
                found.append(Failure(0.0, 0, "", "?", f"unreadable line: {line[:200]}"))
        return found

    def logs(self) -> list[Path]:
        """Every log, in the order of the steps."""
        return [*self.path.glob("0_*.log"), *(log for run in self.runs() for log in _numbered(run))]

    def now(self) -> float:
        """Seconds since the epoch."""
        return self._clock()


class RunFolder:
    """Logs and exit code of one start of a job. Names a new step's log with the next number."""

    def __init__(self, job: JobFolder, attempt: int) -> None:
        self.job = job
        self.attempt = attempt
        self.path = job.path / f"run-{attempt}"
        self.path.mkdir(parents=True, exist_ok=True)
        self._steps: list[str] = []

    def log(self, step: str, part: str = "") -> Path:
        """The log of a step (made on its first use); parts of a step, such as nodes, share its number."""
        if step not in self._steps:
            self._steps.append(step)
        name = f"{self._steps.index(step) + 1}_{step}"
        return self.path / (f"{name}-{part}.log" if part else f"{name}.log")

    @property
    def exit_code(self) -> Path:
        """File that the batch script reads the job's exit code from."""
        return self.path / "exit_code"

    @property
    def drain_request(self) -> Path:
        """File whose appearance asks for a drain (the batch script makes it)."""
        return self.path / "drain"


def replace_json(path: Path, data: Any) -> None:
    """Write a JSON file so that a reader sees the old or the new content, never a part."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(json.dumps(data, indent=2) + "\n")
    draft.replace(path)


def find_job_folder(log_dir: Path, job: str, comment: str = "") -> JobFolder:
    """The folder of a job given as a path, or as a Slurm id with the job's comment or below `log_dir`."""
    if not job.isdigit():
        if not (Path(job) / "submission.json").exists():
            raise JobNotFoundError(f"{job} is not the folder of a job")
        return JobFolder(Path(job))
    told = comment.removeprefix("kvferry:")
    if told != comment and Path(told).is_dir():
        return JobFolder(Path(told))
    for record in sorted(log_dir.glob("*/submission.json"), reverse=True):
        try:
            if json.loads(record.read_text()).get("job_id") == int(job):
                return JobFolder(record.parent)
        except ValueError:
            continue  # being written, or damaged: not the one
    raise JobNotFoundError(f"no folder of job {job} below {log_dir}: give the folder, or --log-dir")


def _numbered(run: Path) -> list[Path]:
    def number(path: Path) -> tuple[int, str]:
        digits = re.match(r"\d+", path.name)
        return (int(digits.group()) if digits else 0, path.name)

    return sorted(run.glob("[0-9]*_*.log"), key=number)
