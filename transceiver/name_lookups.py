"""Names of hosts become numeric addresses outside the loop: a name server that does not answer holds no transfer up.

Each look-up has a thread of its own, which may hang for as long as the system's resolver likes; not the digest thread,
which every transfer needs. One look-up a host at a time, and a bounded number of them.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import TypeAlias

from transceiver.host_port import name_in, with_host
from transceiver.loop_context import LoopContext

__all__ = ["NameLookups"]

_MAX_LOOKUPS = 256
Then: TypeAlias = Callable[[str | OSError], None]


class NameLookups:
    """Used by the loop only; threads come back to it by `LoopContext.post`."""

    def __init__(self, context: LoopContext) -> None:
        self._ctx = context
        self._waiting: dict[str, list[Then]] = {}

    def look_up(self, address: str, then: Then) -> None:
        """Later, in the loop: ``then(address)`` with the host as a number, or ``then(error)``. Never blocks.

        An answer may come when nobody wants it any more: `then` must bear that.
        """
        host = name_in(address)

        def answer(found: str | OSError) -> None:
            then(with_host(address, found) if isinstance(found, str) else found)

        if host in self._waiting:
            self._waiting[host].append(answer)
            return
        if len(self._waiting) >= _MAX_LOOKUPS:
            error = OSError(f"the name {host!r} was not looked up: {_MAX_LOOKUPS} names are being looked up already")
            self._ctx.post(lambda: then(error))
            return
        thread = threading.Thread(target=self._work, args=(host,), name="kvferry-lookup", daemon=True)
        thread.start()
        self._waiting[host] = [answer]  # the thread's own word comes through the loop, after this

    def _work(self, host: str) -> None:
        try:
            found: str | OSError = _numeric_host(host)
        except (OSError, UnicodeError) as error:
            found = OSError(f"the name {host!r} was not found: {error}")
        self._ctx.post(lambda: self._found(host, found))

    def _found(self, host: str, found: str | OSError) -> None:
        for answer in self._waiting.pop(host):
            self._ctx.guarded(lambda answer=answer: answer(found))  # type: ignore[misc]


def _numeric_host(name: str) -> str:
    """Blocks for as long as the system's resolver does. IPv4 first: UCX listens on nothing else."""
    answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    best = min(answers, key=lambda answer: answer[0] is not socket.AF_INET)
    return socket.getnameinfo(best[4], socket.NI_NUMERICHOST | socket.NI_NUMERICSERV)[0]
