"""The death of a job's first node, reported by the nodes that are left: nobody else can write it down.

Called by `slurm_task` on every node but the first. Leaves a job alone whose first node has said how the run ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from cluster.launch.job_folder import Failure, RunFolder
from cluster.launch.job_runner import EXIT_NODE_LOST

__all__ = ["report_head_loss"]

_POLL_S = 0.2


def report_head_loss(
    run: RunFolder,
    head: str,
    here: str,
    why: str,
    *,
    wait_s: float = 3.0,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Append the failure `head is lost`, once for all nodes; True when this call did it.

    Blocks up to `wait_s` for a word of the first node or of the batch script beside it: an exit code, or a failure of
    this run (one that lost this node instead, or whose task ended, is alive and tells more).
    """
    deadline = clock() + wait_s
    while not _told(run):
        if clock() >= deadline:
            break
        sleep(_POLL_S)
    else:
        return False
    try:
        (run.path / "head_lost").touch(exist_ok=False)  # the first of the nodes that are left
    except FileExistsError:
        return False
    cause = f"{head} is lost: {why} (seen by {here})"
    step = str(state.phase) if (state := run.job.read_state()) is not None else "nodes"
    run.job.add_failure(Failure(run.job.now(), run.attempt, head, step, cause, EXIT_NODE_LOST))
    print(f"FAILED: {step} on {head}: {cause}", flush=True)
    return True


def _told(run: RunFolder) -> bool:
    return run.exit_code.exists() or any(failure.attempt == run.attempt for failure in run.job.failures())
