"""Two processes, the transceiver alone: one holds blocks, the other pulls what it lacks, blocking and with asyncio.

Run it from a checkout: ``python examples/transceiver_two_processes.py``. No model, no Ray, no server.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import secrets
from multiprocessing.connection import Connection

import numpy as np

from kvcache.block_table import BlockTable
from kvcache.layout import KvLayout, LayerGroup, LifeCycleKind
from kvcache.storage.bytes_storage import BytesPageStorage
from transceiver import CacheTransceiver, CacheTransceiverConfig

LAYOUT = KvLayout("example-model", 16, (LayerGroup(LifeCycleKind.FULL, layers=(0, 1), num_kv_heads=2, head_dim=64),))
CONFIG = CacheTransceiverConfig()  # backend: ucx


def table(ordinals: list[int], pages: list[int], generation: int = 0) -> BlockTable:
    """Full blocks `ordinals` of a sequence, on `pages`."""
    count = len(ordinals)
    return BlockTable(
        group=0,
        ordinals=np.array(ordinals, np.int32),
        pages=np.array(pages, np.int32),
        generations=np.full(count, generation, np.uint64),
        valid_tokens=np.full(count, LAYOUT.tokens_per_block, np.int32),
    )


def holder(pipe: Connection, secret: bytes) -> None:
    """Publishes blocks 0..3 twice and waits until each was taken."""
    storage = BytesPageStorage(LAYOUT, [8], shared=True)  # peers on this host copy straight from it
    for page in range(4):
        storage.page(page)[:] = bytes([page + 1]) * LAYOUT.page_bytes()
    with CacheTransceiver(worker_id="holder", storage=storage, config=CONFIG, secret=secret) as transceiver:
        for name in ("first", "second"):
            publication = transceiver.publish(
                name, (table([0, 1, 2, 3], [0, 1, 2, 3]),), conversation_id="chat-1", scope=b"", lease_s=30
            )
            pipe.send(publication.ticket)  # a ticket is small: any channel will do
            print(f"holder: {name}: {publication.future.result().status.value}")
    storage.close()


async def pull_with_asyncio(transceiver: CacheTransceiver, pipe: Connection) -> None:
    """The same with asyncio: a pull can be awaited."""
    pull = transceiver.pull(pipe.recv(), (table([3], [7]),), conversation_id="chat-1", scope=b"", timeout_s=10)
    outcome = await pull
    print(f"receiver: second: {outcome.status.value}, {outcome.blocks} block over {outcome.transport}")


def main() -> None:
    """Start the holder, pull from it."""
    secret = secrets.token_bytes(32)
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=holder, args=(theirs, secret))
    process.start()
    storage = BytesPageStorage(LAYOUT, [8], shared=True)
    with CacheTransceiver(worker_id="receiver", storage=storage, config=CONFIG, secret=secret) as transceiver:
        # Blocks 0 and 1 are here already, say: only 2 and 3 are wanted, into our pages 5 and 6.
        outcome = transceiver.fetch(
            ours.recv(), (table([2, 3], [5, 6]),), conversation_id="chat-1", scope=b"", timeout_s=10
        )
        print(f"receiver: first: {outcome.status.value}, {outcome.bytes} bytes over {outcome.transport}")
        assert bytes(storage.page(5)) == bytes([3]) * LAYOUT.page_bytes()
        asyncio.run(pull_with_asyncio(transceiver, ours))
        print(f"receiver: links {transceiver.links()}, blocks {transceiver.stats().blocks_received}")
        process.join(10)
    storage.close()


if __name__ == "__main__":
    main()
