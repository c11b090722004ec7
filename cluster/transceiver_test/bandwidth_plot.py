"""A plot of bandwidth by transfer size as SVG text, both axes logarithmic. Pure; needs no plotting library."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

__all__ = ["bandwidth_svg"]

_WIDTH, _HEIGHT, _LEFT, _TOP, _LINE = 900, 420, 70, 20, 14
_COLOURS = ("#1b6ca8", "#c8553d", "#2e7d32", "#8e44ad", "#b8860b", "#00838f", "#ad1457", "#5d4037")


def bandwidth_svg(lines: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """`lines`: name -> (bytes of a transfer, GB/s) points. Points that are not positive are left out."""
    kept = {name: sorted(p for p in points if p[0] > 0 and p[1] > 0) for name, points in lines.items()}
    kept = {name: points for name, points in kept.items() if points}
    height = _HEIGHT + 60 + _LINE * len(kept)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" font-family="sans-serif" '
        f'font-size="11"><rect width="100%" height="100%" fill="white"/>'
    ]
    if kept:
        xs = [math.log10(x) for points in kept.values() for x, _ in points]
        ys = [math.log10(y) for points in kept.values() for _, y in points]
        x_range = (math.floor(min(xs)), math.ceil(max(xs)) + (math.floor(min(xs)) == math.ceil(max(xs))))
        y_range = (math.floor(min(ys)), math.ceil(max(ys)) + (math.floor(min(ys)) == math.ceil(max(ys))))
        parts += _axes(x_range, y_range)
        for index, (name, points) in enumerate(kept.items()):
            colour = _COLOURS[index % len(_COLOURS)]
            dash = f' stroke-dasharray="{2 + 2 * (index // len(_COLOURS))},3"' if index >= len(_COLOURS) else ""
            path = " ".join(f"{_x(x, x_range):.1f},{_y(y, y_range):.1f}" for x, y in points)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"{dash}/>')
            parts += [
                f'<circle cx="{_x(x, x_range):.1f}" cy="{_y(y, y_range):.1f}" r="2.5" fill="{colour}"/>'
                for x, y in points
            ]
            row = _HEIGHT + 45 + _LINE * index
            parts.append(f'<text x="{_LEFT}" y="{row}" fill="{colour}">{escape(name)}</text>')
    parts.append("</svg>\n")
    return "\n".join(parts)


def _x(value: float, limits: tuple[int, int]) -> float:
    return _LEFT + (math.log10(value) - limits[0]) / (limits[1] - limits[0]) * (_WIDTH - _LEFT - 20)


def _y(value: float, limits: tuple[int, int]) -> float:
    return _HEIGHT - (math.log10(value) - limits[0]) / (limits[1] - limits[0]) * (_HEIGHT - _TOP)


def _axes(x_range: tuple[int, int], y_range: tuple[int, int]) -> list[str]:
    parts = []
    for power in range(x_range[0], x_range[1] + 1):
        x = _x(10.0**power, x_range)
        parts.append(f'<line x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{_HEIGHT}" stroke="#ddd"/>')
        parts.append(f'<text x="{x:.1f}" y="{_HEIGHT + 14}" text-anchor="middle">{_bytes(power)}</text>')
    for power in range(y_range[0], y_range[1] + 1):
        y = _y(10.0**power, y_range)
        parts.append(f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{_WIDTH - 20}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{10.0**power:g} GB/s</text>')
    parts.append(f'<text x="{_WIDTH // 2}" y="{_HEIGHT + 28}" text-anchor="middle">bytes of a transfer</text>')
    return parts


def _bytes(power: int) -> str:
    units = ("B", "kB", "MB", "GB", "TB")
    index = min(max(power, 0) // 3, len(units) - 1)
    return f"{10 ** (power - 3 * index)} {units[index]}"
