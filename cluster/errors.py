"""Errors that a request or an operator can meet, each with the HTTP status and code that the frontend sends.

ClusterError
├── InvalidRequestError    400  the request can never be served as it is
├── PromptTooLongError     413  more tokens than the model or the cache can hold
├── ModelNotFoundError     404
├── QueueFullError         429  try again after `retry_after_s`
├── NotReadyError          503  no worker can take the request now
├── WorkerLostError        502  a worker died and the retries are used up
├── TransferFailedError    502  KV could not be moved and the retries are used up
├── EngineFailedError      500  a worker failed while it computed this request
│   └── EngineBrokenError       its engine cannot be trusted any more: the worker is replaced
└── StartupError           ---  the cluster cannot be started (command line: exit 1)
"""

from __future__ import annotations

__all__ = [
    "ClusterError",
    "EngineBrokenError",
    "EngineFailedError",
    "InvalidRequestError",
    "ModelNotFoundError",
    "NotReadyError",
    "PromptTooLongError",
    "QueueFullError",
    "StartupError",
    "TransferFailedError",
    "WorkerLostError",
]


class ClusterError(Exception):
    """Base of the tree. `message` says what to change; `param` names the field at fault, if one is."""

    http_status = 500
    code = "internal_error"
    error_type = "server_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code

    def __reduce__(self) -> tuple[object, ...]:  # errors cross process boundaries with their fields
        return (_rebuild, (type(self), self.message, self.param, self.code))


def _rebuild(kind: type[ClusterError], message: str, param: str | None, code: str) -> ClusterError:
    return kind(message, param=param, code=code)


class InvalidRequestError(ClusterError):
    """The request can never be served as it is."""

    http_status = 400
    code = "invalid_request"
    error_type = "invalid_request_error"


class PromptTooLongError(InvalidRequestError):
    """The prompt has more tokens than the model or the cache can hold."""

    http_status = 413
    code = "context_length_exceeded"


class ModelNotFoundError(InvalidRequestError):
    """The named model is not served here."""

    http_status = 404
    code = "model_not_found"


class QueueFullError(ClusterError):
    """Too many requests are in flight."""

    http_status = 429
    code = "queue_full"
    error_type = "rate_limit_error"
    retry_after_s = 1


class NotReadyError(ClusterError):
    """No worker can take the request now."""

    http_status = 503
    code = "not_ready"


class WorkerLostError(ClusterError):
    """A worker died while it served the request."""

    http_status = 502
    code = "worker_lost"


class TransferFailedError(ClusterError):
    """KV blocks could not be moved between two workers."""

    http_status = 502
    code = "kv_transfer_failed"


class EngineFailedError(ClusterError):
    """A worker failed while it computed the request."""

    code = "engine_failed"


class EngineBrokenError(EngineFailedError):
    """A worker's engine or cache cannot be trusted any more; whoever supervises it replaces it."""

    code = "engine_broken"


class StartupError(ClusterError):
    """The cluster cannot be started."""

    code = "startup_failed"
