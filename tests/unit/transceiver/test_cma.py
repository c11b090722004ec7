"""One kernel call for many reads: right bytes, refusals as OSError, identity tells processes apart."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.unit.transceiver.rig import eventually
from transceiver.cma import CmaReader, has_ended, process_identity, same_host_pid


def addresses(array: NDArray[np.uint8], at: list[int]) -> NDArray[np.uint64]:
    return np.asarray([array.ctypes.data + offset for offset in at], np.uint64)


def test_more_reads_than_one_call_takes() -> None:
    source = np.random.default_rng(1).integers(0, 256, 3000 * 16, dtype=np.uint8)
    target = np.zeros_like(source)
    order = np.random.default_rng(2).permutation(3000)
    CmaReader(os.getpid()).read(
        addresses(target, [16 * i for i in range(3000)]),
        addresses(source, [16 * int(i) for i in order]),
        np.full(3000, 16, np.uint64),
    )
    assert (target.reshape(3000, 16) == source.reshape(3000, 16)[order]).all()


def test_memory_that_is_not_there_is_an_error() -> None:
    target = np.zeros(64, np.uint8)
    with pytest.raises(OSError, match="Bad address"):
        CmaReader(os.getpid()).read(addresses(target, [0]), np.asarray([8], np.uint64), np.asarray([64], np.uint64))


def test_a_process_that_ended_is_an_error_and_no_peer() -> None:
    code = "from transceiver.cma import process_identity as p; print(p().hex())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    identity = bytes.fromhex(done.stdout.strip())
    assert same_host_pid(identity) is None
    with pytest.raises(OSError, match="No such process"):
        CmaReader(2**22 + 1).read(np.asarray([8], np.uint64), np.asarray([8], np.uint64), np.asarray([8], np.uint64))


def test_identity() -> None:
    own = process_identity()
    assert same_host_pid(own) == os.getpid()
    assert same_host_pid(own[:-1]) is None
    assert same_host_pid(b"") is None
    assert same_host_pid(bytes(16) + own[16:]) is None  # another host
    assert same_host_pid(own[:-8] + bytes(8)) is None  # the pid belongs to another process now


def test_a_partial_copy_goes_on_where_it_ended() -> None:
    class Partial(CmaReader):
        """Copies only the first element and some of the second of the first call."""

        calls = 0

        def _call(self, ours: int, num_ours: int, theirs: int, num_theirs: int) -> int:
            self.calls += 1
            if self.calls == 1:
                starts = [ctypes.c_uint64.from_address(at).value for at in (ours, theirs)]
                cut = np.asarray([[start, 24] for start in starts], np.uint64)
                return super()._call(cut.ctypes.data, 1, cut.ctypes.data + 16, 1)
            return super()._call(ours, num_ours, theirs, num_theirs)

    source = np.arange(64, dtype=np.uint8)
    target = np.zeros_like(source)
    at = [0, 16, 32, 48]  # neighbours: one vector a side, cut after 24 bytes
    reader = Partial(os.getpid())
    reader.read(addresses(target, at), addresses(source, at), np.full(4, 16, np.uint64))
    assert (target == source).all()
    assert reader.calls == 4  # the rest of the second element, then the others


def test_an_ended_process_is_known_even_before_it_was_waited_for() -> None:
    program = (
        "import sys; from transceiver.cma import process_identity;"
        "print(process_identity().hex(), flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        (sys.executable, "-c", program), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        identity = bytes.fromhex(child.stdout.readline())
        assert not has_ended(identity)
        child.kill()
        assert eventually(lambda: has_ended(identity))  # a zombie
        child.wait()
        assert has_ended(identity)
    assert not has_ended(process_identity())
    assert not has_ended(b"")
    assert not has_ended(bytes(len(identity)))  # of another host
