"""A model in a GGUF file. Its weights are converted once into the cache and mapped from there."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.engine.fused_weights import load_fused, write_fused
from cluster.engine.gguf_file import GgufFile
from cluster.engine.gguf_weights import fused_from_gguf, read_gguf_tensor
from cluster.engine.llama_config import LlamaConfig, llama_config_from_gguf
from cluster.engine.weight_cache import WeightCache, file_digest

if TYPE_CHECKING:
    import torch

    from cluster.engine.tokenizer import Tokenizer

__all__ = ["GgufSource"]

_LOG = logging.getLogger(__name__)
_CONVERSION = 1  # raise it when the fused form changes: cached conversions of older ones are then left alone
_WEIGHTS, _NOTE = "weights.safetensors", "conversion.json"


class GgufSource:
    """ModelSource over one .gguf file."""

    def __init__(self, path: Path, cache: WeightCache | None = None) -> None:
        self.path = path
        self._cache = cache
        _ = self.config  # an unreadable file or another architecture is found here

    @cached_property
    def _file(self) -> GgufFile:
        return GgufFile(self.path)

    @cached_property
    def config(self) -> LlamaConfig:
        """The model's shape, from the file's header."""
        divisors = None
        if "rope_freqs.weight" in self._file.tensors:
            divisors = tuple(float(value) for value in read_gguf_tensor(self._file, "rope_freqs.weight"))
        return llama_config_from_gguf(
            self._file.metadata,
            tied_head="output.weight" not in self._file.tensors,
            rope_divisors=divisors,
            where=str(self.path),
        )

    def fingerprint(self) -> str:
        """Of the file's bytes."""
        return hashlib.sha256(f"kvferry gguf {file_digest(self.path)}".encode()).hexdigest()

    def load_weights(self) -> dict[str, torch.Tensor]:
        """Mapped float32 tensors. Blocks for the conversion (seconds) the first time on a machine."""
        folder = (self._cache or WeightCache()).get(
            f"gguf-{file_digest(self.path)}-v{_CONVERSION}", self._is_complete, self._convert
        )
        return load_fused(folder / _WEIGHTS, self.config)

    def load_tokenizer(self) -> Tokenizer:
        """From the file's metadata."""
        from cluster.engine.gguf_tokenizer import tokenizer_from_gguf

        return tokenizer_from_gguf(self._file.metadata, str(self.path))

    def _is_complete(self, folder: Path) -> bool:
        try:
            note = json.loads((folder / _NOTE).read_text())
            return bool(note["weights_bytes"] == (folder / _WEIGHTS).stat().st_size)
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def _convert(self, folder: Path) -> None:
        started = time.monotonic()
        _LOG.info("converting %s to float32, once for this machine, into %s", self.path, folder.parent)
        weights = folder / _WEIGHTS
        write_fused(weights, self.config, fused_from_gguf(self._file, self.config))
        note = {
            "source": str(self.path),
            "source_sha256": file_digest(self.path),
            "weights_bytes": weights.stat().st_size,
            "config": self.config.to_dict(),
        }
        (folder / _NOTE).write_text(json.dumps(note, indent=1))
        _LOG.info("converted %s in %.1f s", self.path.name, time.monotonic() - started)
