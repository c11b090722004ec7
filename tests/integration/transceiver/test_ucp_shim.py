"""A program written for ucx-py runs on the shim."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("ucxx", reason="needs ucxx")

PROGRAM = """
import asyncio, sys, types
import numpy as np
from transceiver import ucp

async def main():
    ucp.init({"TLS": "tcp"}, blocking_progress_mode=None)
    assert len(ucp.get_ucx_version()) == 3 and ucp.get_config()["TLS"] == "tcp" and ucp.get_ucp_worker() > 0
    async def serve(endpoint):
        data = np.empty(1000, np.uint8)
        await endpoint.recv(data)
        await endpoint.send(data + 1)
        await endpoint.close()
    listener = ucp.create_listener(serve)
    endpoint = await ucp.create_endpoint("127.0.0.1", listener.port)
    await endpoint.send(np.arange(1000, dtype=np.uint8))
    back = np.empty(1000, np.uint8)
    await endpoint.recv(back)
    assert (back == np.arange(1000, dtype=np.uint8) + 1).all()
    await ucp.flush()
    try:
        await endpoint.recv(np.empty(1, np.uint8))
    except ucp.UCXError as error:
        print("ended by", type(error).__name__)
    await endpoint.close()
    listener.close()
    print("ok")

asyncio.run(main())
"""


@pytest.mark.ucx
@pytest.mark.timeout(90)
def test_an_echo_program() -> None:
    done = subprocess.run((sys.executable, "-c", PROGRAM), capture_output=True, text=True, timeout=80, check=False)
    assert done.returncode == 0, done.stderr
    assert "ended by UCX" in done.stdout
    assert done.stdout.rstrip().endswith("ok")
