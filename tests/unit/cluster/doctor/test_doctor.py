"""Each check on made-up machines, and the whole examination on this one."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from cluster.cli import main
from cluster.config import load_config
from cluster.doctor import Finding, Verdict, examine
from cluster.doctor.machine_check import check_memory, check_port, check_ptrace, check_shared_memory
from cluster.doctor.package_check import OWN_PACKAGES, check_ownership, check_packages, check_python
from cluster.doctor.ucx_check import transports_in

ROOT = Path(__file__).resolve().parents[4]


def test_a_foreign_owner_of_our_names_is_a_failure() -> None:
    findings = list(check_ownership({"cluster": ["cluster", "kvferry"], "kvcache": ["kvferry"]}, ROOT))
    assert [finding.verdict for finding in findings] == [Verdict.FAIL, Verdict.OK, Verdict.OK]
    assert "pip uninstall cluster" in findings[0].remedy


def test_a_package_from_elsewhere_is_a_failure(tmp_path: Path) -> None:
    assert {finding.verdict for finding in check_ownership({}, tmp_path)} == {Verdict.FAIL}


def test_this_environment_owns_its_names() -> None:
    findings = list(check_ownership())
    assert [finding.subject for finding in findings] == [f"name {name}" for name in OWN_PACKAGES]
    assert {finding.verdict for finding in findings} == {Verdict.OK}, findings


def test_packages_and_python_are_found() -> None:
    assert all(finding.verdict is not Verdict.FAIL for finding in [*check_python(), *check_packages()])


def test_little_memory_is_a_warning(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9 kB\nMemAvailable:  1048576 kB\n")
    assert list(check_memory(meminfo))[-1] == Finding(
        "memory", Verdict.WARN, "1.0 GiB available", "lower kv_cache_config.max_tokens or use fewer workers"
    )
    assert list(check_memory(tmp_path / "none"))[-1].verdict is Verdict.WARN


def test_no_shared_memory_is_a_failure(tmp_path: Path) -> None:
    assert next(check_shared_memory(tmp_path / "none")).verdict is Verdict.FAIL
    assert next(check_shared_memory(tmp_path)).verdict in (Verdict.OK, Verdict.WARN)


def test_ptrace_scope_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = tmp_path / "scope"
    assert next(check_ptrace(setting)).verdict is Verdict.OK
    setting.write_text("1\n")
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    refused = next(check_ptrace(setting))
    assert (refused.verdict, "ptrace_scope 1" in refused.detail) == (Verdict.OK, True)
    setting.write_text("0\n")
    assert next(check_ptrace(setting)).verdict is Verdict.OK


def test_a_port_in_use_is_told_and_a_free_one_is_left_free() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert next(check_port("127.0.0.1", port)).verdict is Verdict.WARN
    assert next(check_port("127.0.0.1", port)).verdict is Verdict.OK
    assert next(check_port("127.0.0.1", port)).verdict is Verdict.OK
    assert next(check_port("no-such-host.invalid", 1)).verdict is Verdict.WARN


def test_transports_are_read_from_ucx_info() -> None:
    text = "#\n#      Transport: tcp\n#         Device: eth0\n#      Transport: tcp\n#      Transport: cma\n"
    assert transports_in(text) == ["tcp", "cma"]
    assert transports_in("") == []


def test_the_whole_examination_ends_with_the_model() -> None:
    findings = list(examine(load_config(None, ["model=hash", "server.port=0"])))
    assert findings[-1].subject == "model"
    assert findings[-1].verdict is Verdict.OK
    assert "ucx transport tcp" in [finding.subject for finding in findings]
    assert all(finding.remedy for finding in findings if finding.verdict is not Verdict.OK), findings


def test_a_missing_model_fails_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json", "--set", "model=/no/such.gguf", "--set", "server.port=0"]) == 1
    findings = json.loads(capsys.readouterr().out)
    assert findings[-1]["subject"] == "model"
    assert findings[-1]["verdict"] == "fail"
