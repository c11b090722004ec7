"""The engine: models over a paged KV cache, behind the ModelRunner seam.

Importing this package imports neither torch nor gguf nor tokenizers: the names that need them are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from cluster.engine.errors import EngineError, InvalidStepError, ModelLoadError
from cluster.engine.free_memory import free_memory_bytes
from cluster.engine.hash_runner import HashRunner
from cluster.engine.hash_tokenizer import HashTokenizer
from cluster.engine.load import describe_model, load_runner, load_tokenizer, make_storage
from cluster.engine.model_description import ModelDescription
from cluster.engine.model_runner import ModelRunner, SequenceStep, StepPlan
from cluster.engine.sampler import sample
from cluster.engine.tokenizer import TextStream, Tokenizer

if TYPE_CHECKING:
    from cluster.engine.llama_runner import LlamaRunner

__all__ = [
    "EngineError",
    "HashRunner",
    "HashTokenizer",
    "InvalidStepError",
    "LlamaRunner",
    "ModelDescription",
    "ModelLoadError",
    "ModelRunner",
    "SequenceStep",
    "StepPlan",
    "TextStream",
    "Tokenizer",
    "describe_model",
    "free_memory_bytes",
    "load_runner",
    "load_tokenizer",
    "make_storage",
    "sample",
]

_LAZY = {"LlamaRunner": "cluster.engine.llama_runner"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
