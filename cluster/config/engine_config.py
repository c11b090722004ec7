"""The `engine` section: how a worker runs the model.

Read by `cluster.engine` and the scheduler. Says nothing about caching (`kv_cache_config`) or about HTTP (`server`).
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from cluster.config.base import StrictModel

__all__ = ["EngineConfig"]


class EngineConfig(StrictModel):
    """Device, number format and the limits of one scheduling step."""

    device: str = Field(
        default="auto",
        pattern=r"^(auto|cpu|cuda(:\d+)?)$",
        description="Where the model runs: `auto` (CUDA when there is any), `cpu`, `cuda` or `cuda:N`.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto",
        description="Number format of weights and KV. `auto` is float32 on a CPU and bfloat16 on CUDA.",
    )
    max_batch_size: int = Field(default=16, ge=1, le=65536, description="Sequences in one step.")
    max_num_tokens: int = Field(
        default=2048, ge=1, description="Tokens in one step: decodes and prefill chunks together."
    )
    max_seq_len: int = Field(
        default=8192,
        ge=2,
        description="Longest sequence, prompt and answer together, in tokens. The model's own limit applies too.",
    )
    enable_chunked_prefill: bool = Field(
        default=True, description="Compute a prompt longer than `max_num_tokens` in several steps."
    )
