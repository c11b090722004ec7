"""Reads the model name of the hash model: `hash`, or `hash:key=value,...` with the options below."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.engine.errors import ModelLoadError

__all__ = ["HashSpec", "is_hash_model", "parse_hash_model"]


@dataclass(frozen=True, slots=True)
class HashSpec:
    """Options of a hash model. `layers` and `kv_heads` are part of its fingerprint, the others are not."""

    layers: int = 2
    kv_heads: int = 1
    max_position: int = 32768
    step_ms: int = 0  # slows every step down


def is_hash_model(model: str) -> bool:
    """True for names that `parse_hash_model` is meant for."""
    return model == "hash" or model.startswith("hash:")


def parse_hash_model(model: str) -> HashSpec:
    """The options in `model`. Raises ModelLoadError for an unknown option or a value that is no positive integer."""
    known = {name: getattr(HashSpec(), name) for name in ("layers", "kv_heads", "max_position", "step_ms")}
    text = model.removeprefix("hash").removeprefix(":")
    for item in text.split(",") if text else ():
        name, _, value = item.partition("=")
        if name not in known:
            raise ModelLoadError(f"model {model!r}: unknown option {name!r}, use {', '.join(known)}")
        if not value.isascii() or not value.isdigit() or (name != "step_ms" and int(value) < 1):
            raise ModelLoadError(f"model {model!r}: {name} must be a positive integer, not {value!r}")
        known[name] = int(value)
    return HashSpec(**known)
