"""The command `kvferry` (also `python -m cluster`): thin commands over the packages, everything imported late."""

from __future__ import annotations

from cluster.cli.entry import main

__all__ = ["main"]
