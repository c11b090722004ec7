"""`kvferry ray`: submit, status, logs and stop of a cluster that runs as a Ray job."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cluster.cli.options import ConfigOption, SetOption, load

__all__ = ["ray_app"]

ray_app = typer.Typer(name="ray", no_args_is_help=True, help="Run a cluster as a job of a running Ray cluster.")

AddressOption = Annotated[
    str,
    typer.Option(
        "--address",
        envvar="RAY_API_SERVER_ADDRESS",
        help="The Ray dashboard, such as http://head:8265.",
    ),
]
JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="The job's id, as submit printed it.")]
_DEFAULT_ADDRESS = "http://127.0.0.1:8265"


@ray_app.command(context_settings={"allow_interspersed_args": False})
def submit(
    command: Annotated[
        list[str] | None,
        typer.Argument(help="Run this instead of `python -m cluster serve -c config.yaml`; put -- before it."),
    ] = None,
    config: ConfigOption = None,
    set_: SetOption = None,
    address: AddressOption = _DEFAULT_ADDRESS,
    working_dir: Annotated[Path | None, typer.Option(help="Upload this folder too; the command runs in it.")] = None,
    env: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="Environment of the job.")] = None,
    pip: Annotated[
        list[str] | None, typer.Option(metavar="REQUIREMENT", help="Packages that the job's nodes install first.")
    ] = None,
    job_id: Annotated[str | None, typer.Option(help="Id of the job; Ray makes one up otherwise.")] = None,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Print the job's id and end.")] = False,
) -> None:
    """Submit a cluster to Ray's job server, print what it prints, and end with the driver's own exit code.

    The resolved configuration and kvferry's packages travel with the job: the Ray cluster needs the dependencies only.
    """
    import shlex
    import shutil
    import tempfile

    import yaml

    from cluster.cli.options import require_sound
    from cluster.launch.ray_jobs import RayJobClient

    loaded = load(config, set_ or ())
    require_sound(loaded, skip_model=True)
    variables = dict(_pair(item) for item in env or ())
    with tempfile.TemporaryDirectory(prefix="kvferry-job-") as folder:
        stage = Path(folder) / "work"
        if working_dir is not None:
            shutil.copytree(working_dir, stage, ignore=shutil.ignore_patterns(".git", ".venv", "__pycache__"))
        else:
            stage.mkdir()
        (stage / "config.yaml").write_text(yaml.safe_dump(loaded.model_dump(mode="json"), sort_keys=False))
        client = RayJobClient(address)
        words = command or ["python", "-m", "cluster", "serve", "-c", "config.yaml"]
        name = client.submit(shlex.join(words), working_dir=stage, env=variables, pip=pip or (), job_id=job_id)
    print(f"job {name}", flush=True)
    if no_wait:
        return
    try:
        report = client.follow(name, lambda text: print(text, end="", flush=True))
    except KeyboardInterrupt:
        print(f"kvferry: stopping job {name}", flush=True)
        report = client.stop(name)
    if report.status != "SUCCEEDED":
        print(f"kvferry: job {name} {report.status}: {report.message.splitlines()[0] if report.message else ''}")
    raise SystemExit(report.process_exit_code)


@ray_app.command()
def status(job: JobArgument, address: AddressOption = _DEFAULT_ADDRESS) -> None:
    """Print a job's state; the exit status is the driver's once it has ended, 0 before."""
    from cluster.launch.ray_jobs import RayJobClient

    report = RayJobClient(address).report(job)
    code = "" if report.exit_code is None else f", driver's exit code {report.exit_code}"
    print(f"job {job} {report.status}{code}")
    if report.message:
        print(report.message)
    raise SystemExit(report.process_exit_code if report.ended else 0)


@ray_app.command()
def logs(job: JobArgument, address: AddressOption = _DEFAULT_ADDRESS) -> None:
    """Print what a job's driver printed."""
    from cluster.launch.ray_jobs import RayJobClient

    print(RayJobClient(address).logs(job), end="")


@ray_app.command()
def stop(job: JobArgument, address: AddressOption = _DEFAULT_ADDRESS) -> None:
    """Stop a job and wait until it has ended."""
    from cluster.launch.ray_jobs import RayJobClient

    report = RayJobClient(address).stop(job)
    print(f"job {job} {report.status}")


def _pair(item: str) -> tuple[str, str]:
    key, equals, value = item.partition("=")
    if not equals or not key:
        raise typer.BadParameter(f"{item!r} is not of the form KEY=VALUE", param_hint="--env")
    return key, value
