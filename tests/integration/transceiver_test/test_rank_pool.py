"""Rank processes under a coordinator: the stacks of one that hangs reach its log, whatever stands between them."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.launch.node_pool import make_token_file
from cluster.transceiver_test.rank_pool import RankHungError, RankPool

pytestmark = pytest.mark.timeout(60)

SRUN = """#!/bin/sh
# stands between coordinator and rank as srun does: the rank is its child, not itself
while [ "${1#--}" != "$1" ]; do shift; done
"$@" &
wait $!
"""


@contextlib.contextmanager
def rank(folder: Path, node: str | None) -> Iterator[RankPool]:
    """A pool of one rank, ctx-0, whose log is `folder`/ctx-0.log."""
    token = make_token_file(folder / "token")
    pool = RankPool(token, folder / "token", folder, bind="127.0.0.1", advertise="127.0.0.1", watchdog_s=50.0)
    try:
        pool.start([("ctx-0", node)], {}, [], 30.0)
        yield pool
    finally:
        pool.kill()


def test_a_hung_ranks_stacks_come_over_the_link_when_srun_is_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "srun").write_text(SRUN)
    (tmp_path / "bin" / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    with rank(tmp_path, "some-node") as pool:
        assert pool._pids["ctx-0"] != pool._processes["ctx-0"].pid
        with pytest.raises(RankHungError, match=r"ctx-0 hang: no answer within 0.3 s \(stacks in its log\)"):
            pool.call("ctx-0", "hang", 0.3)
        log = (tmp_path / "ctx-0.log").read_text()
    assert "ctx-0 does not answer; its stacks:" in log
    assert "in _do_hang" in log
    assert "in _read" in log  # every thread


def test_a_silent_process_of_this_host_is_asked_by_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.transceiver_test.rank_pool._STACKS_S", 0.5)
    with rank(tmp_path, None) as pool:
        monkeypatch.setattr(pool._links["ctx-0"], "send", lambda message: None)  # its reader hears nothing
        with pytest.raises(RankHungError, match="stacks in its log"):
            pool.call("ctx-0", "hang", 0.2)
        assert "in main" in (tmp_path / "ctx-0.log").read_text()


def test_a_rank_that_no_question_reaches_leaves_no_false_promise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.transceiver_test.rank_pool._STACKS_S", 0.5)
    with rank(tmp_path, None) as pool:
        os.kill(pool._processes["ctx-0"].pid, signal.SIGSTOP)
        with pytest.raises(RankHungError, match="no stacks: it does not react to a signal"):
            pool.call("ctx-0", "hang", 0.2)
