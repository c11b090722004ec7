"""`kvferry bench`: measurements that a user can repeat."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cluster.cli.options import require_peers, require_writable

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
    peer_python: Annotated[Path | None, typer.Option(help="Python that has NIXL installed.")] = None,
) -> None:
    """Measure KV transfer between two processes against a memory copy, ucx_perftest, NIXL, Ray and raw sockets."""
    require_writable(json_file, "--json")

    from cluster.bench.transfer import render_rows, run_transfer_bench, write_rows
    from transceiver import TransceiverError

    try:
        rows = run_transfer_bench(
            rounds, with_ray=ray, peer_python=peer_python, report=lambda text: print(f"==> {text}", flush=True)
        )
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


@bench_app.command("cache")
def cache(
    trace: Annotated[Path | None, typer.Option(help="The weka trace; without it only growth is measured.")] = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests of the trace.")] = 150,
    capacity_tokens: Annotated[int, typer.Option(min=1, help="Cache size in tokens.")] = 2_000_000,
    peer: Annotated[list[str] | None, typer.Option(help="vllm or sglang; may be given several times.")] = None,
    peer_python: Annotated[Path | None, typer.Option(help="Python that has the peers installed.")] = None,
    growth: Annotated[bool, typer.Option(help="Measure growth with prompt length and cache size.")] = True,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the figures there.")] = None,
) -> None:
    """CPU time of match + allocate + commit + free, against vLLM's and SGLang's managers on the same prompts."""
    require_writable(json_file, "--json")
    require_peers(peer or ())

    from cluster.bench.cache.command import run_cache_bench
    from cluster.replay.trace import TraceError

    try:
        run_cache_bench(
            trace,
            requests=requests,
            capacity_tokens=capacity_tokens,
            peers=tuple(peer or ()),
            peer_python=peer_python,
            growth=growth,
            json_file=json_file,
        )
    except TraceError as error:
        print(f"kvferry bench cache: {error}")
        raise typer.Exit(2) from None
