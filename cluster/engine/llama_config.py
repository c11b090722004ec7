"""The shape of a Llama-architecture model, read from a GGUF header or a Hugging Face config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from cluster.engine.errors import ModelLoadError
from cluster.engine.model_description import ModelDescription
from kvcache.layout import KvLayout, LayerGroup, LifeCycleKind

__all__ = ["LlamaConfig", "llama_config_from_gguf", "llama_config_from_hugging_face"]


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """Sizes and constants of one model.

    rope_divisors   one number a rotary pair by which its inverse frequency is divided, or None for plain RoPE
    tied_head       the output head is the embedding matrix
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    rope_theta: float
    rms_eps: float
    tied_head: bool
    eos_token_ids: tuple[int, ...]
    rope_divisors: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim",
                     "vocab_size", "max_position"):  # fmt: skip
            if getattr(self, name) < 1:
                raise ModelLoadError(
                    f"the model's {name} is {getattr(self, name)}: its header or config.json is damaged"
                )
        if self.num_heads % self.num_kv_heads:
            raise ModelLoadError(f"{self.num_heads} query heads cannot share {self.num_kv_heads} KV heads evenly")
        if self.head_dim % 2:
            raise ModelLoadError(f"rotary embedding needs an even head_dim, the model has {self.head_dim}")
        if self.rope_divisors is not None and len(self.rope_divisors) != self.head_dim // 2:
            raise ModelLoadError(f"{len(self.rope_divisors)} rotary factors do not fit head_dim {self.head_dim}")

    @property
    def qkv_rows(self) -> int:
        """Rows of the fused query, key and value projection."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    def describe(self, fingerprint: str, tokens_per_block: int, dtype: str) -> ModelDescription:
        """Facts of the model with KV of `dtype`: one full-attention group of all layers."""
        group = LayerGroup(
            LifeCycleKind.FULL,
            tuple(range(self.num_layers)),
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=dtype,
        )
        return ModelDescription(
            KvLayout(fingerprint, tokens_per_block, (group,)),
            self.vocab_size,
            self.max_position,
            frozenset(self.eos_token_ids),
            fingerprint,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def llama_config_from_gguf(
    metadata: Mapping[str, Any], *, tied_head: bool, rope_divisors: tuple[float, ...] | None, where: str
) -> LlamaConfig:
    """The config in a GGUF file's metadata. Raises ModelLoadError for another architecture or a missing key."""
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise ModelLoadError(
            f"{where} holds a model of architecture {architecture!r}, this engine runs 'llama': use another model file"
        )
    scaling = metadata.get("llama.rope.scaling.type", "none")
    if scaling == "linear" and rope_divisors is None:
        factor = float(metadata.get("llama.rope.scaling.factor", 1.0))
    elif scaling == "none":
        factor = 1.0
    else:
        raise ModelLoadError(f"{where} uses RoPE scaling {scaling!r}, which this engine does not support")
    if metadata.get("llama.expert_count"):
        raise ModelLoadError(f"{where} is a mixture-of-experts model, which this engine does not support")
    try:
        heads = int(metadata["llama.attention.head_count"])
        hidden = int(metadata["llama.embedding_length"])
        head_dim = int(metadata.get("llama.attention.key_length", hidden // max(heads, 1)))
        rotary = int(metadata.get("llama.rope.dimension_count", head_dim))
        if rotary != head_dim:
            raise ModelLoadError(f"{where} rotates {rotary} of {head_dim} head dimensions: not supported")
        if factor != 1.0:
            rope_divisors = (factor,) * (head_dim // 2)
        return LlamaConfig(
            num_layers=int(metadata["llama.block_count"]),
            hidden_size=hidden,
            intermediate_size=int(metadata["llama.feed_forward_length"]),
            num_heads=heads,
            num_kv_heads=int(metadata.get("llama.attention.head_count_kv", heads)),
            head_dim=head_dim,
            vocab_size=len(metadata["tokenizer.ggml.tokens"]),
            max_position=int(metadata["llama.context_length"]),
            rope_theta=float(metadata.get("llama.rope.freq_base", 10000.0)),
            rms_eps=float(metadata["llama.attention.layer_norm_rms_epsilon"]),
            tied_head=tied_head,
            eos_token_ids=(int(metadata["tokenizer.ggml.eos_token_id"]),),
            rope_divisors=rope_divisors,
        )
    except KeyError as error:
        raise ModelLoadError(
            f"{where} has no metadata key {error.args[0]!r}: the file is damaged or too old"
        ) from error
    except (TypeError, ValueError) as error:
        raise ModelLoadError(f"{where} has a metadata value of a wrong type: {error}") from error


def llama_config_from_hugging_face(config: Mapping[str, Any], generation: Mapping[str, Any], where: str) -> LlamaConfig:
    """The config in a Hugging Face folder. Raises ModelLoadError for another model type or a missing key."""
    if config.get("model_type") != "llama":
        raise ModelLoadError(
            f"{where} has model_type {config.get('model_type')!r}, this engine runs 'llama': use another model folder"
        )
    if config.get("attention_bias") or config.get("mlp_bias"):
        raise ModelLoadError(f"{where} has projection biases, which this engine does not support")
    if config.get("quantization_config"):
        raise ModelLoadError(f"{where} is quantised: use the float safetensors of the model or a GGUF file")
    if config.get("hidden_act", "silu") != "silu":
        raise ModelLoadError(f"{where} uses activation {config['hidden_act']!r}, this engine has 'silu'")
    try:
        heads = int(config["num_attention_heads"])
        head_dim = int(config.get("head_dim") or int(config["hidden_size"]) // heads)
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        theta = float(config.get("rope_theta") or rope.get("rope_theta", 10000.0))
        eos = generation.get("eos_token_id", config.get("eos_token_id"))
        return LlamaConfig(
            num_layers=int(config["num_hidden_layers"]),
            hidden_size=int(config["hidden_size"]),
            intermediate_size=int(config["intermediate_size"]),
            num_heads=heads,
            num_kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=head_dim,
            vocab_size=int(config["vocab_size"]),
            max_position=int(config["max_position_embeddings"]),
            rope_theta=theta,
            rms_eps=float(config.get("rms_norm_eps", 1e-6)),
            tied_head=bool(config.get("tie_word_embeddings", False)),
            eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (int(eos),),
            rope_divisors=_rope_divisors(rope, theta, head_dim, where),
        )
    except KeyError as error:
        raise ModelLoadError(f"{where} has no key {error.args[0]!r}: is this the model's own config.json?") from error
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise ModelLoadError(f"{where} has a value of a wrong type: {error}") from error


def _rope_divisors(rope: Mapping[str, Any], theta: float, head_dim: int, where: str) -> tuple[float, ...] | None:
    """Divisors of the inverse frequencies for the scaling kinds of Llama models."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return (float(rope["factor"]),) * (head_dim // 2)
    if kind != "llama3":
        raise ModelLoadError(f"{where} uses RoPE scaling {kind!r}; this engine has default, linear and llama3")
    factor = float(rope["factor"])
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    original = float(rope["original_max_position_embeddings"])
    divisors: list[float] = []
    for pair in range(head_dim // 2):
        turns = original / (2 * math.pi * theta ** (2 * pair / head_dim))  # of this pair within the original context
        if turns > high:
            divisors.append(1.0)
        elif turns < low:
            divisors.append(factor)
        else:
            smooth = (turns - low) / (high - low)
            divisors.append(1.0 / ((1.0 - smooth) / factor + smooth))
    return tuple(divisors)
