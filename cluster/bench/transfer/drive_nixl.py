"""Runs under a Python that has NIXL: two agents in two processes, reads from one pool into the other on request.

Started by `nixl_peer`, never imported. Takes one JSON line a transfer, ``{"local": [...], "remote": [...]}`` (page
numbers), answers with ``{"seconds": ...}``: from the page numbers to the last byte. The pools are page-aligned
shared memory like kvferry's; descriptors of all pages and the connection are prepared before.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import ctypes
import json
import mmap
import subprocess
import sys
import time
from typing import Any

_FILL = 7


def pool(nbytes: int, fill: int) -> tuple[mmap.mmap, int]:
    """Shared memory, every byte `fill`, and its address."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    anchor = ctypes.c_char.from_buffer(memory)
    address = ctypes.addressof(anchor)
    ctypes.memset(address, fill, nbytes)
    return memory, address


def agent(name: str) -> Any:
    """An agent with the UCX backend at its defaults."""
    from nixl._api import nixl_agent, nixl_agent_config

    return nixl_agent(name, nixl_agent_config(backends=["UCX"]))


def pages_of(address: int, page_bytes: int, count: int) -> list[tuple[int, int, int]]:
    """Descriptors of every page."""
    return [(address + index * page_bytes, page_bytes, 0) for index in range(count)]


def target(page_bytes: int, count: int) -> None:
    """The holding process: prints its metadata and where its pool lies, then serves until its input ends."""
    memory, address = pool(page_bytes * count, _FILL)
    mine = agent("bench-target")
    registered = mine.register_memory([(address, page_bytes * count, 0, "pool")], "DRAM")
    print(json.dumps({"metadata": mine.get_agent_metadata().hex(), "address": address}), flush=True)
    sys.stdin.read()
    mine.deregister_memory(registered)
    del memory


def initiator(page_bytes: int, count: int) -> None:
    """The reading process; starts the other one."""
    mine = agent("bench-initiator")
    command = [sys.executable, __file__, "target", str(page_bytes), str(count)]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None and holder.stdin is not None
    try:
        line = ""
        while not line.startswith("{"):
            line = holder.stdout.readline()
            if not line:
                raise RuntimeError("the target process ended")
        there = json.loads(line)
        memory, address = pool(page_bytes * count, 0)
        registered = mine.register_memory([(address, page_bytes * count, 0, "pool")], "DRAM")
        peer = mine.add_remote_agent(bytes.fromhex(there["metadata"]))
        here = mine.prep_xfer_dlist("NIXL_INIT_AGENT", pages_of(address, page_bytes, count), "DRAM")
        remote = mine.prep_xfer_dlist(peer, pages_of(there["address"], page_bytes, count), "DRAM")
        print(json.dumps({"ready": True}), flush=True)
        for request in sys.stdin:
            wanted = json.loads(request)
            started = time.perf_counter()
            handle = mine.make_prepped_xfer("READ", here, wanted["local"], remote, wanted["remote"])
            state = mine.transfer(handle)
            while state == "PROC":
                state = mine.check_xfer_state(handle)
            seconds = time.perf_counter() - started
            mine.release_xfer_handle(handle)
            at = [page * page_bytes for page in wanted["local"]]
            right = all(memory[a] == _FILL == memory[a + page_bytes - 1] for a in at)
            for a in at:
                ctypes.memset(address + a, 0, 1), ctypes.memset(address + a + page_bytes - 1, 0, 1)
            print(json.dumps({"seconds": seconds, "state": state, "right": right}), flush=True)
        mine.deregister_memory(registered)
    finally:
        holder.stdin.close()
        try:
            holder.wait(10)
        except subprocess.TimeoutExpired:
            holder.kill()


if __name__ == "__main__":
    {"target": target, "initiator": initiator}[sys.argv[1]](int(sys.argv[2]), int(sys.argv[3]))
