"""One worker's memory side in a process of its own, with traps at the steps of the protocol, driven over a pipe.

The process has storage, a real `KvCacheManager`, a transceiver over a real fabric, and a `StepHook`. `fault_peer` has
its handle in the process that drives the matrix.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from kvcache.layout import KvLayout, LayerGroup, LifeCycleKind
from kvcache.storage.bytes_storage import BytesPageStorage
from tests.integration.transceiver import real_faults
from tests.integration.transceiver.cached_side import TOKENS_PER_BLOCK, CachedSide, Fetch
from tests.integration.transceiver.step_hook import StepHook, Trap
from tests.unit.transceiver.rig import eventually
from transceiver import CacheTransceiverConfig, GrantTicket, Publication, TransferStatus

__all__ = ["NEVER", "WAIT_S", "FaultSide", "serve"]

LAYOUT = KvLayout("fault-model", TOKENS_PER_BLOCK, (LayerGroup(LifeCycleKind.FULL, (0, 1), 1, 2048),))
PAGES = 32
WAIT_S = 30.0
NEVER = "the fault never happened"
#: How many more of each are no leak: sockets that UCX has yet to close, threads that stay (digests, copies).
SPARE = {"descriptors": 12, "mappings of shared memory": 0, "threads": 3}
_CLONE_NEWNET, _CLONE_NEWNS = 0x40000000, 0x00020000
_MS_SLAVE, _MS_REC, _MNT_DETACH = 1 << 19, 1 << 14, 2


class FaultSide:
    """Runs in the process: its public methods are the commands."""

    def __init__(self, options: dict[str, Any]) -> None:
        if options["namespace"]:
            _enter(options["namespace"])
        config = CacheTransceiverConfig.model_validate(options["config"])
        storage = BytesPageStorage(LAYOUT, [PAGES], shared=config.wants_shared_pools)
        self.interface: str = options["namespace"]
        self.side = CachedSide(options["name"], config, storage=storage, host=options["host"])
        self.hook = StepHook(self.side.transceiver)
        self.grants: dict[str, Publication] = {}
        self.fetches: dict[str, Fetch] = {}
        self.ends: dict[str, float] = {}
        self.began_with = _possessions()

    def identity(self) -> tuple[int, str]:
        """Process and worker id."""
        return os.getpid(), self.side.transceiver._ctx.worker_id

    def send_digests(self, when: str) -> None:
        """Digests of grants: "early" as always, "late" by themselves, or "never"."""
        context, holder = self.side.transceiver._ctx, self.side.transceiver._holder
        vars(context.digests).pop("find", None)
        vars(holder).pop("_send_digests", None)
        if when != "early":
            context.digests.find = lambda *_: None  # type: ignore[method-assign]
        if when == "never":
            holder._send_digests = lambda *_: None  # type: ignore[method-assign]

    def begin(self) -> None:
        """Cut all links, forget traps."""
        transceiver, peers = self.side.transceiver, self.hook.peers
        self.hook.clear()
        self.send_digests("early")

        def cut() -> None:
            for peer in list(peers._by_link.values()):
                peers._close(peer, "a new cell begins")

        transceiver._ctx.post(cut)
        assert eventually(lambda: not transceiver.links(), WAIT_S), "a link stays"

    def arm(self, step: str, point: str, action: str, pid: int) -> None:
        """Set a trap. `pid` is the process that a signal goes to, or whose stop is waited for."""
        trap = Trap(step, point, lambda link, payload: self._act(action, pid, trap, link, payload))
        self.hook.traps.append(trap)

    def _act(self, action: str, pid: int, trap: Trap, link: Any, payload: bytes) -> None:
        match action:
            case "kill":
                real_faults.send_signal(pid, signal.SIGKILL)
            case "stop":
                real_faults.send_signal(pid, signal.SIGSTOP)
            case "cut":
                self._cut()
            case "cancel":
                for grant in self.grants.values():
                    grant.cancel()
            case "stop and fill":
                real_faults.send_signal(pid, signal.SIGSTOP)
                self._fill(link, payload)
            case "fill when stopped" if not real_faults.has_stopped(pid):  # it must get the message first
                self.side.transceiver._ctx.after(0.002, lambda: self._act(action, pid, trap, link, payload))
                return
            case "fill when stopped":
                self._fill(link, payload)
            case _:
                raise ValueError(action)
        trap.done = True

    def _fill(self, link: Any, payload: bytes) -> None:
        count = real_faults.fill_queue(self.hook.raw_send, link, payload)
        assert count, "the link took nothing: its queue was not filled by this"

    def _cut(self) -> None:
        if self.interface:
            real_faults.set_link_up(self.interface, False)
        else:
            assert real_faults.cut_connections(), "there was no connection to cut"

    def heal(self) -> None:
        if self.interface:
            real_faults.set_link_up(self.interface, True)

    def happened(self) -> None:
        """Wait until every armed fault has happened: the transfer may have ended a moment before it."""
        assert eventually(lambda: all(trap.done for trap in self.hook.traps)), NEVER

    def offer(self, name: str, tokens: np.ndarray[Any, Any], lease_s: float, receiver: str) -> GrantTicket:
        grant = self.side.offer(name, tokens, lease_s, receiver)
        grant.future.add_done_callback(lambda _: self.ends.setdefault(f"grant {name}", time.monotonic()))
        self.grants = {name: grant}
        return grant.ticket

    def fetch(self, ticket: GrantTicket, tokens: np.ndarray[Any, Any], timeout_s: float) -> None:
        fetch = self.side.fetch(ticket, tokens, timeout_s)
        fetch.pull.future.add_done_callback(
            lambda _: self.ends.setdefault(f"fetch {ticket.transfer_id}", time.monotonic())
        )
        self.fetches = {ticket.transfer_id: fetch}

    def cancel(self, name: str) -> None:
        self.grants[name].cancel()

    def granted(self, name: str, wait_s: float) -> tuple[str, str, float]:
        """Status, reason and time of the end of a grant."""
        outcome = self.grants[name].future.result(wait_s)
        return outcome.status.value, outcome.reason, self._end(f"grant {name}")

    def fetched(self, name: str, wait_s: float) -> tuple[str, str, float]:
        """The same of a pull. Checks every byte of a whole transfer; the pull is settled."""
        fetch = self.fetches[name]
        outcome = fetch.pull.future.result(wait_s)
        status = self.side.finish(fetch, wait_s)
        assert status is TransferStatus.DONE or outcome.reason, "a failure without a reason"
        return outcome.status.value, outcome.reason, self._end(f"fetch {name}")

    def _end(self, name: str) -> float:
        assert eventually(lambda: name in self.ends)  # callbacks follow the result
        return self.ends.pop(name)

    def transport(self) -> list[str]:
        return sorted(set(self.side.transceiver.links().values()))

    def at_rest(self, wait_s: float) -> None:
        """Integrity, and every page free or cached."""
        assert eventually(self.side.at_rest, wait_s), f"not at rest: {self.side.transceiver.stats()}"

    def cached_tokens(self, tokens: np.ndarray[Any, Any]) -> int:
        with self.side.lock:
            return self.side.manager.probe_reuse(tokens)

    def leaves_nothing(self) -> None:
        """With all links cut: what the process has beyond what it began with. A few descriptors UCX keeps for later."""

        def gone() -> bool:
            now = _possessions()
            return all(now[name] - self.began_with[name] <= spare for name, spare in SPARE.items())

        assert eventually(gone), f"left over: {_possessions()}, at the beginning {self.began_with}"

    def close(self) -> list[str]:
        self.side.close()
        return sorted(thread.name for thread in threading.enumerate())


def _possessions() -> dict[str, int]:
    """What a transfer may leave behind in a process."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "mappings of shared memory": sum("memfd:" in line or "/dev/shm/" in line for line in maps),
        "threads": threading.active_count(),
    }


def _enter(namespace: str) -> None:
    """Go into a network namespace of this name; call it before there is a second thread."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}") as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace {namespace}")
    # UCX finds its interfaces in /sys, which shows those of the namespace that mounted it (as `ip netns exec` does).
    steps = (
        libc.unshare(_CLONE_NEWNS), libc.mount(b"", b"/", None, _MS_SLAVE | _MS_REC, None),
        libc.umount2(b"/sys", _MNT_DETACH), libc.mount(namespace.encode(), b"/sys", b"sysfs", 0, None),
    )  # fmt: skip
    if any(steps):
        raise OSError(ctypes.get_errno(), "cannot mount /sys anew")


def serve(pipe: Connection, options: dict[str, Any]) -> None:
    """Body of the process. Ends with the pipe."""
    side = FaultSide(options)
    pipe.send(("", side.identity()))
    while True:
        try:
            command, arguments = pipe.recv()
        except (EOFError, OSError):
            break
        try:
            answer = "", getattr(side, command)(*arguments)
        except Exception as error:
            answer = f"{command}: {type(error).__name__}: {error}", None
        try:
            pipe.send(answer)
        except OSError:
            break
        if command == "close":
            break
    os._exit(0)  # whatever the transceiver's state
