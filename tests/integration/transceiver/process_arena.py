"""Two processes over one fabric, in which the cells of the process matrix are played one after the other."""

from __future__ import annotations

import itertools

from tests.integration.transceiver.fabrics import Fabric
from tests.integration.transceiver.fault_peer import FaultPeer
from tests.integration.transceiver.two_hosts import HOSTS

__all__ = ["DRAIN_S", "Arena"]

DRAIN_S = 0.15
CONFIG = {
    "connect_timeout_ms": 700, "drain_timeout_ms": int(1000 * DRAIN_S), "early_request_ttl_ms": 300,
    "max_segment_bytes": 64 << 10, "max_segments_in_flight": 2,  # a block a read, so that more than one must be made
}  # fmt: skip


class Arena:
    """Two processes over one fabric, used for one cell after the other. Not thread-safe."""

    def __init__(self, fabric: Fabric, number: int, namespaces: tuple[str, str] = ("", "")) -> None:
        self.fabric = fabric
        self.namespaces = namespaces
        self._label = f"{fabric}-{number}"
        self._names = itertools.count()
        self.ctx, self.gen = self.start(0), self.start(1)

    def start(self, place: int) -> FaultPeer:
        hosts = HOSTS if self.namespaces[0] else ("127.0.0.1", "127.0.0.1")
        return FaultPeer(
            f"{('ctx', 'gen')[place]}-{self._label}-{next(self._names)}", {**self.fabric.config, **CONFIG},
            namespace=self.namespaces[place], host=hosts[place],
        )  # fmt: skip

    def name(self) -> str:
        """A transfer id that was not used before."""
        return f"{self._label}-t{next(self._names)}"

    def replace(self, side: FaultPeer) -> FaultPeer:
        """A new process instead of a dead, or a broken, one."""
        side.close()
        if side is self.ctx:
            self.ctx = self.start(0)
            return self.ctx
        self.gen = self.start(1)
        return self.gen

    def renew(self) -> None:
        """After a cell that went wrong: two new processes."""
        for side in (self.ctx, self.gen):
            self.replace(side)
        self.heal()

    def heal(self) -> None:
        """Both ends of the cable are plugged in."""
        for side in (self.ctx, self.gen):
            side.ask("heal")

    def close(self) -> None:
        for side in (self.ctx, self.gen):
            side.close()
