"""What changes when KV lies in CUDA memory: UCX's memory type, its transports, and who may copy.

Pure decisions, used by the UCX transport. They are tested on machines without a GPU; the copies themselves need one.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["HOST", "host_may_copy", "is_host", "memory_type", "tls_with_devices"]

HOST = "cpu"
_UCS_MEMORY_TYPES = {"cpu": 0, "cuda": 1}  # ucs_memory_type_t
_CUDA_TRANSPORTS = ("cuda_copy", "cuda_ipc")


def is_host(device: str) -> bool:
    """True for memory that the processor reads and writes."""
    return device == HOST


def memory_type(device: str) -> int:
    """UCX's number for a region's device ("cpu", "cuda:N"). Raises ValueError for another kind."""
    kind = device.partition(":")[0]
    if kind not in _UCS_MEMORY_TYPES:
        raise ValueError(f"UCX is not told how to register {device} memory: use cpu or cuda:N")
    return _UCS_MEMORY_TYPES[kind]


def tls_with_devices(tls: str, devices: Iterable[str]) -> str:
    """UCX_TLS for pools on these devices: with CUDA memory also cuda_copy and cuda_ipc, unless all are allowed.

    A list that begins with ``^`` forbids transports and is left alone.
    """
    if all(is_host(device) for device in devices) or tls == "all" or tls.startswith("^"):
        return tls
    names = [name for name in tls.split(",") if name]
    return ",".join([*names, *(name for name in _CUDA_TRANSPORTS if name not in names)])


def host_may_copy(source: str, destination: str) -> bool:
    """Whether a thread of this process may copy: from host to host only, not through a device pointer."""
    return is_host(source) and is_host(destination)
