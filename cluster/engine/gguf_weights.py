"""Turns the tensors of a Llama GGUF file into the engine's fused float32 tensors."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from cluster.engine.errors import ModelLoadError
from cluster.engine.gguf_file import GgufFile
from cluster.engine.llama_config import LlamaConfig

__all__ = ["fused_from_gguf", "read_gguf_tensor", "unpermute_rotary"]

_LOG = logging.getLogger(__name__)


def unpermute_rotary(weight: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Undo the row order that GGUF files use for query and key projections.

    They interleave the two halves of each rotary pair; this engine (like Hugging Face's) keeps the halves apart.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows, columns)


def read_gguf_tensor(file: GgufFile, name: str) -> NDArray[np.float32]:
    """One tensor as float32. Raises ModelLoadError when it is missing, cut short or of an unknown type."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    tensor = file.tensors.get(name)
    if tensor is None:
        raise ModelLoadError(f"{file.path} has no tensor {name}: it is not a complete Llama model")
    try:
        kind = GGMLQuantizationType(tensor.type_id)
    except ValueError:
        raise ModelLoadError(f"{file.path}: tensor {name} has the unknown GGML type {tensor.type_id}") from None
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if tensor.shape[-1] % block:
        raise ModelLoadError(f"{file.path} is damaged: tensor {name} does not divide into {kind.name} blocks")
    row_bytes = tensor.shape[-1] // block * block_bytes
    rows = int(np.prod(tensor.shape[:-1], dtype=np.int64))
    raw = np.frombuffer(file.data(tensor, rows * row_bytes), dtype=np.uint8).reshape(*tensor.shape[:-1], row_bytes)
    if kind is GGMLQuantizationType.F32:
        return raw.view(np.float32).reshape(tensor.shape)
    if kind is GGMLQuantizationType.F16:
        return raw.view(np.float16).reshape(tensor.shape).astype(np.float32)
    try:
        values: NDArray[np.float32] = dequantize(raw, kind)
    except NotImplementedError:
        raise ModelLoadError(
            f"{file.path}: tensors of GGML type {kind.name} cannot be decoded; use F16 or Q8_0"
        ) from None
    return values.reshape(tensor.shape).astype(np.float32, copy=False)


def fused_from_gguf(file: GgufFile, config: LlamaConfig) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Every tensor of `fused_shapes(config)` in its order, one at a time; logs progress."""
    yield "embed", read_gguf_tensor(file, "token_embd.weight")
    for layer in range(config.num_layers):
        if layer % 10 == 0:
            _LOG.info("converting %s: layer %d of %d", file.path.name, layer, config.num_layers)
        source, target = f"blk.{layer}", f"layers.{layer}"
        query = unpermute_rotary(read_gguf_tensor(file, f"{source}.attn_q.weight"), config.num_heads)
        key = unpermute_rotary(read_gguf_tensor(file, f"{source}.attn_k.weight"), config.num_kv_heads)
        value = read_gguf_tensor(file, f"{source}.attn_v.weight")
        gate = read_gguf_tensor(file, f"{source}.ffn_gate.weight")
        up = read_gguf_tensor(file, f"{source}.ffn_up.weight")
        yield f"{target}.attn_norm", read_gguf_tensor(file, f"{source}.attn_norm.weight")
        yield f"{target}.qkv", np.concatenate([query, key, value])
        yield f"{target}.o", read_gguf_tensor(file, f"{source}.attn_output.weight")
        yield f"{target}.mlp_norm", read_gguf_tensor(file, f"{source}.ffn_norm.weight")
        yield f"{target}.gate_up", np.concatenate([gate, up])
        yield f"{target}.down", read_gguf_tensor(file, f"{source}.ffn_down.weight")
    yield "norm", read_gguf_tensor(file, "output_norm.weight")
    if not config.tied_head:
        yield "head", read_gguf_tensor(file, "output.weight")
