"""Pools in CUDA memory between two processes over UCX. Runs where there is a GPU."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from typing import Any

import pytest

from tests.integration.transceiver.fabrics import FABRICS, Fabric
from tests.unit.transceiver.rig import SCOPE, SECRET, make_layout, table
from transceiver import CacheTransceiver, CacheTransceiverConfig, TransferStatus

torch = pytest.importorskip("torch", reason="needs torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.ucx,
    pytest.mark.timeout(180),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PAGES = 8


def side(name: str, device: str, config: dict[str, Any]) -> tuple[Any, CacheTransceiver]:
    """A torch pool on `device` and its transceiver."""
    from kvcache.storage.torch_storage import TorchPageStorage

    storage = TorchPageStorage(make_layout(), [PAGES], device=device)
    return storage, CacheTransceiver(
        worker_id=name, storage=storage, config=CacheTransceiverConfig(**config), secret=SECRET
    )


def hold(pipe: Connection, device: str, config: dict[str, Any]) -> None:
    """Body of the holder's process: random pages, one grant."""
    storage, transceiver = side("holder", device, config)
    with transceiver:
        storage.generations()[:] = 1
        storage.tensor().copy_(torch.randn(storage.tensor().shape))
        if device != "cpu":
            torch.cuda.synchronize()
        publication = transceiver.publish("t", (table((3, 1, 2)),), conversation_id=None, scope=SCOPE, lease_s=60)
        pipe.send((publication.ticket, storage.tensor().cpu().numpy()))
        pipe.send(publication.future.result(60).status)
    storage.close()


@pytest.mark.parametrize("fabric", FABRICS)
@pytest.mark.parametrize(("there", "here"), [("cuda:0", "cuda:0"), ("cuda:0", "cpu"), ("cpu", "cuda:0")])
def test_pages_in_cuda_memory_arrive_and_are_verified(fabric: Fabric, there: str, here: str) -> None:
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=hold, args=(theirs, there, fabric.config), daemon=True)
    process.start()
    storage, transceiver = side("receiver", here, fabric.config)
    try:
        assert pipe.poll(90)
        ticket, expected = pipe.recv()
        with transceiver:
            outcome = transceiver.fetch(
                ticket, (table((4, 5, 6)),), conversation_id=None, scope=SCOPE, timeout_s=60
            )  # fmt: skip
            assert outcome.status is TransferStatus.DONE, outcome
            assert transceiver.stats().digests_checked == 3
            got = storage.tensor().cpu().numpy()
            assert all((got[mine] == expected[page]).all() for mine, page in ((4, 3), (5, 1), (6, 2)))
        assert pipe.poll(60)
        assert pipe.recv() is TransferStatus.DONE
    finally:
        process.join(30)
        if process.is_alive():
            process.kill()
        storage.close()
