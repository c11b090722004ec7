"""The forward pass of a Llama-architecture model over a paged KV pool (torch).

Called by LlamaRunner only. Rows of all sequences of a step go through the projections together; attention goes sequence
by sequence. It knows no sampling, no scheduling and allocates no pages.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import linear, rms_norm, silu

from cluster.engine.attention import GatherAttention
from cluster.engine.llama_config import LlamaConfig

__all__ = ["LlamaModel", "StepRows"]


@dataclass(frozen=True, slots=True, eq=False)
class StepRows:
    """One step as tensors on the model's device. A row is one token to compute; a sequence's rows are adjacent.

    token_ids, positions, pages, offsets   int64 (rows,): the token, its position, and where its KV goes
    spans                                  first and last + 1 row of each sequence
    attention                              one for each sequence
    sampled                                int64: rows whose logits are wanted, in sequence order
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    pages: torch.Tensor
    offsets: torch.Tensor
    spans: tuple[tuple[int, int], ...]
    attention: tuple[GatherAttention, ...]
    sampled: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    attn_norm: torch.Tensor
    qkv: torch.Tensor
    o: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


class LlamaModel:
    """Weights of one model and its forward pass. `tensors` are named as in `fused_shapes`, all on one device."""

    def __init__(self, config: LlamaConfig, tensors: dict[str, torch.Tensor]) -> None:
        self._config = config
        self._embed = tensors["embed"]
        self._norm = tensors["norm"]
        self._head = tensors.get("head", self._embed)
        names = ("attn_norm", "qkv", "o", "mlp_norm", "gate_up", "down")
        self._layers = [
            _Layer(*(tensors[f"layers.{layer}.{name}"] for name in names)) for layer in range(config.num_layers)
        ]
        pairs = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=self._embed.device)
        self._inverse_frequencies = 1.0 / (config.rope_theta ** (pairs / config.head_dim))
        if config.rope_divisors is not None:
            self._inverse_frequencies /= torch.tensor(config.rope_divisors, device=self._embed.device)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self._embed.device

    def forward(self, pool: torch.Tensor, rows: StepRows) -> torch.Tensor:
        """Write the KV of all rows into `pool` (pages, layers, 2, kv_heads, block, dim).

        Returns the logits of the sampled rows, float32 (sampled, vocab).
        """
        config = self._config
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        count = len(rows.token_ids)
        hidden = self._embed[rows.token_ids]
        cos, sin = self._rotary(rows.positions, hidden.dtype)
        for index, layer in enumerate(self._layers):
            is_last = index == len(self._layers) - 1
            normed = rms_norm(hidden, (config.hidden_size,), layer.attn_norm, config.rms_eps)
            projected = linear(normed, layer.qkv).view(count, heads + 2 * kv_heads, dim)
            rotated = projected[:, : heads + kv_heads]
            first, second = rotated.chunk(2, dim=-1)
            rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
            layer_pool = pool[:, index]
            layer_pool[rows.pages, 0, :, rows.offsets] = rotated[:, heads:].to(pool.dtype)
            layer_pool[rows.pages, 1, :, rows.offsets] = projected[:, heads + kv_heads :].to(pool.dtype)
            if is_last and not len(rows.sampled):
                break
            query = rotated[:, :heads]
            attended = torch.empty_like(query)
            for (begin, end), attend in zip(rows.spans, rows.attention, strict=True):
                attended[begin:end] = attend(layer_pool, query[begin:end])
            if is_last:  # from here on only rows with a wanted token matter
                attended, hidden = attended[rows.sampled], hidden[rows.sampled]
            hidden = hidden + linear(attended.reshape(len(hidden), heads * dim), layer.o)
            normed = rms_norm(hidden, (config.hidden_size,), layer.mlp_norm, config.rms_eps)
            gate, up = linear(normed, layer.gate_up).chunk(2, dim=-1)
            hidden = hidden + linear(silu(gate) * up, layer.down)
        hidden = rms_norm(hidden[: len(rows.sampled)], (config.hidden_size,), self._norm, config.rms_eps)
        return linear(hidden, self._head).float()

    def _rotary(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine, (rows, 1, dim / 2), computed in float32."""
        angles = (positions[:, None].to(torch.float32) * self._inverse_frequencies[None, :])[:, None, :]
        return angles.cos().to(dtype), angles.sin().to(dtype)
