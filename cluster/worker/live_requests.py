"""The requests a worker is busy with, so that an abort reaches one anywhere: waiting, pulling, between steps."""

from __future__ import annotations

__all__ = ["LiveRequests"]


class LiveRequests:
    """Ids between their arrival at this worker and their last word. Used on the worker's event loop only."""

    def __init__(self) -> None:
        self._aborted: dict[str, bool] = {}

    def begin(self, request_id: str) -> None:
        """The request arrived."""
        self._aborted[request_id] = False

    def end(self, request_id: str) -> None:
        """The request's last word was said. Idempotent."""
        self._aborted.pop(request_id, None)

    def abort(self, request_id: str) -> bool:
        """Nobody wants the request any more. Whether it was live."""
        if request_id not in self._aborted:
            return False
        self._aborted[request_id] = True
        return True

    def is_aborted(self, request_id: str) -> bool:
        """Whether the request is live and was aborted."""
        return self._aborted.get(request_id, False)

    def ids(self) -> list[str]:
        """All live requests."""
        return list(self._aborted)
