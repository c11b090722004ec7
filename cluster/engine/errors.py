"""Errors of the engine: what a caller may catch and show to a user without a traceback."""

from __future__ import annotations

__all__ = ["EngineError", "InvalidStepError", "ModelLoadError"]


class EngineError(Exception):
    """Base of every error that the engine raises on purpose."""


class ModelLoadError(EngineError):
    """A model, its weights or its tokenizer cannot be loaded; the message says what to do about it."""


class InvalidStepError(EngineError):
    """A step plan that no runner may execute (wrong page table, token or position): a fault of the caller."""
