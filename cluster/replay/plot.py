"""A PNG line plot of hit rate over capacity, drawn with the standard library: no plotting package is needed.

One colour an eviction order; the Belady bound is grey, the infinite-cache rate light grey; the horizontal axis is
logarithmic. The exact figures are in the table and the JSON file.
"""

from __future__ import annotations

import math
import struct
import zlib
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["write_plot"]

_WIDTH, _HEIGHT, _MARGIN = 800, 500, 50
_COLOURS = {"lru": (31, 119, 180), "turn_aware": (214, 39, 40), "belady": (120, 120, 120), "infinite": (200, 200, 200)}

Image = NDArray[np.uint8]


def write_plot(path: Path, records: list[dict[str, Any]]) -> None:
    """Draw the runs of `kvferry replay`. Raises OSError when the file cannot be written."""
    image = np.full((_HEIGHT, _WIDTH, 3), 255, dtype=np.uint8)
    capacities = sorted({record["capacity_tokens"] for record in records})
    low, high = math.log(capacities[0]), math.log(capacities[-1])
    for tenth in range(11):
        _line(image, _point(0.0, tenth / 10), _point(1.0, tenth / 10), (235, 235, 235))
    _line(image, _point(0.0, 0.0), _point(1.0, 0.0), (0, 0, 0))
    _line(image, _point(0.0, 0.0), _point(0.0, 1.0), (0, 0, 0))
    series: dict[str, list[tuple[float, float]]] = {}
    for record in sorted(records, key=lambda one: float(one["capacity_tokens"])):
        x = 0.5 if high == low else (math.log(record["capacity_tokens"]) - low) / (high - low)
        series.setdefault(record["eviction"], []).append((x, record["hit_rate"]))
        for name in ("belady", "infinite"):
            if record[f"{name}_hit_rate"] is not None:
                series.setdefault(name, []).append((x, record[f"{name}_hit_rate"]))
    for name, points in series.items():
        colour = _COLOURS.get(name, (44, 160, 44))
        for first, second in pairwise(points):
            _line(image, _point(*first), _point(*second), colour, thick=True)
        for point in points:
            x, y = _point(*point)
            image[y - 3 : y + 4, x - 3 : x + 4] = colour
    path.write_bytes(_png(image))


def _point(x: float, y: float) -> tuple[int, int]:
    return (
        round(_MARGIN + x * (_WIDTH - 2 * _MARGIN)),
        round(_HEIGHT - _MARGIN - max(0.0, min(1.0, y)) * (_HEIGHT - 2 * _MARGIN)),
    )


def _line(
    image: Image, start: tuple[int, int], end: tuple[int, int], colour: tuple[int, int, int], thick: bool = False
) -> None:
    steps = max(abs(end[0] - start[0]), abs(end[1] - start[1]), 1)
    xs = np.linspace(start[0], end[0], steps + 1).round().astype(int)
    ys = np.linspace(start[1], end[1], steps + 1).round().astype(int)
    image[ys, xs] = colour
    if thick:
        image[ys + 1, xs] = colour


def _png(image: Image) -> bytes:
    height, width, _ = image.shape
    raw = b"".join(b"\x00" + image[row].tobytes() for row in range(height))

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(raw)) + chunk(b"IEND", b"")
