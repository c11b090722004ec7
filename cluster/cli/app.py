"""The typer application: every command by name. Adds commands, does nothing else."""

from __future__ import annotations

from typing import Annotated

import typer

from cluster.cli.bench_command import bench_app
from cluster.cli.chat_command import chat
from cluster.cli.check_command import check
from cluster.cli.demo_command import demo
from cluster.cli.doctor_command import doctor
from cluster.cli.ray_command import ray_app
from cluster.cli.replay_command import replay
from cluster.cli.schema_command import schema
from cluster.cli.serve_command import serve
from cluster.cli.slurm_command import slurm_app
from cluster.cli.transceiver_test_command import transceiver_test

__all__ = ["app"]

app = typer.Typer(
    name="kvferry",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Disaggregated prefill/decode serving for multi-turn conversations.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"kvferry {version('kvferry')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


for _command in (serve, chat, demo, check, schema, doctor, replay):
    app.command()(_command)
app.command(name="transceiver-test")(transceiver_test)
app.add_typer(slurm_app, name="slurm")
app.add_typer(ray_app, name="ray")
app.add_typer(bench_app)
