"""Faults that a test is told to have, and the names of cells on its command line, checked before anything runs.

A name that no cell has would do nothing in silence: the proof that the harness can fail would prove nothing.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.config.errors import ConfigProblem
from cluster.transceiver_test.cells import cells_of_sweep
from cluster.transceiver_test.config import TransceiverTestConfig

__all__ = ["Forced", "unknown_cells"]


@dataclass(frozen=True, slots=True)
class Forced:
    """Faults asked for on purpose: names of cells (or parts of names), "" for the first cell, None for none."""

    mismatch: str | None = None
    hang: str | None = None


def unknown_cells(config: TransceiverTestConfig, forced: Forced, allowed: Sequence[str]) -> list[ConfigProblem]:
    """One problem for every name that means no cell of the matrix, with the nearest names."""
    names = [
        cell.name for sweep in config.ucx_env_sweep for case in cells_of_sweep(config, sweep.name) for cell in case
    ]
    problems = []
    for option, wish in (("--force-mismatch", forced.mismatch), ("--force-hang", forced.hang)):
        if wish is not None and not any(wish in name for name in names):
            problems.append(_problem(option, f"no cell's name contains {wish!r}", wish, names))
    for wish in allowed:
        if wish not in names:
            problems.append(_problem("--allow", f"no cell is named {wish!r}", wish, names))
    return problems


def _problem(option: str, message: str, wish: str, names: Sequence[str]) -> ConfigProblem:
    near = _nearest(wish, names)
    remedy = f"did you mean {' or '.join(near)}?" if near else "take a name from `kvferry transceiver-test --list`"
    return ConfigProblem(option, message, remedy)


def _nearest(wish: str, names: Sequence[str]) -> list[str]:
    """At most three names: those that contain the wish first, then those with a part of as many steps like it."""
    if holding := [name for name in names if wish and wish in name]:
        return holding[:3]
    steps = wish.count("/") + 1
    whole: dict[str, str] = {}
    for name in names:
        words = name.split("/")
        for first in range(max(1, len(words) - steps + 1)):
            whole.setdefault("/".join(words[first : first + steps]), name)
    found = difflib.get_close_matches(wish, list(whole), n=3, cutoff=0.6)
    return list(dict.fromkeys(whole[part] for part in found))
