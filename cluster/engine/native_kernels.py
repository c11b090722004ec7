"""CPU kernels in C++ (native_kernels.cpp), compiled once a machine with g++ and called through ctypes.

Optional: without a compiler, with another element type or with `KVFERRY_NATIVE=off` the engine uses TorchKernels, to
which these are compared in the tests. Calls release the GIL.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from cluster.engine.attention import GatherAttention, SequencePages
from cluster.engine.errors import EngineError, ModelLoadError
from cluster.engine.weight_cache import WeightCache, cache_directory

__all__ = ["NativeKernels", "load_native_library"]

_LOG = logging.getLogger(__name__)
_SOURCE = Path(__file__).with_suffix(".cpp")
_LIBRARY = "kernels.so"
_FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-ffp-contract=fast", "-std=c++17", "-shared", "-fPIC")
_COMPILE_TIMEOUT_S = 120.0
_FEW_ROWS = 32  # above this the libraries behind torch are the faster ones, for products and for attention
_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64


@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    many: tuple[tuple[int, GatherAttention], ...]  # first row and torch attention of each long chunk
    first_row: NDArray[np.int64]  # this and the following: of the other sequences
    row_end: NDArray[np.int64]
    start: NDArray[np.int64]
    tables: NDArray[np.int64]
    table_at: NDArray[np.int64]


class NativeKernels:
    """Kernels for float32 on the CPU. A row's result is the same to the bit in every batch of up to 32 rows."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._linear = library.kvferry_linear
        self._linear.argtypes = [_POINTER] * 3 + [_INT] * 3
        self._linear.restype = None
        self._attention = library.kvferry_attention
        self._attention.argtypes = [_POINTER, _INT, _POINTER, _POINTER, *[_INT] * 6, *[_POINTER] * 5]
        self._attention.restype = None

    def linear(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """See Kernels."""
        count, columns = rows.shape
        if count > _FEW_ROWS:
            return torch.nn.functional.linear(rows, weight)
        rows = rows.contiguous()
        out = torch.empty((count, len(weight)), dtype=torch.float32)
        self._linear(rows.data_ptr(), weight.data_ptr(), out.data_ptr(), count, len(weight), columns)
        return out

    def plan(self, sequences: Sequence[SequencePages]) -> _Plan:
        """See Kernels."""
        ends = np.cumsum([one.end - one.start for one in sequences], dtype=np.int64)
        few = [(one, end) for one, end in zip(sequences, ends, strict=True) if one.end - one.start <= _FEW_ROWS]
        many = [(one, end) for one, end in zip(sequences, ends, strict=True) if one.end - one.start > _FEW_ROWS]
        return _Plan(
            many=tuple(
                (int(end) - one.end + one.start, GatherAttention(torch.from_numpy(one.pages), one.start, one.end))
                for one, end in many
            ),
            first_row=np.array([end - one.end + one.start for one, end in few], dtype=np.int64),
            row_end=np.array([end for _, end in few], dtype=np.int64),
            start=np.array([one.start for one, _ in few], dtype=np.int64),
            tables=np.concatenate([one.pages for one, _ in few]) if few else np.empty(0, dtype=np.int64),
            table_at=np.cumsum([0, *(len(one.pages) for one, _ in few)], dtype=np.int64),
        )

    def attend(self, plan: _Plan, pool: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        """See Kernels."""
        count, heads, dim = query.shape
        _, _, kv_heads, block, _ = pool.shape
        if query.stride(1) != dim or query.stride(2) != 1:
            query = query.contiguous()
        if not pool[0].is_contiguous():
            raise EngineError("a layer's part of a page must be one span of memory")
        out = torch.empty((count, heads, dim), dtype=torch.float32)
        for begin, attention in plan.many:
            out[begin : begin + attention.rows] = attention(pool, query[begin : begin + attention.rows])
        self._attention(
            query.data_ptr(),
            query.stride(0),
            out.data_ptr(),
            pool.data_ptr(),
            pool.stride(0),
            heads,
            kv_heads,
            block,
            dim,
            len(plan.start),
            plan.first_row.ctypes.data,
            plan.row_end.ctypes.data,
            plan.start.ctypes.data,
            plan.tables.ctypes.data,
            plan.table_at.ctypes.data,
        )
        return out.view(count, heads * dim)


def load_native_library() -> ctypes.CDLL | None:
    """The compiled kernels, or None (with a log line that says why) where they cannot be had.

    Compiles for a few seconds the first time on a machine; asked again, answers at once.
    """
    if os.environ.get("KVFERRY_NATIVE", "").lower() in ("off", "0", "false"):
        return None
    return _load(cache_directory())


@functools.cache
def _load(cache: Path) -> ctypes.CDLL | None:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        _LOG.info("no C++ compiler (g++ or clang++): the engine uses torch's slower kernels")
        return None
    try:
        entry = WeightCache(cache).get(f"native-{_key(compiler)}", _is_complete, functools.partial(_compile, compiler))
        return ctypes.CDLL(str(entry / _LIBRARY))
    except (ModelLoadError, OSError) as error:
        _LOG.warning("the native kernels are not used, torch's slower ones are: %s", error)
        return None


def _key(compiler: str) -> str:
    """Of everything that the compiled code depends on: a cache folder may be shared by unlike machines."""
    digest = hashlib.sha256(_SOURCE.read_bytes())
    for text in (compiler, *_FLAGS, platform.machine(), _cpu_features()):
        digest.update(text.encode() + b"\0")
    return digest.hexdigest()[:32]


def _cpu_features() -> str:
    """The instruction sets of this CPU, as Linux lists them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() + platform.node()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.node())


def _is_complete(folder: Path) -> bool:
    return (folder / _LIBRARY).is_file()


def _compile(compiler: str, folder: Path) -> None:
    _LOG.info("compiling the engine's CPU kernels, once for this machine")
    command = [compiler, *_FLAGS, "-o", str(folder / _LIBRARY), str(_SOURCE)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise ModelLoadError(f"{compiler} took longer than {_COMPILE_TIMEOUT_S:.0f} s") from error
    if done.returncode:
        raise ModelLoadError(f"{compiler} failed: {done.stderr.strip()[-500:]}")
