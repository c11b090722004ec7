"""`kvferry bench transfer`: the transceiver against a memory copy, ucx_perftest, NIXL, Ray's store and raw sockets."""

from __future__ import annotations

from cluster.bench.transfer.bench import run_transfer_bench
from cluster.bench.transfer.rows import BenchRow, render_rows, write_rows

__all__ = ["BenchRow", "render_rows", "run_transfer_bench", "write_rows"]
