"""Merging of raw configuration layers: later ones win, mappings key by key, everything else as a whole.

Used by the loader and by `ClusterConfig` when it fills the server sections. Knows one alias and no other key.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["canonical_keys", "deep_merge"]


def deep_merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `over` laid on it; neither argument is changed or shared with the result's inner mappings."""
    merged: dict[str, Any] = {key: _copy(value) for key, value in base.items()}
    for key, value in over.items():
        old = merged.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            merged[key] = deep_merge(old, value)
        else:
            merged[key] = _copy(value)
    return merged


def canonical_keys(layer: Mapping[str, Any]) -> dict[str, Any]:
    """The layer with `block_reuse_config.block_reuse_policy` spelt `policy`, so that layers override each other
    whichever spelling each uses. A layer that gives both keeps both: the model refuses it.
    """
    result: dict[str, Any] = {}
    for key, value in layer.items():
        if isinstance(value, Mapping):
            value = canonical_keys(value)
            if key == "block_reuse_config" and "block_reuse_policy" in value and "policy" not in value:
                value["policy"] = value.pop("block_reuse_policy")
        result[key] = value
    return result


def _copy(value: Any) -> Any:
    return {key: _copy(item) for key, item in value.items()} if isinstance(value, Mapping) else value
