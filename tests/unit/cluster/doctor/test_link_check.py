"""The trial transfer and the live links of a server, as the doctor sees them."""

from __future__ import annotations

import importlib.util
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from cluster.doctor.finding import Verdict
from cluster.doctor.link_check import _judge, check_link, check_live_links, live_links_in
from transceiver import CacheTransceiverConfig, TransceiverBackend

CONFIG = CacheTransceiverConfig()
ANSWER: dict[str, Any] = {
    "status": "done", "reason": "", "transport": "ucx/cma", "detail": "process_vm_readv", "bytes": 8 << 20,
    "seconds": 0.01, "equal": True,
}  # fmt: skip
METRICS = """
# TYPE kvferry_worker_up gauge
kvferry_worker_up{role="context",worker="context-0"} 1.0
kvferry_link_bytes_total{detail="process_vm_readv",peer="context-0",role="generation",transport="ucx/cma",worker="generation-0"} 8388608.0
kvferry_link_bytes_total{detail="ucp_get; the kernel refuses cma: x",peer="generation-0",role="context",transport="ucx/tcp",worker="context-0"} 1048576.0
kvferry_link_transfers_total{detail="process_vm_readv",peer="context-0",role="generation",transport="ucx/cma",worker="generation-0"} 5.0
"""  # noqa: E501


@pytest.mark.ucx
@pytest.mark.timeout(120)
@pytest.mark.skipif(importlib.util.find_spec("ucxx") is None, reason="needs ucxx")
@pytest.mark.parametrize(("shared", "tls", "found"), [
    (True, "tcp,cma", ("ucx/shm (copies from the mapped pool)", "ucx/tcp (messages")),
    (False, "tcp,cma", ("ucx/cma (process_vm_readv)", "ucx/tcp (messages")),
    (True, "tcp", ("ucx/tcp (messages)",)),
])  # fmt: skip
def test_a_real_link_between_two_processes(shared: bool, tls: str, found: tuple[str, ...]) -> None:
    """Where the kernel refuses cma the finding says TCP and why."""
    (finding,) = check_link(CacheTransceiverConfig(ucx_tls=tls, shared_pools=shared))
    assert finding.verdict is not Verdict.FAIL, finding
    assert finding.subject == "link, ucx"
    assert finding.detail.startswith(found)
    assert ": 8 MiB in " in finding.detail


@pytest.mark.timeout(120)
def test_a_fabric_that_cannot_start_is_a_finding() -> None:
    backend = TransceiverBackend.NIXL if importlib.util.find_spec("nixl") is None else TransceiverBackend.UCX
    config = CacheTransceiverConfig(backend=backend, ucx_tls="no_such_transport")
    (finding,) = check_link(config)
    assert finding.verdict is Verdict.FAIL
    assert ("kvferry[nixl]" if backend is TransceiverBackend.NIXL else "UCX cannot start") in finding.detail


def test_an_end_that_says_nothing_is_a_finding_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.doctor.link_check._PROBE", ("-c", "import time; time.sleep(300)"))
    monkeypatch.setattr("cluster.doctor.link_check._TIMEOUT_S", 0.3)
    began = time.monotonic()
    (finding,) = check_link(CONFIG)
    assert time.monotonic() - began < 60
    assert (finding.verdict, "offered nothing within 0.3 s" in finding.detail) == (Verdict.FAIL, True)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("offers", [True, False])
def test_an_end_may_say_more_than_a_pipe_holds(offers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    talk = "import sys; sys.stderr.write('warning\\n' * 100_000); sys.stderr.write('the last word\\n'); "
    answer = f"print({json.dumps(ANSWER)!r})" if offers else "sys.exit(1)"
    monkeypatch.setattr("cluster.doctor.link_check._PROBE", ("-c", talk + answer))
    (finding,) = check_link(CONFIG)
    assert finding.verdict is (Verdict.OK if offers else Verdict.FAIL)
    assert offers or "the last word" in finding.detail


def test_inproc_needs_no_trial() -> None:
    (finding,) = check_link(CacheTransceiverConfig(backend=TransceiverBackend.INPROC))
    assert finding.verdict is Verdict.OK


@pytest.mark.parametrize(
    ("change", "verdict", "text"),
    [
        ({}, Verdict.OK, "ucx/cma (process_vm_readv): 8 MiB in 10 ms"),
        ({"transport": "ucx/tcp", "detail": "ucp_get"}, Verdict.OK, "ucx/tcp (ucp_get)"),
        ({"transport": "ucx/tcp", "detail": "ucp_get; the kernel refuses cma: Operation not permitted"}, Verdict.WARN,
         "the kernel refuses cma: Operation not permitted"),
        ({"status": "failed", "reason": "holder lost"}, Verdict.FAIL, "holder lost"),
        ({"equal": False}, Verdict.FAIL, "the bytes differ"),
    ],
)  # fmt: skip
def test_what_is_made_of_an_answer(change: dict[str, Any], verdict: Verdict, text: str) -> None:
    finding = _judge("link", CONFIG, {**ANSWER, **change})
    assert (finding.verdict, text in finding.detail) == (verdict, True)
    assert bool(finding.remedy) is (verdict is not Verdict.OK)


def test_links_are_read_from_metrics() -> None:
    links = live_links_in(METRICS)
    assert [(labels["worker"], labels["peer"], nbytes, count) for labels, nbytes, count in links] == [
        ("generation-0", "context-0", 8388608.0, 5.0), ("context-0", "generation-0", 1048576.0, 0.0),
    ]  # fmt: skip


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[int]:
    status, body = request.param

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None:
            """Quiet."""

    with HTTPServer(("127.0.0.1", 0), Answer) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        yield http.server_address[1]
        http.shutdown()
        thread.join()


@pytest.mark.parametrize("server", [(200, METRICS)], indirect=True)
def test_live_links_of_a_server(server: int) -> None:
    good, slow = check_live_links("0.0.0.0", server)
    assert (good.subject, good.verdict) == ("link generation-0 <- context-0", Verdict.OK)
    assert good.detail == "ucx/cma (process_vm_readv): 8.0 MiB in 5 pulls"
    assert (slow.verdict, slow.detail.startswith("ucx/tcp (ucp_get; the kernel refuses cma")) == (Verdict.WARN, True)


@pytest.mark.parametrize(
    ("server", "verdicts"),
    [((200, "kvferry_worker_up 1\n"), [Verdict.OK]), ((200, "other 1\n"), []), ((401, ""), [Verdict.WARN])],
    indirect=["server"],
)
def test_servers_without_links(server: int, verdicts: list[Verdict]) -> None:
    assert [finding.verdict for finding in check_live_links("127.0.0.1", server)] == verdicts
