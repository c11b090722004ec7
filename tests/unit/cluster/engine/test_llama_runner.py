"""The Llama runner on tiny random models, against an independent dense forward pass in float64."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cluster.engine import EngineError, HashRunner, ModelLoadError, load_runner, make_storage
from cluster.engine.gguf_weights import unpermute_rotary
from cluster.request import SamplingParams

IDS = [int(i) for i in np.random.default_rng(3).integers(3, 96, size=50)]
PAGES = np.random.default_rng(4).permutation(64).astype(np.int32)
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def reference_logits(config: dict[str, Any], tensors: dict[str, np.ndarray], ids: list[int]) -> np.ndarray:
    """Logits after the last id; one pass over the whole sequence, loops over heads, complex-number rotation."""
    w = {name: value.astype(np.float64) for name, value in tensors.items()}
    heads, kv_heads, dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    n = len(ids)
    frequencies = config["rope_theta"] ** -(np.arange(dim // 2) * 2 / dim)
    scaling = config.get("rope_scaling")
    if scaling and scaling["rope_type"] == "linear":
        frequencies /= scaling["factor"]
    elif scaling:
        wavelength = 2 * np.pi / frequencies
        original = scaling["original_max_position_embeddings"]
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        blend = (original / wavelength - low) / (high - low)
        mixed = (1 - blend) * frequencies / scaling["factor"] + blend * frequencies
        frequencies = np.where(
            wavelength < original / high,
            frequencies,
            np.where(wavelength > original / low, frequencies / scaling["factor"], mixed),
        )
    turn = np.exp(1j * np.arange(n)[:, None] * frequencies)

    def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return np.asarray(x / np.sqrt((x**2).mean(-1, keepdims=True) + config["rms_norm_eps"]) * weight)

    def rotate(x: np.ndarray) -> np.ndarray:
        z = (x[:, : dim // 2] + 1j * x[:, dim // 2 :]) * turn
        return np.concatenate([z.real, z.imag], axis=1)

    x = w["model.embed_tokens.weight"][ids]
    hidden = np.tril(np.ones((n, n), dtype=bool))
    for layer in range(config["num_hidden_layers"]):
        p = f"model.layers.{layer}"
        h = norm(x, w[f"{p}.input_layernorm.weight"])
        q, k, v = (h @ w[f"{p}.self_attn.{part}_proj.weight"].T for part in "qkv")
        outs = []
        for head in range(heads):
            kv = head // (heads // kv_heads)
            scores = rotate(q[:, head * dim : (head + 1) * dim]) @ rotate(k[:, kv * dim : (kv + 1) * dim]).T
            scores = np.where(hidden, scores / np.sqrt(dim), -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            outs.append(weights / weights.sum(-1, keepdims=True) @ v[:, kv * dim : (kv + 1) * dim])
        x = x + np.concatenate(outs, axis=1) @ w[f"{p}.self_attn.o_proj.weight"].T
        h = norm(x, w[f"{p}.post_attention_layernorm.weight"])
        gate = h @ w[f"{p}.mlp.gate_proj.weight"].T
        up = h @ w[f"{p}.mlp.up_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w[f"{p}.mlp.down_proj.weight"].T
    head_weight = w.get("lm_head.weight", w["model.embed_tokens.weight"])
    return np.asarray(norm(x[-1:], w["model.norm.weight"])[0] @ head_weight.T)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": False, "num_key_value_heads": 4},
        {"num_key_value_heads": 1, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {"rope_scaling": LLAMA3, "rope_theta": 500.0},
    ],
)
def test_logits_equal_a_dense_reference(
    changes: dict[str, Any], tiny_config: dict[str, Any], make_folder: Any, make_weights: Any, bench: Any
) -> None:
    config = {**tiny_config, **changes}
    b = bench(str(make_folder(**changes)))
    for cuts in ((), (7, 8, 31), range(1, 50)):
        got = b.prefill(IDS, PAGES, cuts)
        np.testing.assert_allclose(got, reference_logits(config, make_weights(config), IDS), atol=2e-5)


def test_a_mixed_batch_equals_single_runs(make_folder: Any, bench: Any) -> None:
    b = bench(str(make_folder()))
    tables = [PAGES[:16], PAGES[16:32], PAGES[32:48]]
    alone = [b.prefill(IDS[: 20 + 10 * i], tables[i]) for i in range(3)]
    b.prefill(IDS[:19], tables[0])
    b.prefill(IDS[:10], tables[2])
    steps = [b.step(IDS[19:20], 19, tables[0]), b.step(IDS[:30], 0, tables[1]), b.step(IDS[10:40], 10, tables[2])]
    silent = b.step(IDS[:5], 0, PAGES[48:], None)
    together = b.logits(steps[0], silent, *steps[1:])
    for one, many in zip(alone, together, strict=True):
        np.testing.assert_allclose(one, many, atol=1e-5)


def test_blocks_moved_to_other_pages_give_the_same_bits(make_folder: Any, bench: Any) -> None:
    b = bench(str(make_folder()))
    b.prefill(IDS[:-1], PAGES[:20])
    moved = PAGES[20:40]
    before = b.logits(b.step(IDS[-1:], 49, PAGES[:20]))[0]
    for ordinal in range(13):
        b.storage.copy_page(int(PAGES[ordinal]), int(moved[ordinal]))
    assert np.array_equal(before, b.logits(b.step(IDS[-1:], 49, moved))[0])


def test_a_damaged_block_shows_and_the_rest_of_a_page_does_not(make_folder: Any, bench: Any) -> None:
    b = bench(str(make_folder()))
    b.prefill(IDS[:-1], PAGES)
    before = b.logits(b.step(IDS[-1:], 49, PAGES))[0]
    pool = b.storage.tensor(0)
    pool[int(PAGES[12]), :, :, :, 2:] = float("nan")  # tokens 50 and 51 do not exist
    pool[int(PAGES[13])] = float("nan")
    assert np.array_equal(before, b.logits(b.step(IDS[-1:], 49, PAGES))[0])
    rows = b.logits(b.step(IDS[40:], 40, PAGES))
    np.testing.assert_allclose(before, rows[0], atol=1e-5)
    pool[int(PAGES[3]), 1, 1, 0, 0, 0] += 1.0
    assert not np.array_equal(before, b.logits(b.step(IDS[-1:], 49, PAGES))[0])


def test_an_inner_chunk_writes_all_its_kv(make_folder: Any, bench: Any) -> None:
    b = bench(str(make_folder()))
    b.prefill(IDS, PAGES[:20])
    assert b.runner.forward(_plan(b.step(IDS, 0, PAGES[20:40], None))) == [None]
    pool = b.storage.tensor(0)
    for ordinal in range(12):
        assert pool[int(PAGES[ordinal])].equal(pool[int(PAGES[20 + ordinal])])
    assert b.runner.execute(_plan()) == []


def test_generation_is_repeatable_with_a_seed(make_folder: Any, bench: Any) -> None:
    b = bench(str(make_folder()))
    hot = SamplingParams(temperature=1.0, seed=5)
    first = b.generate(IDS[:10], PAGES, 20, hot)
    assert first == b.generate(IDS[:10], PAGES[::-1].copy(), 20, hot)
    assert first != b.generate(IDS[:10], PAGES, 20, SamplingParams(temperature=1.0, seed=6))


def test_a_gguf_file_of_the_same_weights_gives_the_same_logits(
    tiny_config: dict[str, Any], make_folder: Any, make_weights: Any, bench: Any, tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_config, make_weights(tiny_config))
    from_gguf, from_folder = bench(str(path)), bench(str(make_folder()))
    right = from_folder.prefill(IDS, PAGES)
    converted = from_gguf.prefill(IDS, PAGES)
    np.testing.assert_allclose(right, converted, atol=1e-5)  # bits may differ: the tensors are aligned otherwise
    again = bench(str(path))  # from the cache this time
    assert np.array_equal(converted, again.prefill(IDS, PAGES))
    assert again.runner.layout == from_gguf.runner.layout
    assert from_gguf.runner.layout.model_fingerprint != from_folder.runner.layout.model_fingerprint


def test_a_damaged_conversion_is_made_anew(
    tiny_config: dict[str, Any], make_weights: Any, bench: Any, tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_config, make_weights(tiny_config))
    right = bench(str(path)).prefill(IDS, PAGES)
    (weights,) = (tmp_path / "cache").glob("gguf-*/weights.safetensors")
    weights.write_bytes(weights.read_bytes()[:1000])
    assert np.array_equal(right, bench(str(path)).prefill(IDS, PAGES))


def test_query_and_key_rows_must_be_unpermuted() -> None:
    """Interleaved rotation of permuted rows is the half-split rotation of the un-permuted ones."""
    rng = np.random.default_rng(0)
    heads, dim = 3, 8
    split = rng.standard_normal((heads * dim, 5)).astype(np.float32)
    interleaved = permute_rotary(split, heads)
    assert not np.array_equal(split, interleaved)
    assert np.array_equal(unpermute_rotary(interleaved, heads), split)
    x = rng.standard_normal(5)
    turn = np.exp(1j * rng.standard_normal(dim // 2))
    a = (interleaved @ x).reshape(heads, dim // 2, 2)
    b = (split @ x).reshape(heads, 2, dim // 2)
    np.testing.assert_allclose((a[..., 0] + 1j * a[..., 1]) * turn, (b[:, 0] + 1j * b[:, 1]) * turn)


def permute_rotary(weight: np.ndarray, heads: int) -> np.ndarray:
    """What a converter to GGUF does."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write_gguf(path: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> Path:
    from gguf import GGUFWriter

    writer = GGUFWriter(str(path), "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_token_list([f"t{i}" for i in range(config["vocab_size"])])
    writer.add_eos_token_id(2)
    names = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    writer.add_tensor("token_embd.weight", tensors["model.embed_tokens.weight"])
    writer.add_tensor("output_norm.weight", tensors["model.norm.weight"])
    for layer, (old, new) in itertools.product(range(config["num_hidden_layers"]), names.items()):
        value = tensors[f"model.layers.{layer}.{old}.weight"]
        if new == "attn_q":
            value = permute_rotary(value, config["num_attention_heads"])
        elif new == "attn_k":
            value = permute_rotary(value, config["num_key_value_heads"])
        writer.add_tensor(f"blk.{layer}.{new}.weight", np.ascontiguousarray(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _plan(*steps: Any) -> Any:
    from cluster.engine import StepPlan

    return StepPlan(steps)


def test_the_storage_must_fit(make_folder: Callable[..., Path]) -> None:
    folder = str(make_folder())
    runner, other = load_runner(folder, tokens_per_block=4), load_runner(folder, tokens_per_block=8)
    with pytest.raises(EngineError, match="bind a storage"):
        runner.execute(_plan())
    storage, hashed = make_storage(other, [2]), make_storage(HashRunner(4), [2])
    with pytest.raises(EngineError, match="another layout"):
        runner.bind(storage)
    with pytest.raises(EngineError, match="TorchPageStorage"):
        runner.bind(hashed)
    storage.close()
    hashed.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [({"device": "tpu"}, "not supported"), ({"dtype": "int3"}, "unknown dtype"), ({"device": "cuda:99"}, "GPU|99")],
)
def test_unknown_devices_and_dtypes_are_refused(make_folder: Any, options: dict[str, str], words: str) -> None:
    with pytest.raises(ModelLoadError, match=words):
        load_runner(str(make_folder()), tokens_per_block=4, **options)


def test_half_precision_stays_near(make_folder: Any, bench: Any) -> None:
    folder = str(make_folder())
    right = bench(folder).prefill(IDS, PAGES)
    runner = load_runner(folder, tokens_per_block=4, dtype="bfloat16")
    assert runner.layout.groups[0].dtype == "bfloat16"
    storage = make_storage(runner, [64])
    runner.bind(storage)
    b = bench("hash")
    (row,) = runner.forward(_plan(b.step(IDS, 0, PAGES)))  # type: ignore[attr-defined]
    assert 0 < np.abs(row - right).max() < 0.1 * np.abs(right).max() + 0.3
    storage.close()
