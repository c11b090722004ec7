"""`kvferry transceiver-test`: moves patterned KV between processes or nodes and compares every byte."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["transceiver_test"]


def transceiver_test(
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="The test's YAML file. Without it the default matrix runs.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="Folder of the results. Default: logs/transceiver-test-TIME, in a job its folder."
        ),
    ] = None,
    allow: Annotated[
        list[str] | None, typer.Option("--allow", metavar="CELL", help="A cell, by its whole name, that may fail.")
    ] = None,
    host_transfer: Annotated[
        bool, typer.Option("--host-transfer", help="Also measure a plain TCP connection between the two sides.")
    ] = False,
    force_mismatch: Annotated[
        str | None,
        typer.Option(metavar="CELL", help="Damage a byte in cells whose name contains this: the test must fail."),
    ] = None,
    force_hang: Annotated[
        str | None, typer.Option(metavar="CELL", help="Hang in cells whose name contains this: the test must fail.")
    ] = None,
    nodes: Annotated[
        str | None, typer.Option(help="Nodes of this Slurm job, by comma, or `job` for all of them.")
    ] = None,
    submit: Annotated[bool, typer.Option("--submit", help="Run as a Slurm job over two nodes.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="With --submit: check and show, submit nothing.")] = False,
    list_: Annotated[bool, typer.Option("--list", help="Print the names of the cells and end.")] = False,
) -> None:
    """Test the KV transceiver without a model: layouts, lengths, directions, policies, turns, per transport setting.

    Exit status 0 only when every cell passes.
    """
    from cluster.transceiver_test import Forced, TestOptions, cells_of_sweep, load_test_config, run_transceiver_test

    loaded = load_test_config(config)
    if list_:
        for sweep in loaded.ucx_env_sweep:
            for case in cells_of_sweep(loaded, sweep.name):
                print("\n".join(cell.name for cell in case))
        return
    if submit:
        _submit(config, dry_run, allow or [], host_transfer, force_mismatch, force_hang)
        return

    from rich.console import Console

    from cluster.transceiver_test import nodes_of_job

    named = () if nodes is None else (nodes_of_job() if nodes == "job" else tuple(nodes.split(",")))
    if nodes is not None and not named:
        raise typer.BadParameter("this is not inside a Slurm job of kvferry: name the nodes", param_hint="--nodes")
    job_folder = os.environ.get("KVFERRY_JOB_FOLDER")
    default = Path("logs") / time.strftime("transceiver-test-%Y%m%d-%H%M%S")
    if job_folder and named:
        default = Path(job_folder) / "results"
    options = TestOptions(
        output=output or default,
        nodes=named,
        allowed=tuple(allow or ()),
        host_transfer=host_transfer,
        forced=Forced(force_mismatch, force_hang),
    )
    raise SystemExit(run_transceiver_test(loaded, options, Console(width=200, soft_wrap=True)))


def _submit(
    config: Path | None, dry_run: bool, allow: list[str], host_transfer: bool, mismatch: str | None, hang: str | None
) -> None:
    from cluster.config.errors import ConfigError
    from cluster.launch import SlurmClient
    from cluster.transceiver_test import Forced, load_test_config, submit_test, unknown_cells

    if config is None:
        raise typer.BadParameter("a job needs a file with a `slurm:` section", param_hint="--config")
    loaded = load_test_config(config)
    if problems := unknown_cells(loaded, Forced(mismatch, hang), allow):
        raise ConfigError(problems)
    arguments = [word for cell in allow for word in ("--allow", cell)]
    arguments += ["--host-transfer"] if host_transfer else []
    arguments += ["--force-mismatch", mismatch] if mismatch is not None else []
    arguments += ["--force-hang", hang] if hang is not None else []
    submission = submit_test(loaded, config, client=SlurmClient(), arguments=tuple(arguments), dry_run=dry_run)
    for note in submission.notes:
        print(f"note: {note}")
    if dry_run:
        print(submission.script, end="")
        return
    print(f"job {submission.job_id}")
    print(f"folder {submission.folder}")
