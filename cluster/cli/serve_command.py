"""`kvferry serve`: starts a cluster on this machine (or on a running Ray cluster) and serves HTTP until stopped."""

from __future__ import annotations

from typing import Annotated

import typer

from cluster.cli.options import ConfigOption, SetOption, load, require_sound, setting

__all__ = ["serve"]


def serve(
    config: ConfigOption = None,
    set_: SetOption = None,
    model: Annotated[str | None, typer.Option(help="Short for --set model=...")] = None,
    host: Annotated[str | None, typer.Option(help="Short for --set server.host=...")] = None,
    port: Annotated[int | None, typer.Option(help="Short for --set server.port=...")] = None,
    aggregated: Annotated[
        bool, typer.Option("--aggregated", help="Prefill and decode in one worker, for comparison.")
    ] = False,
    address: Annotated[
        str | None, typer.Option(help="Join this Ray cluster (host:port or `auto`) instead of starting a local one.")
    ] = None,
) -> None:
    """Serve an OpenAI-compatible API until Ctrl-C.

    Settings: defaults < the file < KVFERRY_SECTION__KEY < --set and flags.
    """
    flags = (("model", model), ("server.host", host), ("server.port", port))
    sets = [*(set_ or ()), *(setting(path, value) for path, value in flags if value is not None)]
    loaded = load(config, sets)
    require_sound(loaded)

    from cluster.serve import run_server

    raise SystemExit(run_server(loaded, aggregated=aggregated, address=address))
