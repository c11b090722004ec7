"""Looks at UCX without loading it into this process: asks the `ucx_info` program of the libucx wheel.

Called by `examine`. A missing or broken UCX is a finding, never an exception.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from cluster.doctor.finding import Finding, Verdict

__all__ = ["check_ucx", "transports_in"]

_WANTED = {"tcp": "between hosts", "cma": "between processes of one host"}
_TIMEOUT_S = 30.0


def transports_in(text: str) -> list[str]:
    """Names of the transports in the output of `ucx_info -d`, each once, in order."""
    return list(dict.fromkeys(re.findall(r"^#\s+Transport:\s+(\S+)", text, flags=re.MULTILINE)))


def check_ucx() -> Iterator[Finding]:
    """UCX's version and the transports usable on this machine."""
    spec = importlib.util.find_spec("libucx")
    if spec is None or spec.origin is None:
        yield Finding("ucx", Verdict.FAIL, "the package libucx-cu12 is missing", "pip install -c constraints.txt -e .")
        return
    home = Path(spec.origin).parent
    try:
        version = _ask(home, "-v")
        devices = _ask(home, "-d")
    except (OSError, subprocess.SubprocessError) as error:
        yield Finding("ucx", Verdict.WARN, f"ucx_info gave no answer: {error}", "run it by hand for its message")
        return
    found = re.search(r"Library version:\s*(\S+)", version)
    yield Finding("ucx", Verdict.OK, found.group(1) if found else version.splitlines()[0])
    transports = transports_in(devices)
    for name, purpose in _WANTED.items():
        if name in transports:
            yield Finding(f"ucx transport {name}", Verdict.OK, purpose)
        else:
            verdict = Verdict.FAIL if name == "tcp" else Verdict.WARN
            yield Finding(
                f"ucx transport {name}", verdict, f"not usable here; it is the one {purpose}", "see ucx_info -d"
            )
    others = [name for name in transports if name not in _WANTED]
    yield Finding("ucx transports, others", Verdict.OK, ", ".join(others) or "none")


def _ask(home: Path, option: str) -> str:
    environment = {**os.environ, "LD_LIBRARY_PATH": str(home / "lib")}
    program = home / "bin" / "ucx_info"
    done = subprocess.run(
        [str(program), option], env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
    )
    return done.stdout
