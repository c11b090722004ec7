#!/usr/bin/env python3
"""Submits a cluster as a Slurm job: `python slurm/submit.py -c FILE [--dry-run]`, the same as `kvferry slurm submit`.

With `-d FOLDER` it submits every *.yaml of a folder in order; one that cannot be submitted does not stop the rest.
"""

from __future__ import annotations

import sys
from pathlib import Path

from cluster.cli import main


def submit_folder(folder: Path, arguments: list[str]) -> int:
    """Submit every configuration of `folder`; returns the worst exit code."""
    worst = 0
    for path in sorted(folder.glob("*.yaml")):
        print(f"=== {path}", flush=True)
        worst = max(worst, main(["slurm", "submit", "-c", str(path), *arguments]))
    return worst


if __name__ == "__main__":
    words = sys.argv[1:]
    if words[:1] == ["-d"] and len(words) > 1:
        sys.exit(submit_folder(Path(words[1]), words[2:]))
    sys.exit(main(["slurm", "submit", *words]))
