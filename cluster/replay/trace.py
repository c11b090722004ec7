"""Reading request traces: the re-encoded weka and mooncake files, raw mooncake files, and aiperf session files.

A block id stands for a whole prefix, so equal id means reusable. Ids are made global here; nothing is scheduled yet.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["HALVES", "Trace", "TraceError", "TraceRequest", "load_trace"]

HALVES = ("all", "even", "odd")
_SHARED = -1
_MOST_CONTINUATIONS = 32  # of one block within a conversation: rewinds and retries


class TraceError(Exception):
    """The file is not a trace that can be read; the message names file and line."""


@dataclass(frozen=True, slots=True, eq=False)
class TraceRequest:
    """One request. `blocks` are the global ids of its prompt's full blocks; `time` is in seconds.

    Raises ValueError for a stop reason or a number of output tokens that no turn can end with.
    """

    root: str
    conversation: str
    time: float
    input_tokens: int
    output_tokens: int
    blocks: NDArray[np.int64]
    api_seconds: float = 0.0
    stop_reason: str | None = None

    def __post_init__(self) -> None:
        if len(self.stop_reason or "") > 64 or not 0 <= self.output_tokens < 2**31:
            raise ValueError("a stop reason has at most 64 characters, an output 0 .. 2^31 - 1 tokens")


@dataclass(frozen=True, slots=True)
class Trace:
    """`closed_loop`: times are relative to each root conversation (replay it in lanes)."""

    name: str
    block_tokens: int
    requests: tuple[TraceRequest, ...]
    closed_loop: bool

    def coarsened(self, block_tokens: int) -> Trace:
        """The same trace with blocks of `block_tokens` tokens (a multiple: every k-th id; a divisor: ids repeated)."""
        if block_tokens == self.block_tokens:
            return self
        if block_tokens % self.block_tokens == 0:
            every = block_tokens // self.block_tokens
            cut = [request.blocks[every - 1 :: every] for request in self.requests]
        elif self.block_tokens % block_tokens == 0:
            parts = self.block_tokens // block_tokens
            inner = np.arange(parts, dtype=np.int64)
            cut = [(request.blocks[:, None] * parts + inner).ravel() for request in self.requests]
        else:
            raise TraceError(
                f"{self.name} has blocks of {self.block_tokens} tokens: --block must be a multiple or a divisor of it"
            )
        requests = tuple(_with_blocks(request, blocks) for request, blocks in zip(self.requests, cut, strict=True))
        return Trace(self.name, block_tokens, requests, self.closed_loop)

    def half(self, which: str) -> Trace:
        """The requests of every second root conversation by name, `even` from the first or `odd` from the second on,
        to tune on one half and report on the other; `all` is the trace itself.
        """
        if which == "all":
            return self
        if which not in HALVES:
            raise TraceError(f"unknown part {which!r} of a trace: use one of {', '.join(HALVES)}")
        chosen = set(sorted({request.root for request in self.requests})[HALVES.index(which) - 1 :: 2])
        requests = tuple(request for request in self.requests if request.root in chosen)
        return Trace(self.name, self.block_tokens, requests, self.closed_loop)


def _with_blocks(request: TraceRequest, blocks: NDArray[np.int64]) -> TraceRequest:
    return TraceRequest(
        request.root,
        request.conversation,
        request.time,
        request.input_tokens,
        request.output_tokens,
        blocks,
        request.api_seconds,
        request.stop_reason,
    )


def load_trace(path: Path, limit: int | None = None) -> Trace:
    """Read a `.jsonl` or `.jsonl.gz` trace; the format is told by its fields. Raises TraceError."""
    rows = _rows(path, limit)
    try:
        first = next(rows)
    except StopIteration:
        raise TraceError(f"{path}: the file holds no request") from None
    every = _chain(first, rows)
    try:
        if "tt" in first and "c" in first:
            return _weka(path, every)
        if "b" in first:
            return _mooncake(path, every)
        if "hash_ids" in first:
            return _raw_hash_ids(path, every)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise TraceError(f"{path}: a row lacks or misspells a field ({error!r})") from error
    raise TraceError(f"{path}: unknown trace format with fields {', '.join(sorted(first))}")


def _chain(first: dict[str, Any], rest: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    yield first
    yield from rest


def _rows(path: Path, limit: int | None) -> Iterator[dict[str, Any]]:
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines):
                if limit is not None and number >= limit:
                    return
                if line.strip():
                    row = json.loads(line)
                    if not isinstance(row, dict):
                        raise TraceError(f"{path}:{number + 1}: not a JSON object")
                    yield row
    except EOFError as error:
        raise TraceError(f"{path} ends early: the compressed file was cut off, copy it again") from error
    except (OSError, UnicodeDecodeError, zlib.error) as error:
        raise TraceError(f"cannot read {path}: {error}") from error
    except json.JSONDecodeError as error:
        raise TraceError(f"{path}: not JSON lines ({error})") from error


def _runs(coded: list[int]) -> NDArray[np.int64]:
    parts = [np.arange(start, start + n, dtype=np.int64) for start, n in zip(coded[::2], coded[1::2], strict=True)]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)


class _WekaIds:
    """Local block ids made global; the tool and system prompt's blocks are common to all conversations."""

    def __init__(self) -> None:
        self._next = 1
        self._common: dict[tuple[int, int], NDArray[np.int64]] = {}
        self._local: dict[str, NDArray[np.int64]] = {}

    def map(self, root: str, local: NDArray[np.int64], block: int, tools: int, system: int) -> NDArray[np.int64]:
        """Global ids of one prompt that starts with `tools` and then `system` tokens known by their lengths."""
        table = self._local.get(root)
        top = int(local.max(initial=0)) + 1
        if table is None or len(table) < top:
            grown = np.zeros(max(top, 2 * len(table) if table is not None else top), dtype=np.int64)
            if table is not None:
                grown[: len(table)] = table
            table = self._local[root] = grown
        first, shared = min(tools // block, len(local)), min((tools + system) // block, len(local))
        own = local[shared:]
        fresh = np.unique(own[table[own] == 0])
        table[fresh] = np.arange(self._next, self._next + len(fresh), dtype=np.int64)
        self._next += len(fresh)
        common = self._prefix((tools, -1), first)
        return np.concatenate([common, self._prefix((tools, system), shared)[first:], table[own]])

    def _prefix(self, key: tuple[int, int], shared: int) -> NDArray[np.int64]:
        common = self._common.get(key, np.zeros(0, dtype=np.int64))
        if len(common) < shared:
            more = np.arange(self._next, self._next + shared - len(common), dtype=np.int64)
            self._next += len(more)
            common = self._common[key] = np.concatenate([common, more])
        return common[:shared]


def _weka(path: Path, rows: Iterator[dict[str, Any]]) -> Trace:
    ids, requests, block = _WekaIds(), [], 64
    for row in rows:
        root = str(row["p"] or row["c"])
        local = _runs(row["b"])[: int(row["i"]) // block]
        blocks = ids.map(root, local, block, int(row["tt"]), int(row["st"]))
        requests.append(
            TraceRequest(
                root,
                str(row["c"]),
                float(row["t"]),
                int(row["i"]),
                int(row["o"]),
                blocks,
                float(row["a"] or 0.0),
                None if row["s"] is None else str(row["s"]),
            )
        )
    return Trace(path.name, block, tuple(requests), closed_loop=True)


def _mooncake(path: Path, rows: Iterator[dict[str, Any]]) -> Trace:
    block = 512
    plain = [(float(r["t"]), int(r["i"]), int(r["o"]), _runs(r["b"])[: int(r["i"]) // block] + 1) for r in rows]
    return Trace(path.name, block, tuple(_derived(plain)), closed_loop=False)


def _raw_hash_ids(path: Path, rows: Iterator[dict[str, Any]]) -> Trace:
    """Mooncake's own files and aiperf's `mooncake_trace` format: hash_ids, input_length, timestamp in milliseconds."""
    block, plain, sessions = 512, [], []
    for row in rows:
        tokens = int(row["input_length"])
        ids = np.asarray(row["hash_ids"], dtype=np.int64)[: tokens // block] + 1
        plain.append((float(row.get("timestamp", 0.0)) / 1000, tokens, int(row.get("output_length", 0)), ids))
        sessions.append(row.get("session_id"))
    derived = list(_derived(plain))
    if any(session is not None for session in sessions):
        derived = [
            one
            if session is None
            else TraceRequest(str(session), str(session), one.time, one.input_tokens, one.output_tokens, one.blocks)
            for one, session in zip(derived, sessions, strict=True)
        ]
    return Trace(path.name, block, tuple(derived), closed_loop=False)


def _derived(rows: list[tuple[float, int, int, NDArray[np.int64]]]) -> Iterator[TraceRequest]:
    """Name conversations: the deepest block that exactly one conversation has had before names the parent. A block
    that many different ones follow is a system prompt, shared from the start.
    """
    owner: dict[int, int] = dict.fromkeys(_system_prompts([row[3] for row in rows]), _SHARED)
    for serial, (time, tokens, output, blocks) in enumerate(rows):
        mine = serial
        for block in blocks[::-1].tolist():
            seen = owner.get(block)
            if seen is not None and seen != _SHARED:
                mine = seen
                break
        for block in blocks.tolist():
            if owner.setdefault(block, mine) != mine:
                owner[block] = _SHARED
        yield TraceRequest(f"d{mine}", f"d{mine}", time, tokens, output, blocks)


def _system_prompts(paths: list[NDArray[np.int64]]) -> list[int]:
    """Blocks that more than `_MOST_CONTINUATIONS` different blocks follow."""
    pairs = [np.stack([path[:-1], path[1:]], axis=1) for path in paths if len(path) > 1]
    if not pairs:
        return []
    blocks, continuations = np.unique(np.unique(np.concatenate(pairs), axis=0)[:, 0], return_counts=True)
    return [int(block) for block in blocks[continuations > _MOST_CONTINUATIONS]]
