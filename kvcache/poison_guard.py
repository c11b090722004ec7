"""Keeps a cache manager whose bookkeeping may be broken from being used.

Every call that changes the manager runs inside `with guard:`. The guard holds no state of the call, so calls may nest.
"""

from __future__ import annotations

from types import TracebackType

from kvcache.errors import ClosedManagerError, CorruptedCacheError, KvCacheError

__all__ = ["PoisonGuard"]


class PoisonGuard:
    """Refuses when `reason` is set; anything but a named error inside sets it. Both raise CorruptedCacheError.

    closed   the manager takes no new request: `check_open` refuses, nothing else does
    """

    __slots__ = ("closed", "reason")

    def __init__(self) -> None:
        self.reason: str | None = None
        self.closed = False

    def check(self) -> None:
        """Raises CorruptedCacheError once the manager is poisoned."""
        if self.reason is not None:
            raise CorruptedCacheError(f"the cache manager is poisoned ({self.reason}): restart the worker")

    def check_open(self) -> None:
        """Raises ClosedManagerError once the manager is closed."""
        if self.closed:
            raise ClosedManagerError("the cache manager was closed: make a new one")

    def __enter__(self) -> None:
        if self.reason is not None:
            self.check()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            return
        if isinstance(error, CorruptedCacheError):
            self.reason = str(error)
        elif isinstance(error, Exception) and not isinstance(error, KvCacheError):
            self.reason = f"{type(error).__name__}: {error}"
            raise CorruptedCacheError(f"the cache manager failed half-way ({self.reason})") from error
