"""Where the machines' decisions come from: hypothesis, which can shrink them, or a seed, which costs next to none."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol, TypeVar

from hypothesis import strategies as st

__all__ = ["Choices", "Drawn", "Seeded"]

T = TypeVar("T")


class Choices(Protocol):
    """Small decisions."""

    def number(self, low: int, high: int) -> int:
        """low .. high"""
        ...

    def pick(self, items: Sequence[T]) -> T:
        """One of them."""
        ...

    def tokens(self, least: int, most: int) -> list[int]:
        """least .. most token ids of a tiny vocabulary."""
        ...


class Drawn:
    """Choices of hypothesis."""

    def __init__(self, data: st.DataObject) -> None:
        self._data = data

    def number(self, low: int, high: int) -> int:
        return self._data.draw(st.integers(low, high))

    def pick(self, items: Sequence[T]) -> T:
        return items[self._data.draw(st.integers(0, len(items) - 1))]

    def tokens(self, least: int, most: int) -> list[int]:
        return self._data.draw(st.lists(st.integers(0, 2), min_size=least, max_size=most))


class Seeded:
    """Choices of a seeded generator."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)

    def number(self, low: int, high: int) -> int:
        return self._random.randint(low, high)

    def pick(self, items: Sequence[T]) -> T:
        return items[int(self._random.random() * len(items))]

    def tokens(self, least: int, most: int) -> list[int]:
        return [int(self._random.random() * 3) for _ in range(self._random.randint(least, most))]
