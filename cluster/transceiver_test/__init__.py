"""Proves a fabric before a model is put on it: moves patterned KV between two sides and compares every byte."""

from __future__ import annotations

from cluster.transceiver_test.cells import Cell, CellResult, CellStatus, TransferCell, TurnCell, cells_of_sweep
from cluster.transceiver_test.config import TransceiverTestConfig, load_test_config
from cluster.transceiver_test.forced import Forced, unknown_cells
from cluster.transceiver_test.run import TestOptions, nodes_of_job, run_transceiver_test
from cluster.transceiver_test.submission import submit_test

__all__ = [
    "Cell",
    "CellResult",
    "CellStatus",
    "Forced",
    "TestOptions",
    "TransceiverTestConfig",
    "TransferCell",
    "TurnCell",
    "cells_of_sweep",
    "load_test_config",
    "nodes_of_job",
    "run_transceiver_test",
    "submit_test",
    "unknown_cells",
]
