"""`kvferry slurm submit` with errors of the schema: they hide none of the others, and nothing is submitted."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.cli import main
from cluster.launch import Partition, SlurmClient


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Slurm with one partition."""
    monkeypatch.setattr(SlurmClient, "missing_commands", lambda _self: [])
    monkeypatch.setattr(SlurmClient, "partitions", lambda _self: {"debug": Partition("debug", 2, 2, 0)})


def refused(capsys: pytest.CaptureFixture[str], path: Path, *args: str) -> str:
    assert main(["slurm", "submit", "-c", str(path), *args]) == 2
    done = capsys.readouterr()
    assert "Traceback" not in done.err
    assert done.out == ""
    return done.err


def test_an_error_of_the_schema_hides_no_other(tmp_path: Path, slurm: None, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(
        "model: <model>\n"
        "slurm: {partition: big, account: <account>, time: <time>, nodes: <nodes>, venv: /no/venv,\n"
        "        work_dir: /no/work, log_dir: /proc/logs, partitoin: x}\n"
    )
    text = refused(capsys, path)
    for expected in (
        f"slurm.partitoin ({path}:3): unknown key",
        "model: the placeholder <model> is still there",
        "slurm.account: the placeholder <account> is still there",
        "slurm.time: the placeholder <time> is still there",
        "slurm.nodes: the placeholder <nodes> is still there",
        "slurm.work_dir: /no/work is not a folder",
        "slurm.log_dir: /proc/logs is not writable",
        "slurm.venv: there is no /no/venv/bin/python here",
        "slurm.partition: there is no partition 'big' -> write one of: debug",
    ):
        assert expected in text, text


def test_missing_commands_and_overrides_are_seen_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    path = tmp_path / "wrong.yaml"
    path.write_text("slurm: {partition: debug, time: <time>, log_dir: logs}\n")
    text = refused(capsys, path, "--set", "slurm.work_dir=/no/such/work")
    assert "slurm: commands of Slurm are missing: sbatch" in text
    assert "slurm.work_dir: /no/such/work is not a folder" in text


def test_values_that_cannot_be_used_are_left_out_of_the_checks(
    tmp_path: Path, slurm: None, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text("slurm: {partition: <partition>, work_dir: 7, log_dir: logs, venv: <venv>, container_image: ''}\n")
    text = refused(capsys, path)
    assert "slurm.partition: the placeholder" in text
    assert "slurm.venv: the placeholder" in text
    for wrong in ("no partition", "is not writable", "there is no", "is not a folder"):
        assert wrong not in text
    path.write_text("modle: x\n")
    assert "slurm: the section is missing" in refused(capsys, path)
    path.write_text("slurm: [partition, debug]\n")
    assert "slurm" in refused(capsys, path)
    assert "the file does not exist" in refused(capsys, tmp_path / "none.yaml")
