"""Slurm's commands as typed calls: sbatch, sinfo, scontrol, scancel, srun.

The only place that runs them on the submitting side. Every call has a time-out; a failure carries what Slurm printed.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.launch.errors import SlurmCommandError

__all__ = ["Partition", "SlurmClient", "SlurmJob"]

_PAIR = re.compile(r"(\w+)=(.*?)(?= [\w/:]+=|$)")
_LIVE = frozenset({"PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "REQUEUED", "REQUEUE_HOLD"})
_FAILED = {"BOOT_FAIL", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT"}
_ENDED = frozenset({"CANCELLED", "COMPLETED", *_FAILED})


@dataclass(frozen=True, slots=True)
class Partition:
    """What sinfo says of a partition. `gpus` is the largest GPU count of its nodes."""

    name: str
    nodes: int
    idle: int
    gpus: int


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """What the controller says of a job."""

    job_id: int
    state: str
    reason: str
    exit_code: int
    restarts: int
    nodes: str
    run_time: str
    time_limit: str
    comment: str

    @property
    def live(self) -> bool:
        """Whether the job waits or runs."""
        return self.state in _LIVE

    @property
    def ended(self) -> bool:
        """Whether Slurm is done with the job: nothing of it runs or will run."""
        return self.state in _ENDED


class SlurmClient:
    """Stateless; `timeout_s` bounds each command."""

    def __init__(self, timeout_s: float = 60.0) -> None:
        self._timeout_s = timeout_s

    def missing_commands(self) -> list[str]:
        """Commands of Slurm that are not in PATH."""
        return [name for name in ("sbatch", "sinfo", "scontrol", "scancel", "srun") if shutil.which(name) is None]

    def partitions(self) -> dict[str, Partition]:
        """All partitions by name. Raises SlurmCommandError."""
        found: dict[str, Partition] = {}
        for line in self._run(["sinfo", "-h", "-o", "%R|%D|%t|%G"]).splitlines():
            name, nodes, state, gres = (word.strip() for word in line.split("|"))
            old = found.get(name, Partition(name, 0, 0, 0))
            idle = int(nodes) if state == "idle" else 0
            found[name] = Partition(name, old.nodes + int(nodes), old.idle + idle, max(old.gpus, _gpus(gres)))
        return found

    def submit(self, script: Path, args: Sequence[str] = ()) -> int:
        """sbatch; returns the job's id. Raises SlurmCommandError."""
        out = self._run(["sbatch", "--parsable", *args, str(script)]).strip()
        number = out.splitlines()[-1].split(";")[0] if out else ""
        if not number.isdigit():
            raise SlurmCommandError(f"sbatch answered {out!r} instead of a job id")
        return int(number)

    def job(self, job_id: int) -> SlurmJob | None:
        """What the controller knows of a job; None when it has forgotten it. Raises SlurmCommandError."""
        try:
            text = self._run(["scontrol", "show", "job", "-o", str(job_id)])
        except SlurmCommandError as error:
            if "Invalid job id" in str(error):
                return None
            raise
        pairs = {key: value.strip() for key, value in _PAIR.findall(text.strip())}
        return SlurmJob(
            job_id=job_id,
            state=pairs.get("JobState", "UNKNOWN"),
            reason=pairs.get("Reason", ""),
            exit_code=int(pairs.get("ExitCode", "0:0").split(":")[0]),
            restarts=int(pairs.get("Restarts", "0")),
            nodes=pairs.get("NodeList", ""),
            run_time=pairs.get("RunTime", ""),
            time_limit=pairs.get("TimeLimit", ""),
            comment=pairs.get("Comment", ""),
        )

    def down_nodes(self, nodes: Sequence[str]) -> list[str]:
        """Those of `nodes` that are down or do not answer slurmctld. Raises SlurmCommandError."""
        if not nodes:
            return []
        lines = self._run(["sinfo", "-h", "-N", "-n", ",".join(nodes), "-o", "%N|%T"]).splitlines()
        words = (line.partition("|") for line in lines)
        states = {name: state for name, _, state in words}  # a node of several partitions comes several times
        return [name for name, state in states.items() if state.startswith(("down", "fail")) or state.endswith("*")]

    def signal_batch(self, job_id: int, name: str = "TERM") -> None:
        """Send a signal to the batch shell alone, which then drains the job. Raises SlurmCommandError."""
        self._run(["scancel", "--batch", f"--signal={name}", str(job_id)])

    def cancel(self, job_id: int) -> None:
        """scancel: SIGTERM to everything in the job, SIGKILL after KillWait. Raises SlurmCommandError."""
        self._run(["scancel", str(job_id)])

    def run_on_nodes(self, args: Sequence[str], script: str, timeout_s: float) -> str:
        """Run a short bash script on nodes that are free now; returns what it printed. Raises SlurmCommandError."""
        return self._run(["srun", *args, "bash", "-c", script], timeout_s)

    def _run(self, argv: list[str], timeout_s: float | None = None) -> str:
        limit = timeout_s if timeout_s is not None else self._timeout_s
        try:
            done = subprocess.run(
                argv, capture_output=True, text=True, timeout=limit, check=False, stdin=subprocess.DEVNULL
            )
        except FileNotFoundError as error:
            raise SlurmCommandError(
                f"{argv[0]} is not installed here: run this on a login node of the cluster"
            ) from error
        except subprocess.TimeoutExpired as error:
            raise SlurmCommandError(f"{argv[0]} did not answer within {limit:g} s: is slurmctld up?") from error
        if done.returncode != 0:
            raise SlurmCommandError(
                f"{argv[0]} failed ({done.returncode}): {done.stderr.strip() or done.stdout.strip()}"
            )
        return done.stdout


def _gpus(gres: str) -> int:
    """GPUs in a gres text such as `gpu:h100:8(S:0-1),nvme:2`."""
    total = 0
    for item in gres.split(","):
        fields = item.split("(")[0].split(":")
        if fields[0] == "gpu" and fields[-1].isdigit():
            total += int(fields[-1])
    return total
