"""Errors of the cache manager. Every message says what to change.

Raised by the `kvcache` package only. A call that raises one of these (bar `CorruptedCacheError`) has changed nothing.
"""

from __future__ import annotations

__all__ = [
    "ClosedManagerError",
    "ClosedSequenceError",
    "CorruptedCacheError",
    "DropHandleUsedError",
    "InvalidArgumentError",
    "InvalidSizeError",
    "InvalidTokensError",
    "KvCacheError",
    "NeverFitsError",
    "OutOfPagesError",
    "PinLimitError",
    "SuspendedSequenceError",
    "TurnEndedError",
    "UnknownLifeCycleError",
]


class KvCacheError(Exception):
    """Base of all errors of this package."""


class OutOfPagesError(KvCacheError):
    """No free page and nothing left to evict: try again when another sequence has closed."""


class NeverFitsError(KvCacheError):
    """More tokens than the pool can hold even when it is empty."""


class InvalidTokensError(KvCacheError, ValueError):
    """Token ids that are not a non-empty one-dimensional int32 sequence of ids >= 0, or that contradict the prompt."""


class InvalidArgumentError(KvCacheError, TypeError):
    """An argument of a type that the call does not take."""


class InvalidSizeError(KvCacheError, ValueError):
    """A size, range or position out of bounds (negative, zero, beyond capacity)."""


class UnknownLifeCycleError(KvCacheError, IndexError):
    """A layer group that the layout does not have."""


class ClosedManagerError(KvCacheError):
    """The cache manager was closed: make a new one."""


class ClosedSequenceError(KvCacheError):
    """The sequence was closed; create a new one."""


class SuspendedSequenceError(KvCacheError):
    """The sequence's pages were moved to host memory: resume it first, or close it when its content was lost."""


class TurnEndedError(KvCacheError):
    """`end_turn` was already called: nothing can be added to the sequence any more."""


class DropHandleUsedError(KvCacheError):
    """A drop handle is single-use and was dropped already."""


class PinLimitError(KvCacheError):
    """Peers hold as many pins as the configuration allows."""


class CorruptedCacheError(KvCacheError):
    """An invariant is broken. The manager is poisoned and refuses every later call; restart the worker."""
