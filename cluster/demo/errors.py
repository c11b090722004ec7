"""What keeps the demo from giving a verdict."""

from __future__ import annotations

__all__ = ["DemoError"]


class DemoError(Exception):
    """The demo cannot go on; the message says why."""
