"""`ucp`-shaped names for programs written for ucx-py, served by ucxx: ``from transceiver import ucp``.

For users' own messages only; the transceiver itself does not use it. It adds no behaviour of its own: every object is
ucxx's, renamed. What differs from ucx-py is listed in docs/transceiver.md ("Coming from ucx-py").
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import ucxx
from ucxx import exceptions as _exceptions

__all__ = [
    "UCXBusy",
    "UCXCanceled",
    "UCXCloseError",
    "UCXConfigError",
    "UCXConnectionReset",
    "UCXError",
    "UCXMsgTruncated",
    "UCXNotConnected",
    "UCXUnreachable",
    "create_endpoint",
    "create_endpoint_from_worker_address",
    "create_listener",
    "fence",
    "flush",
    "get_address",
    "get_config",
    "get_ucp_worker",
    "get_ucx_version",
    "get_worker_address",
    "init",
    "progress",
    "recv",
    "reset",
]

_log = logging.getLogger(__name__)

# ucx-py's names of what ucxx raises.
UCXError = _exceptions.UCXError
UCXBusy = _exceptions.UCXBusyError
UCXCanceled = _exceptions.UCXCanceledError
UCXCloseError = _exceptions.UCXCloseError
UCXConfigError = _exceptions.UCXConfigError
UCXConnectionReset = _exceptions.UCXConnectionResetError
UCXMsgTruncated = _exceptions.UCXMessageTruncatedError
UCXNotConnected = _exceptions.UCXNotConnectedError
UCXUnreachable = _exceptions.UCXUnreachableError

get_address = ucxx.get_address
get_config = ucxx.get_config
get_ucx_version = ucxx.get_ucx_version
get_worker_address = ucxx.get_worker_address
progress = ucxx.progress
recv = ucxx.recv
reset = ucxx.reset


def init(
    options: dict[str, str] | None = None,
    env_takes_precedence: bool = False,
    blocking_progress_mode: bool | None = None,
) -> None:
    """Set options before first use. `blocking_progress_mode` is ucxx's progress mode "blocking" or "polling"."""
    mode = None if blocking_progress_mode is None else "blocking" if blocking_progress_mode else "polling"
    ucxx.init(dict(options or {}), env_takes_precedence=env_takes_precedence, progress_mode=mode)


def create_listener(
    callback_func: Callable[[Any], Awaitable[None] | None], port: int | None = None,
    endpoint_error_handling: bool | None = None,
) -> Any:  # fmt: skip
    """Listen; error handling is on unless it is switched off (in ucx-py it depended on UCX's version)."""
    on = endpoint_error_handling is not False
    return ucxx.create_listener(callback_func, port=port, endpoint_error_handling=on)


async def create_endpoint(ip_address: str, port: int, endpoint_error_handling: bool | None = None) -> Any:
    """Connect; error handling is on unless it is switched off."""
    return await ucxx.create_endpoint(ip_address, port, endpoint_error_handling=endpoint_error_handling is not False)


async def create_endpoint_from_worker_address(address: Any, endpoint_error_handling: bool | None = None) -> Any:
    """Connect to a worker's address."""
    on = endpoint_error_handling is not False
    return await ucxx.create_endpoint_from_worker_address(address, endpoint_error_handling=on)


def get_ucp_worker() -> int:
    """The handle of the UCP worker (an integer, as in ucx-py)."""
    handle: int = ucxx.get_ucp_worker()
    return handle


async def flush() -> None:
    """ucxx has no flush: awaiting a send already waits for its completion. Logs that it did nothing."""
    _log.warning("ucp.flush does nothing with ucxx: await the sends instead")


def fence() -> None:
    """ucxx has no fence: messages of one endpoint and tag keep their order. Logs that it did nothing."""
    _log.warning("ucp.fence does nothing with ucxx: messages of one endpoint and tag keep their order")
