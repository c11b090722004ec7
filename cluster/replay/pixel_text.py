"""Letters for the plot: a 5 x 7 dot matrix, five bytes a character, a byte a column with its lowest bit on top.

Only the characters that the plot writes are here; others are left blank.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["draw_text", "text_width"]

_SCALE = 2
_ADVANCE = 6 * _SCALE
_COLUMNS = {
    "0": "3e5149453e", "1": "00427f4000", "2": "4261514946", "3": "2141454b31", "4": "1814127f10", "5": "2745454539",
    "6": "3c4a494930", "7": "0171090503", "8": "3649494936", "9": "064949291e", ".": "0060600000", "%": "2313086462",
    "_": "4040404040", "-": "0808080808", "a": "2054545478", "b": "7f48444438", "c": "3844444420", "d": "384444487f",
    "e": "3854545418", "f": "087e090102", "g": "0c5252523e", "h": "7f08040478", "i": "00447d4000", "k": "7f10284400",
    "l": "00417f4000", "m": "7c04180478", "n": "7c08040478", "o": "3844444438", "p": "7c14141408", "r": "7c08040408",
    "s": "4854545420", "t": "043f444020", "u": "3c4040207c", "v": "1c2040201c", "w": "3c4030403c", "y": "0c5050503c",
    "B": "7f49494936", "G": "3e4149497a", "K": "7f08142241", "M": "7f020c027f",
}  # fmt: skip


def text_width(text: str) -> int:
    """Pixels from the first column to behind the last one."""
    return len(text) * _ADVANCE


def draw_text(image: NDArray[np.uint8], x: int, y: int, text: str, colour: tuple[int, int, int] = (0, 0, 0)) -> None:
    """Write on an image [height, width, 3] with the upper left corner at (x, y). Raises IndexError outside of it."""
    for index, character in enumerate(text):
        columns = np.frombuffer(bytes.fromhex(_COLUMNS.get(character, "")), dtype=np.uint8)
        dots = np.unpackbits(columns[:, None], axis=1, bitorder="little")
        for column, row in zip(*np.nonzero(dots), strict=True):
            left, top = x + index * _ADVANCE + int(column) * _SCALE, y + int(row) * _SCALE
            image[top : top + _SCALE, left : left + _SCALE] = colour
