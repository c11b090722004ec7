"""Helpers of the engine's tests: a runner with its pages, and tiny random Llama models on disk."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cluster.engine import SequenceStep, StepPlan, load_runner, make_storage
from cluster.request import SamplingParams

GREEDY = SamplingParams()


class Bench:
    """A runner bound to its own storage, with page tables handed out by the test."""

    def __init__(self, model: str, tokens_per_block: int = 4, num_pages: int = 64) -> None:
        self.runner: Any = load_runner(model, tokens_per_block=tokens_per_block)
        self.storage = make_storage(self.runner, [num_pages])
        self.runner.bind(self.storage)
        self.block = tokens_per_block

    def step(
        self,
        ids: Sequence[int],
        start: int,
        pages: NDArray[np.int32],
        sampling: SamplingParams | None = GREEDY,
        suppress_eos: bool = False,
    ) -> SequenceStep:
        return SequenceStep(np.asarray(ids, dtype=np.int32), start, (pages,), sampling, suppress_eos)

    def logits(self, *steps: SequenceStep) -> list[NDArray[np.float32]]:
        return [row for row in self.runner.forward(StepPlan(steps)) if row is not None]

    def prefill(self, ids: Sequence[int], pages: NDArray[np.int32], cuts: Sequence[int] = ()) -> NDArray[np.float32]:
        """Logits after `ids`, computed in chunks that end at `cuts`."""
        bounds = [0, *sorted(set(cuts)), len(ids)]
        row = None
        for begin, end in itertools.pairwise(bounds):
            if begin < end:
                wanted = GREEDY if end == len(ids) else None
                (row,) = self.runner.forward(StepPlan([self.step(ids[begin:end], begin, pages, wanted)]))
        assert row is not None
        return row

    def generate(
        self, ids: Sequence[int], pages: NDArray[np.int32], count: int, sampling: SamplingParams = GREEDY
    ) -> list[int]:
        """`count` tokens after `ids`, the end of the turn suppressed."""
        out: list[int] = []
        step = self.step(ids, 0, pages, sampling, True)
        while len(out) < count:
            (token,) = self.runner.execute(StepPlan([step]))
            out.append(token)
            step = self.step([token], len(ids) + len(out) - 1, pages, sampling, True)
        return out


@pytest.fixture
def bench() -> Iterator[Callable[..., Bench]]:
    """Makes Bench objects and closes their storages."""
    made: list[Bench] = []

    def make(*args: Any, **options: Any) -> Bench:
        made.append(Bench(*args, **options))
        return made[-1]

    yield make
    for one in made:
        one.storage.close()


TINY = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 96,
    "max_position_embeddings": 128,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}


def tiny_weights(config: dict[str, Any], seed: int = 7) -> dict[str, NDArray[np.float32]]:
    """Random tensors under Hugging Face's names."""
    rng = np.random.default_rng(seed)
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]

    def matrix(rows: int, columns: int) -> NDArray[np.float32]:
        return (rng.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float32)

    def norm() -> NDArray[np.float32]:
        return (1 + 0.1 * rng.standard_normal(hidden)).astype(np.float32)

    tensors = {"model.embed_tokens.weight": matrix(config["vocab_size"], hidden) * 4, "model.norm.weight": norm()}
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        tensors[f"{name}.input_layernorm.weight"] = norm()
        tensors[f"{name}.post_attention_layernorm.weight"] = norm()
        tensors[f"{name}.self_attn.q_proj.weight"] = matrix(heads * dim, hidden)
        tensors[f"{name}.self_attn.k_proj.weight"] = matrix(kv_heads * dim, hidden)
        tensors[f"{name}.self_attn.v_proj.weight"] = matrix(kv_heads * dim, hidden)
        tensors[f"{name}.self_attn.o_proj.weight"] = matrix(hidden, heads * dim)
        tensors[f"{name}.mlp.gate_proj.weight"] = matrix(inner, hidden)
        tensors[f"{name}.mlp.up_proj.weight"] = matrix(inner, hidden)
        tensors[f"{name}.mlp.down_proj.weight"] = matrix(hidden, inner)
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = matrix(config["vocab_size"], hidden)
    return tensors


def write_folder(folder: Path, config: dict[str, Any], tensors: dict[str, NDArray[np.float32]]) -> Path:
    """A Hugging Face folder without a tokenizer."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, str(folder / "model.safetensors"))
    return folder


@pytest.fixture
def tiny_config() -> dict[str, Any]:
    return dict(TINY)


@pytest.fixture
def make_weights() -> Callable[..., dict[str, NDArray[np.float32]]]:
    return tiny_weights


@pytest.fixture
def make_folder(tmp_path: Path) -> Callable[..., Path]:
    """Writes a tiny model's folder: make_folder(**changes of config.json)."""

    def make(**changes: Any) -> Path:
        config = {**TINY, **changes}
        return write_folder(tmp_path / "model", config, tiny_weights(config))

    return make


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache for each test; torch's kernels, because compiling the native ones anew takes seconds."""
    monkeypatch.setenv("KVFERRY_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("KVFERRY_NATIVE", "off")
