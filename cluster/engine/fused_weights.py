"""The engine's own weight file: fused tensors in safetensors form, written tensor by tensor and mapped on load.

Names and shapes are `fused_shapes`. Tensors start at page boundaries of the file, and mapping instead of reading lets
every process on a machine share one copy in the page cache.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from cluster.engine.errors import ModelLoadError
from cluster.engine.llama_config import LlamaConfig

if TYPE_CHECKING:
    import torch

__all__ = ["fused_shapes", "load_fused", "write_fused"]

_DATA_ALIGNMENT = 4096


def fused_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the model, in file order; matrices are [out, in]."""
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {"embed": (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        shapes[f"layers.{layer}.attn_norm"] = (hidden,)
        shapes[f"layers.{layer}.qkv"] = (config.qkv_rows, hidden)
        shapes[f"layers.{layer}.o"] = (hidden, config.num_heads * config.head_dim)
        shapes[f"layers.{layer}.mlp_norm"] = (hidden,)
        shapes[f"layers.{layer}.gate_up"] = (2 * inner, hidden)
        shapes[f"layers.{layer}.down"] = (hidden, inner)
    shapes["norm"] = (hidden,)
    if not config.tied_head:
        shapes["head"] = (config.vocab_size, hidden)
    return shapes


def write_fused(path: Path, config: LlamaConfig, tensors: Iterable[tuple[str, NDArray[np.float32]]]) -> None:
    """Write float32 tensors, given in the order of `fused_shapes`, and flush them to disk.

    Raises ModelLoadError for a tensor out of order or of another shape, OSError when the disk is full.
    """
    shapes = fused_shapes(config)
    header: dict[str, object] = {}
    offset = 0
    for name, shape in shapes.items():
        nbytes = 4 * int(np.prod(shape))
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [offset, offset + nbytes]}
        offset += nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _DATA_ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        names = iter(shapes)
        for name, values in tensors:
            expected = next(names, None)
            if name != expected:
                raise ModelLoadError(f"weights come out of order: {name} where {expected} was due")
            if values.shape != shapes[name]:
                raise ModelLoadError(f"tensor {name} has shape {values.shape}, the model's config wants {shapes[name]}")
            file.write(np.ascontiguousarray(values, dtype="<f4").data)
        missing = next(names, None)
        if missing is not None:
            raise ModelLoadError(f"the weights end before tensor {missing}")
        file.flush()
        os.fsync(file.fileno())


def load_fused(path: Path, config: LlamaConfig) -> dict[str, torch.Tensor]:
    """Map the file: float32 tensors on the CPU that share the page cache (never write to them).

    Raises ModelLoadError when the file is damaged.
    """
    from safetensors import SafetensorError, safe_open

    shapes = fused_shapes(config)
    try:
        with safe_open(str(path), framework="pt", device="cpu") as file:
            tensors: dict[str, torch.Tensor] = {name: file.get_tensor(name) for name in shapes}
    except (OSError, SafetensorError) as error:
        raise ModelLoadError(f"{path} is damaged ({error}): delete its folder, it is built anew") from error
    for name, shape in shapes.items():
        if tuple(tensors[name].shape) != shape:
            raise ModelLoadError(f"{path} holds {name} of another shape: delete its folder, it is built anew")
    return tensors
