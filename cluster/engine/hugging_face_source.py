"""A model in a Hugging Face folder: config.json, safetensors and tokenizer.json. Nothing is downloaded."""

from __future__ import annotations

import hashlib
import json
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.engine.errors import ModelLoadError
from cluster.engine.fused_weights import fused_shapes
from cluster.engine.llama_config import LlamaConfig, llama_config_from_hugging_face
from cluster.engine.weight_cache import file_digest

if TYPE_CHECKING:
    import torch

    from cluster.engine.tokenizer import Tokenizer

__all__ = ["HuggingFaceSource"]

_ONE_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"


class HuggingFaceSource:
    """ModelSource over one folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        _ = self.config

    @cached_property
    def config(self) -> LlamaConfig:
        """The model's shape, from config.json and generation_config.json."""
        config = self._json("config.json")
        generation = self._json("generation_config.json") if (self.path / "generation_config.json").exists() else {}
        return llama_config_from_hugging_face(config, generation, str(self.path / "config.json"))

    def fingerprint(self) -> str:
        """Of config.json and the bytes of every weight file."""
        digest = hashlib.sha256(b"kvferry hugging face ")
        for path in (self.path / "config.json", *self._weight_files()):
            digest.update(bytes.fromhex(file_digest(path)))
        return digest.hexdigest()

    def load_weights(self) -> dict[str, torch.Tensor]:
        """Fused copies of the folder's tensors (private memory of this process)."""
        import torch
        from safetensors import SafetensorError, safe_open

        tensors: dict[str, torch.Tensor] = {}
        for path in self._weight_files():
            try:
                with safe_open(str(path), framework="pt", device="cpu") as file:
                    for name in list(file.keys()):  # not a mapping: it has no iterator
                        tensors[name.removeprefix("model.")] = file.get_tensor(name)
            except (OSError, SafetensorError) as error:
                raise ModelLoadError(f"cannot read the weights in {path}: {error}; fetch the file again") from error
        try:
            fused = {"embed": tensors["embed_tokens.weight"], "norm": tensors["norm.weight"]}
            for layer in range(self.config.num_layers):
                old, new = f"layers.{layer}", f"layers.{layer}"
                parts = [tensors.pop(f"{old}.self_attn.{part}_proj.weight") for part in ("q", "k", "v")]
                fused[f"{new}.qkv"] = torch.cat(parts)
                halves = [tensors.pop(f"{old}.mlp.{part}_proj.weight") for part in ("gate", "up")]
                fused[f"{new}.gate_up"] = torch.cat(halves)
                fused[f"{new}.o"] = tensors[f"{old}.self_attn.o_proj.weight"]
                fused[f"{new}.down"] = tensors[f"{old}.mlp.down_proj.weight"]
                fused[f"{new}.attn_norm"] = tensors[f"{old}.input_layernorm.weight"]
                fused[f"{new}.mlp_norm"] = tensors[f"{old}.post_attention_layernorm.weight"]
            if not self.config.tied_head:
                fused["head"] = tensors["lm_head.weight"]
        except KeyError as error:
            raise ModelLoadError(
                f"{self.path} has no tensor {error.args[0]!r}: it is not a complete Llama model"
            ) from error
        for name, shape in fused_shapes(self.config).items():
            if tuple(fused[name].shape) != shape:
                raise ModelLoadError(
                    f"{self.path}: {name} has shape {tuple(fused[name].shape)}, config.json wants {shape}"
                )
        return fused

    def load_tokenizer(self) -> Tokenizer:
        """From tokenizer.json; the chat template from chat_template.jinja or tokenizer_config.json."""
        from cluster.engine.fast_tokenizer import tokenizer_from_folder

        return tokenizer_from_folder(self.path, self.config.vocab_size, frozenset(self.config.eos_token_ids))

    def _weight_files(self) -> list[Path]:
        if (self.path / _INDEX).exists():
            names = self._json(_INDEX).get("weight_map")
            if not isinstance(names, dict) or not names:
                raise ModelLoadError(f"{self.path / _INDEX} has no weight_map: fetch the file again")
            return [self.path / str(name) for name in sorted(set(names.values()))]
        if not (self.path / _ONE_FILE).exists():
            raise ModelLoadError(f"{self.path} has neither {_ONE_FILE} nor {_INDEX}: name a folder with safetensors")
        return [self.path / _ONE_FILE]

    def _json(self, name: str) -> dict[str, Any]:
        path = self.path / name
        try:
            data = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise ModelLoadError(f"cannot read {path}: {error}; is this a model folder?") from error
        if not isinstance(data, dict):
            raise ModelLoadError(f"{path} is not a JSON object: is this a model folder?")
        return data
