"""Which transport a configuration means. Its fabric is imported only when it is chosen."""

from __future__ import annotations

from collections.abc import Iterable

from transceiver.config import CacheTransceiverConfig, TransceiverBackend
from transceiver.errors import TransportUnavailableError
from transceiver.testing import FaultInjector
from transceiver.transport import Transport

__all__ = ["make_transport"]


def make_transport(
    worker_id: str, config: CacheTransceiverConfig, host: str, faults: FaultInjector | None,
    devices: Iterable[str] = (),
) -> Transport:  # fmt: skip
    """The transport of `config.backend`, not opened yet. `devices` hold the pools. Raises TransportUnavailableError."""
    match config.backend:
        case TransceiverBackend.INPROC:
            from transceiver.inproc import InprocTransport

            return InprocTransport(worker_id, faults)
        case _ if faults is not None:
            raise TransportUnavailableError("the fault injector works with backend inproc only")
        case TransceiverBackend.NIXL:
            from transceiver.nixl_transport import NixlTransport

            return NixlTransport(worker_id, host, config)
        case TransceiverBackend.UCX:
            from transceiver.ucx import UcxTransport

            return UcxTransport(host, config, devices)
