"""`kvferry slurm`: submit, status, logs and cancel of a cluster that runs as a Slurm job."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cluster.cli.options import ConfigOption, SetOption, load, require_sound

if TYPE_CHECKING:
    from cluster.config import ConfigError
    from cluster.launch import JobFolder, LaunchConfigError, SlurmClient, SlurmJob

__all__ = ["slurm_app"]

slurm_app = typer.Typer(name="slurm", no_args_is_help=True, help="Run a cluster as a Slurm job.")

JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="Slurm's id of the job, or the job's folder.")]
LogDirOption = Annotated[
    Path, typer.Option("--log-dir", help="Where the jobs' folders are, when Slurm has forgotten the job.")
]


@slurm_app.command()
def submit(
    config: ConfigOption = None,
    set_: SetOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check and show; write and submit nothing.")] = False,
    preflight: Annotated[
        bool, typer.Option(help="Look for the venv and the ports on nodes that are idle now, by a short srun.")
    ] = True,
) -> None:
    """Check the configuration against this Slurm, write the job's folder and call sbatch.

    Exit status 2 with every error at once when the job cannot run.
    """
    from cluster.config import ConfigError, ConfigProblem
    from cluster.launch import SlurmClient, submit_job

    client = SlurmClient()
    try:
        loaded = load(config, set_ or ())
    except ConfigError as error:
        raise _refused(error, config, set_ or (), client) from None
    problems: tuple[ConfigProblem, ...] = ()
    try:
        # a job's model may exist only where it runs: inside the container, or on the nodes
        require_sound(loaded, skip_model=loaded.slurm is None or loaded.slurm.container_image is not None)
    except ConfigError as error:
        problems = error.problems
    submission = submit_job(
        loaded,
        name=config.stem if config is not None else "kvferry",
        client=client,
        dry_run=dry_run,
        on_nodes=preflight,
        more_problems=problems,
    )
    for note in submission.notes:
        print(f"note: {note}")
    for placement in submission.allocation.placements:
        where = f"node {placement.node} slot {placement.slot}"
        print(f"{placement.section} {placement.instance} rank {placement.rank}: {where}")
    if dry_run:
        print(submission.script, end="")
        print(f"dry run: nothing was submitted; the folder would be {submission.folder}")
        return
    print(f"job {submission.job_id}")
    print(f"folder {submission.folder}")


def _refused(error: ConfigError, config: Path | None, sets: Sequence[str], client: SlurmClient) -> LaunchConfigError:
    """The schema's errors, and with them all that the refused values show of the job's others."""
    import os

    from cluster.config.loader import raw_values
    from cluster.launch import LaunchConfigError
    from cluster.launch.raw_check import check_raw

    return LaunchConfigError([*error.problems, *check_raw(raw_values(config, sets, os.environ), client)])


@slurm_app.command()
def status(
    job: JobArgument,
    log_dir: LogDirOption = Path("logs"),
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show the state of a job, its address, and every failure with its cause."""
    import json

    from cluster.launch import report_job

    folder, slurm_job = _find(job, log_dir)
    report = report_job(folder, slurm_job, _down_nodes(folder, slurm_job))
    print(json.dumps(report.to_dict(), indent=2) if json_ else "\n".join(report.lines()))


@slurm_app.command()
def logs(
    job: JobArgument,
    log_dir: LogDirOption = Path("logs"),
    step: Annotated[str | None, typer.Option(help="Only logs whose name contains this, such as serve or ray.")] = None,
    lines: Annotated[int, typer.Option("-n", "--lines", min=1, help="Last lines of each log.")] = 40,
) -> None:
    """Print the logs of a job's steps in their order."""
    folder, _ = _find(job, log_dir)
    shown = [log for log in folder.logs() if step is None or step in log.name]
    if not shown:
        known = ", ".join(log.name for log in folder.logs()) or "none yet"
        print(f"no log {'' if step is None else repr(step) + ' '}in {folder.path}; there are: {known}")
        raise SystemExit(1)
    for log in shown:
        print(f"==> {log.relative_to(folder.path)}")
        print("\n".join(log.read_text(errors="replace").splitlines()[-lines:]))


@slurm_app.command()
def cancel(
    job: JobArgument,
    log_dir: LogDirOption = Path("logs"),
    now: Annotated[bool, typer.Option("--now", help="Do not let requests in progress finish (plain scancel).")] = False,
) -> None:
    """End a job: it drains and tears down by itself. `--now` ends it at once."""
    from cluster.launch import JobNotFoundError, SlurmClient

    _, slurm_job = _find(job, log_dir)
    if slurm_job is None or not slurm_job.live:
        state = "unknown to Slurm" if slurm_job is None else slurm_job.state
        raise JobNotFoundError(f"job {job} does not run: {state}")
    client = SlurmClient()
    if now or slurm_job.state != "RUNNING":
        client.cancel(slurm_job.job_id)
        print(f"job {slurm_job.job_id} cancelled")
    else:
        client.signal_batch(slurm_job.job_id)
        print(f"job {slurm_job.job_id} drains and ends")


def _down_nodes(folder: JobFolder, slurm_job: SlurmJob | None) -> list[str]:
    """The nodes that a job was lost with; asked of Slurm only when it ended the job."""
    import sys

    from cluster.launch import SlurmClient, SlurmCommandError
    from cluster.launch.job_report import ended_unheard

    state = folder.read_state()
    if slurm_job is None or state is None or not ended_unheard(slurm_job, state):
        return []
    try:
        return SlurmClient().down_nodes(state.nodes)
    except SlurmCommandError as error:
        print(f"note: {error}", file=sys.stderr)
        return []


def _find(job: str, log_dir: Path) -> tuple[JobFolder, SlurmJob | None]:
    import json

    from cluster.launch import SlurmClient, SlurmCommandError, find_job_folder

    client = SlurmClient()
    slurm_job = None
    folder = None if job.isdigit() else find_job_folder(log_dir, job)
    job_id = int(job) if folder is None else json.loads(folder.submission.read_text()).get("job_id")
    if job_id is not None:
        try:
            slurm_job = client.job(int(job_id))
        except SlurmCommandError as error:
            print(f"note: {error}")
    if folder is None:
        folder = find_job_folder(log_dir, job, slurm_job.comment if slurm_job is not None else "")
    return folder, slurm_job
