"""Benchmarks that a user can run; each package holds plain functions and one command calls them."""

from __future__ import annotations

__all__: list[str] = []
