"""Errors as OpenAI's error object, for answers and for streams that have begun.

Installed on the application by `install_error_handlers`. Whatever is not a ClusterError is logged and becomes a 500
without detail: a client never sees a traceback.
"""

from __future__ import annotations

import logging
import math
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from cluster.errors import ClusterError, InvalidRequestError, NotReadyError, QueueFullError

__all__ = [
    "ClientGoneError",
    "InvalidApiKeyError",
    "UnknownIdError",
    "UnsupportedHereError",
    "error_object",
    "error_response",
    "install_error_handlers",
]

_LOG = logging.getLogger(__name__)


class InvalidApiKeyError(InvalidRequestError):
    """The request carries no API key, or a wrong one."""

    http_status = 401
    code = "invalid_api_key"


class UnknownIdError(InvalidRequestError):
    """The named thing is not known here, or no longer."""

    http_status = 404
    code = "unknown_id"


class UnsupportedHereError(ClusterError):
    """The cluster behind this frontend cannot do what was asked."""

    http_status = 501
    code = "not_supported"


class ClientGoneError(Exception):
    """The client closed its connection; nobody reads an answer."""


def error_object(error: BaseException) -> dict[str, Any]:
    """The body for `error`. Anything but a ClusterError is logged and described as an internal error."""
    if isinstance(error, ClusterError):
        if error.http_status >= 500 and not isinstance(error, NotReadyError):  # probes ask again and again
            _LOG.warning("request failed: %s (%s)", error.message, error.code)
        return _body(error.message, error.error_type, error.param, error.code)
    _LOG.error("internal error while serving a request", exc_info=error)
    return _body("the server failed to answer; its log says why", "server_error", None, "internal_error")


def error_response(error: BaseException) -> JSONResponse:
    """`error` as an answer with its status."""
    headers: dict[str, str] = {}
    if isinstance(error, QueueFullError):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    if isinstance(error, InvalidApiKeyError):
        headers["www-authenticate"] = "Bearer"
    status = error.http_status if isinstance(error, ClusterError) else 500
    return JSONResponse(error_object(error), status_code=status, headers=headers)


def install_error_handlers(app: FastAPI) -> None:
    """Make every failure of a route an error object."""

    async def on_any(request: Request, error: Exception) -> JSONResponse:
        return error_response(error)

    async def on_http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        where = f"{request.method} {request.url.path}"
        match error.status_code:
            case HTTPStatus.NOT_FOUND:
                message, code = f"there is no {where} here; /openapi.json lists the routes", "unknown_route"
            case HTTPStatus.METHOD_NOT_ALLOWED:
                message, code = f"{where}: this route has another method; /openapi.json lists them", "unknown_method"
            case _:
                message, code = str(error.detail), "http_error"
        body = _body(message, "invalid_request_error", None, code)
        return JSONResponse(body, status_code=error.status_code, headers=error.headers)

    async def on_parameter(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        name = str(first["loc"][-1])
        return error_response(InvalidRequestError(f"{name}: {first['msg']}", param=name))

    async def on_client_gone(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse(_body("client closed the request", "client_closed", None, "client_closed"), status_code=499)

    app.add_exception_handler(ClusterError, on_any)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(RequestValidationError, on_parameter)
    app.add_exception_handler(ClientGoneError, on_client_gone)
    app.add_exception_handler(Exception, on_any)


def _body(message: str, kind: str, param: str | None, code: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
