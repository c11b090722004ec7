"""Logging of a kvferry process: the standard library's, to stderr, a line an event. Commands and actors call it."""

from __future__ import annotations

import logging
import sys

__all__ = ["configure_logging"]

_FORMAT = "%(asctime)s.%(msecs)03d %(levelname).1s %(name)s: %(message)s"
_PACKAGES = ("cluster", "transceiver", "kvcache")


def configure_logging(level: str = "INFO") -> None:
    """Send what our packages log at `level` and above to stderr. Idempotent; other packages' logging stays as it is."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(_FORMAT, "%H:%M:%S"))
    for package in _PACKAGES:
        logger = logging.getLogger(package)
        logger.setLevel(level)
        logger.handlers = [handler]
        logger.propagate = False
