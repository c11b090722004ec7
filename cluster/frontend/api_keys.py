"""API keys: read from a file at start-up, compared in constant time by a plain ASGI middleware.

Liveness, readiness, version and metrics stay open for probes. Only digests of the keys are kept in memory.
"""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.errors import StartupError
from cluster.frontend.errors import InvalidApiKeyError, error_response

__all__ = ["ApiKeyMiddleware", "read_api_keys"]

_KEY = "server.api_keys_file"
_OPEN_PATHS = frozenset({"/health", "/health/live", "/health/ready", "/metrics", "/version"})


def read_api_keys(path: str | Path) -> frozenset[bytes]:
    """SHA-256 digests of the keys in `path`, one a line; empty lines and lines with # in front are skipped.

    Raises StartupError when the file cannot be read or holds no key: a server that should ask for keys must not start
    without any.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(
            f"server.api_keys_file: cannot read {path}: {error}", param="server.api_keys_file"
        ) from error
    keys = [line.strip() for line in lines]
    digests = frozenset(hashlib.sha256(key.encode()).digest() for key in keys if key and not key.startswith("#"))
    if not digests:
        raise StartupError(f"{_KEY}: {path} holds no key; write one a line", param=_KEY)
    return digests


class ApiKeyMiddleware:
    """Answers 401 to requests without a known key in `Authorization: Bearer KEY`."""

    def __init__(self, app: ASGIApp, digests: frozenset[bytes]) -> None:
        self._app = app
        self._digests = digests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it."""
        if scope["type"] != "http" or scope["path"] in _OPEN_PATHS or self._is_known(scope):
            await self._app(scope, receive, send)
            return
        error = InvalidApiKeyError(
            "no valid API key; send the header `Authorization: Bearer KEY` with a key of this server"
        )
        await error_response(error)(scope, receive, send)

    def _is_known(self, scope: Scope) -> bool:
        values = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(values) != 1 or values[0][:7].lower() != b"bearer ":
            return False
        digest = hashlib.sha256(values[0][7:].strip()).digest()
        known = False
        for candidate in self._digests:  # all of them: the time taken says nothing about which one matched
            known |= hmac.compare_digest(digest, candidate)
        return known
