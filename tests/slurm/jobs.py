"""Jobs of `kvferry slurm` on the virtual cluster, as a user runs them: through the command on the login node."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.slurm.virtual_slurm import VirtualSlurm

REPOSITORY = Path(__file__).parents[2]


@dataclass(frozen=True)
class Job:
    """A submitted job."""

    job_id: int
    folder: Path

    def failures(self) -> list[dict[str, Any]]:
        path = self.folder / "failures.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = json.loads((self.folder / "state.json").read_text())
        return state

    def log(self, name: str) -> str:
        """Text of all logs whose name contains `name`."""
        return "".join(path.read_text() for path in sorted(self.folder.rglob("*.log")) if name in path.name)


def kvferry(slurm: VirtualSlurm, *args: str, timeout_s: float = 60.0, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the command on the login node, from the repository."""
    settings = [f"{key}={value}" for key, value in {"OMP_NUM_THREADS": "1", "COLUMNS": "200", **env}.items()]
    argv = ["env", *settings, sys.executable, "-m", "cluster", *args]
    return slurm.run(argv, timeout_s=timeout_s, cwd=REPOSITORY)


def write_config(folder: Path, name: str, slurm: dict[str, Any], **rest: Any) -> Path:
    """A configuration file for the hash model with a `slurm` section fit for the virtual cluster."""
    section: dict[str, Any] = {
        "partition": "debug",
        "time": "5",
        "work_dir": str(REPOSITORY),
        "log_dir": str(folder / "logs"),
        "drain_s": 5.0,
        "signal_before_end_s": 0,
        **slurm,
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump({"model": "hash", **rest, "slurm": section}))
    return path


def submit(slurm: VirtualSlurm, config: Path, *args: str) -> Job:
    """`kvferry slurm submit`; fails the test when it does not submit."""
    done = kvferry(slurm, "slurm", "submit", "-c", str(config), *args)
    found = re.search(r"^job (\d+)\nfolder (.*)$", done.stdout, re.MULTILINE)
    assert done.returncode == 0, done.stderr
    assert found is not None, done.stdout
    return Job(int(found.group(1)), Path(found.group(2)))


def command(*argv: str) -> dict[str, Any]:
    """A `slurm` section that runs a command on the first of two nodes, without Ray."""
    return {"nodes": 2, "ray": {"enabled": False}, "command": list(argv)}
