"""The compiled kernels against torch's, and the way back to torch when they cannot be had."""

from __future__ import annotations

import shutil
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.engine import native_kernels
from cluster.engine.attention import SequencePages, TorchKernels
from cluster.engine.native_kernels import NativeKernels, load_native_library

TORCH = TorchKernels(torch.device("cpu"))


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> NativeKernels:
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        pytest.skip("no C++ compiler here")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVFERRY_CACHE_DIR", str(tmp_path_factory.mktemp("native")))
        patch.delenv("KVFERRY_NATIVE", raising=False)
        library = load_native_library()
    assert library is not None
    return NativeKernels(library)


@settings(max_examples=60, deadline=None)
@given(count=st.integers(1, 40), out=st.integers(1, 40), columns=st.integers(1, 70), seed=st.integers(0, 2**31))
def test_linear(native: NativeKernels, count: int, out: int, columns: int, seed: int) -> None:
    torch.manual_seed(seed)
    rows, weight = torch.randn(count, columns), torch.randn(out, columns)
    got = native.linear(rows, weight)
    torch.testing.assert_close(got, rows @ weight.t(), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(TORCH.linear(rows, weight), rows @ weight.t(), atol=1e-4, rtol=1e-4)
    if count <= 32:  # the same bits in every batch
        assert got.equal(torch.cat([native.linear(rows[i : i + 1], weight) for i in range(count)]))


sequences = st.lists(st.tuples(st.integers(0, 45), st.integers(1, 40)), min_size=1, max_size=4)


@settings(max_examples=30, deadline=None)
@given(
    spans=sequences,
    block=st.sampled_from([1, 4, 7, 16]),
    heads=st.sampled_from([(1, 1), (3, 1), (4, 2), (6, 6)]),
    dim=st.sampled_from([8, 24, 64]),
    sharp=st.sampled_from([1.0, 30.0]),
    seed=st.integers(0, 2**31),
)
def test_attention(
    native: NativeKernels, spans: Any, block: int, heads: tuple[int, int], dim: int, sharp: float, seed: int
) -> None:
    torch.manual_seed(seed)
    needed = [-(-(start + count) // block) for start, count in spans]
    order = np.random.default_rng(seed).permutation(sum(needed) + 1)
    whole = torch.randn(len(order), 3, 2, heads[1], block, dim)
    pool = whole[:, 1]
    plans, at = [], 0
    for (start, count), blocks in zip(spans, needed, strict=True):
        pages = order[at : at + blocks].astype(np.int64)
        plans.append(SequencePages(start, start + count, pages))
        at += blocks
        beyond = (start + count) % block
        if beyond:  # what stands after the last token must not matter
            pool[pages[-1], :, :, beyond:] = float("nan")
    whole[order[-1]] = float("nan")
    query = torch.randn(sum(count for _, count in spans), heads[0] + 2, dim)[:, : heads[0]] * sharp
    got = native.attend(native.plan(plans), pool, query)
    torch.testing.assert_close(got, TORCH.attend(TORCH.plan(plans), pool, query), atol=1e-4, rtol=1e-3)
    begin = 0
    for one in plans:  # row by row: the same bits, unless torch served a long chunk
        count = one.end - one.start
        if count <= 32:
            for i in range(count):
                end = one.start + i + 1
                alone = SequencePages(end - 1, end, one.pages[: -(-end // block)])
                row = native.attend(native.plan([alone]), pool, query[begin + i : begin + i + 1])
                assert row[0].equal(got[begin + i])
        begin += count


def test_they_can_be_switched_off_and_a_missing_compiler_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_NATIVE", "off")
    assert load_native_library() is None
    monkeypatch.delenv("KVFERRY_NATIVE")
    monkeypatch.setattr(native_kernels.shutil, "which", lambda name: None)
    assert load_native_library() is None


@pytest.mark.parametrize("compiler", ["/bin/false", "/no/such/compiler"])
def test_a_failing_compiler_is_no_error(monkeypatch: pytest.MonkeyPatch, compiler: str) -> None:
    monkeypatch.delenv("KVFERRY_NATIVE")
    monkeypatch.setattr(native_kernels.shutil, "which", lambda name: compiler)
    assert load_native_library() is None
