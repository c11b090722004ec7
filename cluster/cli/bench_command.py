"""`kvferry bench`: measurements that a user can repeat."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["bench_app"]

bench_app = typer.Typer(name="bench", no_args_is_help=True, help="Measure this machine.")


@bench_app.callback()
def _bench() -> None:
    pass


@bench_app.command()
def transfer(
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the rows as JSON.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds of every case.")] = 5,
    ray: Annotated[bool, typer.Option(help="Compare with Ray's object store.")] = True,
) -> None:
    """Measure KV transfer between two processes against a memory copy, ucx_perftest, Ray and raw sockets."""
    from cluster.bench.transfer import render_rows, run_transfer_bench, write_rows
    from transceiver import TransceiverError

    try:
        rows = run_transfer_bench(rounds, with_ray=ray, report=lambda text: print(f"==> {text}", flush=True))
    except TransceiverError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    print(render_rows(rows))
    if json_file is not None:
        try:
            write_rows(rows, json_file)
        except OSError as error:
            typer.echo(f"error: cannot write {json_file}: {error}", err=True)
            raise typer.Exit(1) from None
