"""What `device` and `dtype` mean when they are "auto", without importing torch on a machine that has no GPU."""

from __future__ import annotations

from pathlib import Path

from cluster.engine.errors import ModelLoadError

__all__ = ["DTYPES", "resolve_device_type", "resolve_dtype"]

DTYPES = ("float32", "bfloat16", "float16")
_DRIVER = Path("/dev/nvidiactl")


def resolve_device_type(device: str) -> str:
    """ "cpu" or "cuda". `auto` is cuda where torch sees a GPU. Raises ModelLoadError for another name."""
    kind = device.partition(":")[0]
    if kind == "auto":
        if not _DRIVER.exists():
            return "cpu"
        import torch

        return "cuda" if torch.cuda.is_available() else "cpu"
    if kind not in ("cpu", "cuda"):
        raise ModelLoadError(f"device {device!r} is not supported: use auto, cpu, cuda or cuda:N")
    return kind


def resolve_dtype(dtype: str, device_type: str) -> str:
    """The element type of weights and KV: `auto` is bfloat16 on cuda, else float32. Raises ModelLoadError."""
    if dtype == "auto":
        return "bfloat16" if device_type == "cuda" else "float32"
    if dtype not in DTYPES:
        raise ModelLoadError(f"unknown dtype {dtype!r}: use auto, {', '.join(DTYPES)}")
    return dtype
