"""The fabrics that move bytes between processes, and this process's side of a transfer over one of them."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.unit.transceiver.rig import SCOPE, SECRET, make_layout, make_storage, table
from transceiver import CacheTransceiver, CacheTransceiverConfig, GrantTicket, Pull, RankShare

PAGES = 64


@dataclass(frozen=True)
class Fabric:
    """A way to move bytes: what `links()` must call it, and the configuration that chooses it.

    `drops_reads`: a read from a process that stands still can be given up.
    """

    transport: str
    module: str
    config: dict[str, Any] = field(default_factory=dict)
    drops_reads: bool = True

    def __str__(self) -> str:
        return self.transport.replace("/", "-")


UCX_SHM = Fabric("ucx/shm", "ucxx", {"ucx_tls": "tcp,cma"})
UCX_CMA = Fabric("ucx/cma", "ucxx", {"ucx_tls": "tcp,cma", "shared_pools": False})
UCX_TCP = Fabric("ucx/tcp", "ucxx", {"ucx_tls": "tcp"})
NIXL = Fabric("nixl/ucx", "nixl", {"backend": "nixl"}, drops_reads=False)


def is_installed(fabric: Fabric) -> bool:
    """The fabric's package is there."""
    return importlib.util.find_spec(fabric.module) is not None


def as_parameter(fabric: Fabric) -> Any:
    """A pytest parameter that is skipped, with a reason, where the fabric's package is not installed."""
    extra = "the extra nixl (pip install nixl)" if fabric.module == "nixl" else fabric.module
    skip = pytest.mark.skipif(not is_installed(fabric), reason=f"needs {extra}, which is not installed")
    return pytest.param(fabric, id=str(fabric), marks=skip)


FABRICS = [as_parameter(fabric) for fabric in (UCX_SHM, UCX_CMA, UCX_TCP, NIXL)]


class Local:
    """This process's transceiver with zeroed pages; `fabric` gives its configuration, `options` change it."""

    def __init__(
        self, fabric: Fabric = UCX_CMA, *, shares: tuple[RankShare, ...] | None = None, secret: bytes = SECRET,
        layout: dict[str, Any] | None = None, **options: Any,
    ) -> None:  # fmt: skip
        config = CacheTransceiverConfig.model_validate({**fabric.config, **options})
        self.storage = make_storage(make_layout(**layout or {}), (PAGES,), shared=config.wants_shared_pools)
        self.transceiver = CacheTransceiver(
            worker_id=f"local-{id(self)}", storage=self.storage, config=config, secret=secret, shares=shares
        )

    def __enter__(self) -> Local:
        self.transceiver.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.transceiver.close()
        self.storage.close()

    def pull(self, ticket: GrantTicket, pages: tuple[int, ...], timeout_s: float = 10.0) -> Pull:
        """Start a pull of as many blocks into `pages`."""
        return self.transceiver.pull(
            ticket, (table(pages),), conversation_id="c", scope=SCOPE, timeout_s=timeout_s
        )  # fmt: skip
