"""Fault injector for the `inproc` transport: delay, drop, duplicate, reorder, corrupt, cut, stall, full queue, kill.

A product part: give a `FaultInjector` to `CacheTransceiver(faults=...)` and it decides the fate of every message this
transceiver sends and of every read it makes. Deterministic: rules fire by match and count, never by chance of timing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Fault", "FaultInjector", "FaultKind"]


class FaultKind(StrEnum):
    """What happens to a matched message or read."""

    DELAY = "delay"
    DROP = "drop"
    DUPLICATE = "duplicate"
    REORDER = "reorder"
    CORRUPT = "corrupt"
    CUT = "cut"
    STALL = "stall"
    FULL = "full"
    KILL = "kill"


@dataclass(frozen=True, slots=True)
class Fault:
    """One rule. `step` is a message class name ("Grant", "Ack", ...) or "get"; empty matches everything.

    It lets `skip` matches pass and then applies to `count` of them (0: all). `seconds` is the delay of DELAY.
    DROP of a read means that it never completes until the link is cut; CORRUPT flips a bit of the payload or of the
    data read; REORDER lets the next message overtake; STALL stops this process's loop from answering; FULL finds the
    send queue full, which ends the link; KILL makes this transceiver vanish as a killed process does.
    """

    kind: FaultKind
    step: str = ""
    skip: int = 0
    count: int = 1
    seconds: float = 0.05


class FaultInjector:
    """Rules and how often each fired. Thread-safe."""

    def __init__(self, faults: Iterable[Fault] = ()) -> None:
        self._lock = threading.Lock()
        self._faults = list(faults)
        self._seen = [0] * len(self._faults)
        self._fired = [0] * len(self._faults)

    def add(self, fault: Fault) -> None:
        """Append a rule; it sees what comes from now on."""
        with self._lock:
            self._faults.append(fault)
            self._seen.append(0)
            self._fired.append(0)

    def clear(self) -> None:
        """Remove all rules."""
        with self._lock:
            self._faults, self._seen, self._fired = [], [], []

    @property
    def fired(self) -> int:
        """How many faults were applied since the last `clear`."""
        with self._lock:
            return sum(self._fired)

    def decide(self, step: str) -> Fault | None:
        """The first rule that applies to this occurrence of `step`, or None."""
        with self._lock:
            for index, fault in enumerate(self._faults):
                if fault.step and fault.step != step:
                    continue
                seen = self._seen[index]
                self._seen[index] += 1
                if seen >= fault.skip and (fault.count == 0 or seen < fault.skip + fault.count):
                    self._fired[index] += 1
                    return fault
        return None
