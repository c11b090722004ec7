"""A PNG line plot of hit rate over capacity, drawn with the standard library: no plotting package is needed.

One colour an eviction order; the Belady bound is grey, the infinite-cache rate light grey; the
horizontal axis is logarithmic. The exact figures are in the table and the JSON file.
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

from cluster.replay.pixel_text import draw_text, text_width

__all__ = ["write_plot"]

_WIDTH, _HEIGHT, _MARGIN = 800, 500, 70
_LETTER_HEIGHT = 14
_COLOURS = {"lru": (31, 119, 180), "turn_aware": (214, 39, 40), "belady": (120, 120, 120), "infinite": (200, 200, 200)}
_OTHER = (44, 160, 44)

Image = NDArray[np.uint8]


def write_plot(path: Path, records: list[dict[str, Any]]) -> None:
    """Draw the runs of `kvferry replay`. Raises OSError when the file cannot be written."""
    image = np.full((_HEIGHT, _WIDTH, 3), 255, dtype=np.uint8)
    capacities = sorted({record["capacity_tokens"] for record in records})
    low, high = math.log(capacities[0]), math.log(capacities[-1])
    for tenth in range(11):
        left, y = _point(0.0, tenth / 10)
        _line(image, (left, y), _point(1.0, tenth / 10), (235, 235, 235))
        if tenth % 2 == 0:
            _text_left_of(image, left - 8, y - _LETTER_HEIGHT // 2, f"{10 * tenth}%")
    _line(image, _point(0.0, 0.0), _point(1.0, 0.0), (0, 0, 0))
    _line(image, _point(0.0, 0.0), _point(0.0, 1.0), (0, 0, 0))
    series: dict[str, list[tuple[float, float]]] = {}
    for record in sorted(records, key=lambda one: float(one["capacity_tokens"])):
        x = 0.5 if high == low else (math.log(record["capacity_tokens"]) - low) / (high - low)
        series.setdefault(record["eviction"], []).append((x, record["hit_rate"]))
        for name in ("belady", "infinite"):
            if record[f"{name}_hit_rate"] is not None:
                series.setdefault(name, []).append((x, record[f"{name}_hit_rate"]))
    taken = -_WIDTH
    for size in capacities:
        x = _point(0.5 if high == low else (math.log(size) - low) / (high - low), 0.0)[0]
        label = _tokens(size)
        if x - text_width(label) // 2 > taken:
            draw_text(image, x - text_width(label) // 2, _HEIGHT - _MARGIN + 10, label)
            taken = x + text_width(label) // 2 + 6
    title = "tokens of cache"
    draw_text(image, (_WIDTH - text_width(title)) // 2, _HEIGHT - 30, title)
    draw_text(image, 10, 10, "hit rate")
    x = _WIDTH - _MARGIN - sum(text_width(name) + 40 for name in series)
    for name in series:
        colour = _COLOURS.get(name, _OTHER)
        image[14:20, x : x + 16] = colour
        draw_text(image, x + 22, 10, name, colour)
        x += text_width(name) + 40
    for name, points in series.items():
        colour = _COLOURS.get(name, _OTHER)
        for first, second in pairwise(points):
            _line(image, _point(*first), _point(*second), colour, thick=True)
        for point in points:
            x, y = _point(*point)
            image[y - 3 : y + 4, x - 3 : x + 4] = colour
    path.write_bytes(_png(image))


def _tokens(size: int) -> str:
    for unit, scale in (("G", 1_000_000_000), ("M", 1_000_000), ("K", 1_000)):
        if size >= scale:
            return f"{size / scale:.3g}{unit}"
    return str(size)


def _text_left_of(image: Image, x: int, y: int, text: str) -> None:
    """Text that ends at `x`."""
    draw_text(image, x - text_width(text), y, text)


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
