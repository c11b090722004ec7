"""Two network namespaces with distinct addresses exchange blocks over TCP; a cable that is cut is an error."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.integration.transceiver.fabrics import NIXL, UCX_TCP, Fabric, as_parameter
from tests.integration.transceiver.two_hosts import HOSTS, NoNamespacesError, ip, namespace_pair, reason_against

pytestmark = [
    pytest.mark.ucx,
    pytest.mark.timeout(180),
    pytest.mark.skipif(bool(reason_against()), reason=reason_against() or "-"),
    pytest.mark.parametrize("fabric", [as_parameter(UCX_TCP), as_parameter(NIXL)]),
]
MODULE = "tests.integration.transceiver.namespace_peer"


@pytest.fixture
def namespaces() -> Iterator[tuple[str, str]]:
    with ExitStack() as stack:
        try:
            names = stack.enter_context(namespace_pair())
        except NoNamespacesError as error:
            pytest.skip(str(error))
        yield names


def start(fabric: Fabric, namespace: str, *arguments: str) -> subprocess.Popen[str]:
    backend = fabric.config.get("backend", "ucx")
    settings = {"PYTHONPATH": os.getcwd(), "PEER_BACKEND": backend, **({"UCX_TLS": "tcp"} if backend == "nixl" else {})}
    return subprocess.Popen(
        ("ip", "netns", "exec", namespace, sys.executable, "-m", MODULE, *arguments),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **settings},
    )  # fmt: skip


def test_blocks_cross_between_two_hosts(fabric: Fabric, namespaces: tuple[str, str]) -> None:
    holder = start(fabric, namespaces[0], "holder", HOSTS[0])
    try:
        assert holder.stdout is not None
        ticket = holder.stdout.readline()
        assert json.loads(ticket)["address"].startswith(f"{fabric.transport.partition('/')[0]}://{HOSTS[0]}:")
        receiver = start(fabric, namespaces[1], "receiver", HOSTS[1], ticket)
        answer, errors = receiver.communicate(timeout=60)
        mine = json.loads(answer) if answer else {"reason": errors}
        theirs = json.loads(holder.stdout.readline())
        assert (mine.get("status"), mine.get("transport")) == ("done", fabric.transport), mine
        assert theirs["status"] == "done"
        assert mine["digest"] == theirs["digest"]
        holder.communicate(timeout=30)
    finally:
        if holder.poll() is None:
            holder.kill()
            holder.communicate()


def test_a_cut_cable_ends_the_transfer_by_its_deadline(fabric: Fabric, namespaces: tuple[str, str]) -> None:
    holder = start(fabric, namespaces[0], "holder", HOSTS[0])
    try:
        assert holder.stdout is not None
        ticket = holder.stdout.readline()
        ip("-n", namespaces[0], "link", "set", namespaces[0], "down")
        receiver = start(fabric, namespaces[1], "receiver", HOSTS[1], ticket)
        answer, errors = receiver.communicate(timeout=60)
        assert json.loads(answer)["status"] in ("failed", "timed_out"), (answer, errors)
    finally:
        holder.kill()
        holder.communicate()
