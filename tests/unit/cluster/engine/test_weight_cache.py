"""The cache of converted weights: built once, whole or not at all."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
from pathlib import Path

import pytest

from cluster.engine import ModelLoadError
from cluster.engine.weight_cache import WeightCache, cache_directory, file_digest


def _complete(folder: Path) -> bool:
    return (folder / "done").exists()


def _build(folder: Path) -> None:
    (folder / "done").write_text("x")


def _ask(root: str, log: str, barrier: object) -> None:
    def build(folder: Path) -> None:
        with open(log, "a") as file:
            file.write("built\n")
        _build(folder)

    barrier.wait(30)  # type: ignore[attr-defined]
    assert _complete(WeightCache(Path(root)).get("k", _complete, build))


def test_several_processes_build_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(3)
    log = tmp_path / "log"
    children = [context.Process(target=_ask, args=(str(tmp_path / "cache"), str(log), barrier)) for _ in range(3)]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
        assert child.exitcode == 0
    assert log.read_text() == "built\n"


def test_a_failed_build_leaves_nothing_and_the_next_one_succeeds(tmp_path: Path) -> None:
    cache = WeightCache(tmp_path)

    def fail(folder: Path) -> None:
        (folder / "half").write_text("x")
        raise ModelLoadError("no")

    with pytest.raises(ModelLoadError, match="no"):
        cache.get("k", _complete, fail)
    assert [p.name for p in tmp_path.iterdir()] == ["k.lock"]
    assert _complete(cache.get("k", _complete, _build))


def test_left_overs_and_incomplete_entries_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "k").mkdir()
    (tmp_path / "k" / "half").write_text("x")
    (tmp_path / "k.part-dead").mkdir()
    entry = WeightCache(tmp_path).get("k", _complete, _build)
    assert [p.name for p in entry.iterdir()] == ["done"]
    assert not (tmp_path / "k.part-dead").exists()


def test_a_complete_entry_needs_no_lock(tmp_path: Path) -> None:
    (tmp_path / "k").mkdir()
    _build(tmp_path / "k")
    WeightCache(tmp_path).get("k", _complete, pytest.fail)
    assert not (tmp_path / "k.lock").exists()


def test_waiting_for_another_process_has_an_end(tmp_path: Path) -> None:
    times = iter([0.0, 0.0, 700.0])
    with (tmp_path / "k.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ModelLoadError, match="another process"):
            WeightCache(tmp_path, clock=lambda: next(times)).get("k", _complete, _build)


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ModelLoadError, match="KVFERRY_CACHE_DIR"):
        WeightCache(tmp_path / "file").get("k", _complete, _build)


def test_where_the_cache_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVFERRY_CACHE_DIR", str(tmp_path))
    assert cache_directory() == tmp_path
    monkeypatch.delenv("KVFERRY_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_directory() == tmp_path / "xdg" / "kvferry"


def test_digests_are_remembered_until_the_file_changes(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"abc")
    first = file_digest(path, tmp_path / "cache")
    assert first == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    (note,) = (tmp_path / "cache" / "digests").iterdir()
    note.write_text("0" * 64)
    assert file_digest(path, tmp_path / "cache") == "0" * 64  # taken from the note
    os.utime(path, ns=(1, 1))
    assert file_digest(path, tmp_path / "cache") == first
    with pytest.raises(ModelLoadError, match="gone"):
        file_digest(tmp_path / "gone", tmp_path / "cache")
