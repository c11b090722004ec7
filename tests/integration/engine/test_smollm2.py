"""Numerics of the real model: chunking, batching, moved blocks, and what a wrong conversion looks like."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from cluster.engine import describe_model
from cluster.engine.attention import TorchKernels
from cluster.engine.llama_model import LlamaModel
from cluster.engine.llama_runner import LlamaRunner
from cluster.engine.model_source import find_model

TOLERANCE = 1e-3  # the smallest gap between the two best logits in the golden cases is about twenty times as wide
IDS = [int(i) for i in np.random.default_rng(1).integers(10, 49000, size=150)]


def test_chunked_prefill(engine: Any) -> None:
    (whole,) = engine.logits(engine.step(IDS, 0, engine.pages))
    pages = engine.pages[::-1].copy()
    for begin, end in ((0, 50), (50, 64), (64, 149)):
        assert engine.logits(engine.step(IDS[begin:end], begin, pages, False)) == []
    (chunked,) = engine.logits(engine.step(IDS[149:], 149, pages))
    assert np.abs(whole - chunked).max() < TOLERANCE


def test_batch_against_single_and_moved_blocks(engine: Any) -> None:
    first, second, moved = engine.pages[:5], engine.pages[5:10], engine.pages[10:15]
    engine.logits(engine.step(IDS[:149], 0, first, False), engine.step(IDS[50:100], 0, second, False))
    (alone,) = engine.logits(engine.step(IDS[149:], 149, first))
    (other,) = engine.logits(engine.step(IDS[:1], 50, second))
    batched = engine.logits(engine.step(IDS[149:], 149, first), engine.step(IDS[:1], 50, second))
    assert np.abs(alone - batched[0]).max() < TOLERANCE
    assert np.abs(other - batched[1]).max() < TOLERANCE
    for source, destination in zip(first, moved, strict=True):
        engine.storage.copy_page(int(source), int(destination))
    (after,) = engine.logits(engine.step(IDS[149:], 149, moved))
    assert np.array_equal(alone, after)


def test_forgetting_to_unpermute_queries_and_keys_shows(engine: Any, golden: list[dict[str, Any]]) -> None:
    source = find_model("smollm2-135m")
    tensors = dict(source.load_weights())
    config = source.config
    for layer in range(config.num_layers):
        rows = tensors[f"layers.{layer}.qkv"].clone()
        for begin, heads in ((0, config.num_heads), (config.num_heads * 64, config.num_kv_heads)):
            part = rows[begin : begin + heads * 64]
            part.copy_(part.view(heads, 2, 32, -1).swapaxes(1, 2).reshape(heads * 64, -1))  # as the file has it
        tensors[f"layers.{layer}.qkv"] = rows
    wrong = LlamaRunner(
        describe_model("smollm2-135m", 32, device="cpu"), LlamaModel(config, tensors, TorchKernels(torch.device("cpu")))
    )
    wrong.bind(engine.storage)
    ids = golden[0]["prompt_ids"]
    (right,) = engine.logits(engine.step(ids, 0, engine.pages))
    (row,) = wrong.forward(_plan(engine.step(ids, 0, engine.pages)))
    assert int(np.argmax(right)) == golden[0]["greedy_ids"][0]
    assert row is not None
    assert np.abs(row - right).max() > 1.0


def test_the_description_matches_and_one_thread_is_used(engine: Any) -> None:
    described = describe_model("smollm2-135m", 32, device="cpu")
    assert described.layout == engine.runner.layout
    assert described.layout.page_bytes() == 1_474_560
    assert (described.vocab_size, described.max_position) == (49152, 8192)
    assert described.eos_token_ids == engine.runner.eos_token_ids == {2}
    assert torch.get_num_threads() == 1


def _plan(*steps: Any) -> Any:
    from cluster.engine import StepPlan

    return StepPlan(steps)


def test_few_rows_give_the_same_bits_however_they_are_batched(engine: Any) -> None:
    """With the native kernels, steps of up to 32 rows are exact: decoding does not depend on the batch."""
    if isinstance(engine.runner._model.kernels, TorchKernels):
        pytest.skip("the native kernels are not to be had here")
    pages = engine.pages
    rows = []
    for size in (1, 7, 32):
        for begin in range(0, 64, size):
            end = min(begin + size, 64)
            got = engine.logits(engine.step(IDS[begin:end], begin, pages, end == 64))
        rows += got
    rows += engine.logits(*(engine.step(IDS[at : at + 1], at, pages) for at in (40, 50, 63)))[-1:]
    assert all(np.array_equal(rows[0], row) for row in rows)


def test_native_and_torch_kernels_agree(engine: Any) -> None:
    (default,) = engine.logits(engine.step(IDS, 0, engine.pages))
    kernels = engine.runner._model.kernels
    engine.runner._model.kernels = TorchKernels(torch.device("cpu"))
    try:
        engine.logits(engine.step(IDS[:140], 0, engine.pages, False))
        (torch_row,) = engine.logits(engine.step(IDS[140:], 140, engine.pages))
    finally:
        engine.runner._model.kernels = kernels
    assert np.abs(default - torch_row).max() < TOLERANCE
