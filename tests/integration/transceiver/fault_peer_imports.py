"""Imported once by the fork server of `fault_peer`: what a new process would take a second to import."""

from __future__ import annotations

import importlib
import os
from contextlib import suppress

from tests.integration.transceiver import fault_side

os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")  # as `transceiver.ucx` does before it loads the library
os.environ.setdefault("UCXX_LOG_LEVEL", "FATAL")
os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
for name in ("transceiver.ucx", "ucxx._lib.libucxx", "transceiver.nixl_transport", "nixl._api"):
    with suppress(ImportError, OSError):  # a fabric itself says what it misses
        importlib.import_module(name)

__all__ = ["fault_side"]
