"""`kvferry doctor`: reports whether this machine has what a cluster needs."""

from __future__ import annotations

from typing import Annotated

import typer

from cluster.cli.options import ConfigOption, SetOption, load

__all__ = ["doctor"]


def doctor(
    config: ConfigOption = None,
    set_: SetOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list instead of a table.")] = False,
    equality: Annotated[
        bool,
        typer.Option("--equality", help="Also hold a conversation on the model and compare every token with no reuse."),
    ] = False,
) -> None:
    """Look at packages, UCX, shared memory, ports and the model; exit status 1 when something is missing."""
    if as_json and equality:
        raise typer.BadParameter("--equality prints text: leave --json out", param_hint="--json")
    from dataclasses import asdict

    from cluster.doctor import Verdict, examine

    loaded = load(config, set_ or ())
    findings = []
    for finding in examine(loaded):
        findings.append(finding)
        if not as_json:
            remedy = f"  -> {finding.remedy}" if finding.remedy else ""
            print(f"{finding.verdict.value:<5} {finding.subject:<24} {finding.detail}{remedy}", flush=True)
    if as_json:
        import json

        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    if any(finding.verdict is Verdict.FAIL for finding in findings):
        raise typer.Exit(1)
    if equality:
        from cluster.cli.demo_command import perform
        from cluster.demo import DemoOptions

        perform(DemoOptions(config, tuple(set_ or ())))
