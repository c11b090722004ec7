"""The forward pass of a Llama-architecture model over a paged KV pool (torch).

Called by LlamaRunner only. Rows of all sequences of a step go through the projections together; attention goes sequence
by sequence. It knows no sampling, no scheduling and allocates no pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import rms_norm, silu

from cluster.engine.attention import Kernels
from cluster.engine.llama_config import LlamaConfig

__all__ = ["LlamaModel", "StepRows"]


@dataclass(frozen=True, slots=True, eq=False)
class StepRows:
    """One step as tensors on the model's device. A row is one token to compute; a sequence's rows are adjacent.

    token_ids, positions, pages, offsets   int64 (rows,): the token, its position, and where its KV goes
    attention                              what `Kernels.plan` made of the sequences
    sampled                                int64: rows whose logits are wanted, in sequence order
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    pages: torch.Tensor
    offsets: torch.Tensor
    attention: Any
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

    def __init__(self, config: LlamaConfig, tensors: dict[str, torch.Tensor], kernels: Kernels) -> None:
        self.kernels = kernels
        self._config = config
        self._embed = tensors["embed"]
        self._norm = tensors["norm"]
        self._head = tensors.get("head", self._embed)
        names = ("attn_norm", "qkv", "o", "mlp_norm", "gate_up", "down")
        self._layers = [
            _Layer(*(tensors[f"layers.{layer}.{name}"] for name in names)) for layer in range(config.num_layers)
        ]
        self._cos, self._sin = self._rotary_tables()

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
        cos, sin = self._cos[rows.positions], self._sin[rows.positions]
        for index, layer in enumerate(self._layers):
            is_last = index == len(self._layers) - 1
            normed = rms_norm(hidden, (config.hidden_size,), layer.attn_norm, config.rms_eps)
            projected = self.kernels.linear(normed, layer.qkv).view(count, heads + 2 * kv_heads, dim)
            rotated = projected[:, : heads + kv_heads]
            first, second = rotated.chunk(2, dim=-1)
            rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
            layer_pool = pool[:, index]
            layer_pool[rows.pages, 0, :, rows.offsets] = rotated[:, heads:].to(pool.dtype)
            layer_pool[rows.pages, 1, :, rows.offsets] = projected[:, heads + kv_heads :].to(pool.dtype)
            if is_last and not len(rows.sampled):
                break
            attended = self.kernels.attend(rows.attention, layer_pool, rotated[:, :heads])
            if is_last:  # from here on only rows with a wanted token matter
                attended, hidden = attended[rows.sampled], hidden[rows.sampled]
            hidden = hidden + self.kernels.linear(attended, layer.o)
            normed = rms_norm(hidden, (config.hidden_size,), layer.mlp_norm, config.rms_eps)
            gate, up = self.kernels.linear(normed, layer.gate_up).chunk(2, dim=-1)
            hidden = hidden + self.kernels.linear(silu(gate) * up, layer.down)
        hidden = rms_norm(hidden[: len(rows.sampled)], (config.hidden_size,), self._norm, config.rms_eps)
        return self.kernels.linear(hidden, self._head).float()

    def _rotary_tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine of every position, (max_position, 1, dim / 2), computed in float32.

        Tables, because the vector library's cosine of a number depends on its neighbours in the batch, in the last bit.
        """
        config, device = self._config, self.device
        pairs = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device)
        frequencies = 1.0 / (config.rope_theta ** (pairs / config.head_dim))
        if config.rope_divisors is not None:
            frequencies = frequencies / torch.tensor(config.rope_divisors, device=device)
        positions = torch.arange(config.max_position, dtype=torch.float32, device=device)
        angles = (positions[:, None] * frequencies[None, :])[:, None, :]
        return angles.cos().to(self._embed.dtype), angles.sin().to(self._embed.dtype)
