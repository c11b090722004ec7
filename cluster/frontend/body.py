"""Reads a request's body: bounded, as JSON, into a pydantic model, with an error that names the field and the remedy.

Called by the routes. Never lets a malformed body end as anything but a ClusterError with a 4xx status.
"""

from __future__ import annotations

from typing import Any, TypeVar

import pydantic_core
from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

from cluster.errors import InvalidRequestError
from cluster.frontend.errors import ClientGoneError

__all__ = ["BodyTooLargeError", "parse_json_object", "read_body", "validate_body"]

_Model = TypeVar("_Model", bound=BaseModel)
_SHOWN_ERRORS = 5
_SHOWN_CHARS = 60


class BodyTooLargeError(InvalidRequestError):
    """The body has more bytes than the server reads."""

    http_status = 413
    code = "body_too_large"


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body. Raises BodyTooLargeError as soon as it is known to have more than `max_bytes`, and
    ClientGoneError when the client closes before it has sent all.
    """
    error = BodyTooLargeError(f"the body is larger than {max_bytes} bytes; shorten the prompt")
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and len(declared) < 20 and int(declared) > max_bytes:
        raise error
    chunks: list[bytes] = []
    size = 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > max_bytes:
                raise error
            chunks.append(chunk)
    except ClientDisconnect as gone:
        raise ClientGoneError from gone
    return b"".join(chunks)


def parse_json_object(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`. Raises InvalidRequestError for anything else, lone surrogates and NaN included."""
    try:
        value = pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(value, dict):
        raise InvalidRequestError(
            f'the body is JSON but not an object; send an object such as {{"model": ...}}, not {_shown(value)}',
            code="invalid_json",
        )
    return value


def validate_body(model: type[_Model], body: dict[str, Any]) -> _Model:
    """`body` as `model`. Raises InvalidRequestError that names every wrong field (the first few) and what to send."""
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise _as_request_error(model, error) from error


def _as_request_error(model: type[BaseModel], error: ValidationError) -> InvalidRequestError:
    complaints: list[str] = []
    first_param: str | None = None
    details = error.errors(include_url=False, include_context=False)
    for detail in details[:_SHOWN_ERRORS]:
        param, text = _complaint(model, detail)
        first_param = first_param or param
        complaints.append(text)
    if len(details) > _SHOWN_ERRORS:
        complaints.append(f"and {len(details) - _SHOWN_ERRORS} more")
    return InvalidRequestError("; ".join(complaints), param=first_param)


def _complaint(model: type[BaseModel], detail: Any) -> tuple[str | None, str]:
    message = str(detail["msg"]).removeprefix("Value error, ").removeprefix("Input ")
    if not detail["loc"]:  # a rule between fields: its message begins with the field
        return message.partition(":")[0], message
    param = _path(detail["loc"])
    field = model.model_fields.get(str(detail["loc"][0]))
    remedy = f"; send {field.description}" if field is not None and field.description else ""
    if detail["type"] == "missing":
        return param, f"{param}: is missing{remedy}"
    found = "" if isinstance(detail["input"], list | dict) else f", not {_shown(detail['input'])}"
    return param, f"{param}: {message}{found}{remedy}"


def _path(loc: tuple[int | str, ...]) -> str:
    path = str(loc[0])
    for step in loc[1:]:
        path += f"[{step}]" if isinstance(step, int) else f".{step}"
    return path


def _shown(value: object) -> str:
    """A short, printable form of a client's value."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    text = ascii(value)
    return text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 3] + "..."
