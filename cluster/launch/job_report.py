"""What `kvferry slurm status` tells: Slurm's view of a job and the job's own, in one value and as text."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cluster.launch.job_folder import Failure, JobFolder, JobPhase, JobState
from cluster.launch.slurm_client import SlurmJob

__all__ = ["JobReport", "ended_unheard", "report_job"]


@dataclass(frozen=True, slots=True)
class JobReport:
    """`slurm_job` is None when the controller has forgotten the job (or cannot be asked)."""

    folder: JobFolder
    slurm_job: SlurmJob | None
    state: JobState | None
    failures: tuple[Failure, ...]

    def to_dict(self) -> dict[str, Any]:
        """For --json."""
        job, state = self.slurm_job, self.state
        return {
            "folder": str(self.folder.path),
            "job_id": job.job_id if job else None,
            "slurm_state": job.state if job else None,
            "reason": job.reason if job else None,
            "restarts": job.restarts if job else None,
            "phase": str(state.phase) if state else None,
            "nodes": list(state.nodes) if state else [],
            "url": state.url if state else "",
            "exit_code": state.exit_code if state else None,
            "failures": [
                {
                    "step": f.step,
                    "node": f.node,
                    "cause": f.cause,
                    "exit_code": f.exit_code,
                    "log": f.log,
                    "tail": f.tail,
                }
                for f in self.failures
            ],
        }

    def lines(self) -> list[str]:
        """For people."""
        job, state = self.slurm_job, self.state
        lines = []
        if job is None:
            lines.append("slurm     the controller does not know this job any more")
        else:
            reason = f" ({job.reason})" if job.reason not in ("", "None") else ""
            restarts = f", restarted {job.restarts} times" if job.restarts else ""
            lines.append(
                f"slurm     job {job.job_id} {job.state}{reason}, {job.run_time} of {job.time_limit}{restarts}"
            )
        if state is not None:
            lines.append(f"phase     {state.phase} since {time.strftime('%F %T', time.localtime(state.since))}")
            if state.nodes:
                lines.append(f"nodes     {' '.join(state.nodes)}")
            if state.url and not (job and job.ended) and state.phase in (JobPhase.READY, JobPhase.DRAINING):
                lines.append(f"url       {state.url}/v1")
            if state.exit_code is not None:
                lines.append(f"exit code {state.exit_code}")
        lines.append(f"folder    {self.folder.path}")
        for failure in self.failures:
            lines.append(f"FAILED    {failure.step} on {failure.node}: {failure.cause}")
            if failure.log:
                lines.append(f"          log: {failure.log}")
            lines += [f"          | {line}" for line in failure.tail.splitlines()[-5:]]
        return lines


def report_job(folder: JobFolder, slurm_job: SlurmJob | None, down_nodes: Sequence[str] = ()) -> JobReport:
    """Read the folder's state and failures. A job that Slurm has ended before it could say so itself has failed too.

    `down_nodes` are those of its nodes that Slurm has lost, to be named in that failure.
    """
    state, failures = folder.read_state(), folder.failures()
    if state is not None and slurm_job is not None and ended_unheard(slurm_job, state):
        reason = f", {slurm_job.reason}" if slurm_job.reason not in ("", "None") else ""
        cause = f"Slurm ended the job ({slurm_job.state}{reason}) while its phase was {state.phase}"
        if down_nodes:
            cause += f"; down: {', '.join(down_nodes)}"
        where = ", ".join(down_nodes) or slurm_job.nodes or "no node"
        failures.append(Failure(folder.now(), slurm_job.restarts, where, "slurm", cause, slurm_job.exit_code or None))
    return JobReport(folder, slurm_job, state, tuple(failures))


def ended_unheard(slurm_job: SlurmJob, state: JobState) -> bool:
    """Whether Slurm is done with a job whose own state says otherwise; one cancelled in the queue had no say."""
    if slurm_job.state == "CANCELLED" and state.phase == JobPhase.SUBMITTED:
        return False
    return slurm_job.ended and state.phase != JobPhase.ENDED
