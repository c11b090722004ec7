"""How much memory the KV pools of a worker may count on: the GPU's for a GPU, else the host's within its cgroup."""

from __future__ import annotations

import contextlib
from pathlib import Path

from cluster.engine.device_choice import resolve_device_type

__all__ = ["free_memory_bytes", "host_memory_bytes"]

_CGROUP_FILES = (  # limit and use, cgroup v2 then v1
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)


def free_memory_bytes(device: str) -> int:
    """Bytes free now where `device` (auto, cpu, cuda or cuda:N) keeps its pools. Raises ModelLoadError."""
    if resolve_device_type(device) == "cuda":
        import torch

        return int(torch.cuda.mem_get_info(device if ":" in device else None)[0])
    return host_memory_bytes()


def host_memory_bytes(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """MemAvailable (page cache that can be dropped counts), or what the cgroup's limit leaves if that is less."""
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
    available = int(fields["MemAvailable"].split()[0]) * 1024
    for limit_name, use_name in _CGROUP_FILES:
        with contextlib.suppress(OSError, ValueError):  # absent, or "max"
            available = min(available, int((cgroup / limit_name).read_text()) - int((cgroup / use_name).read_text()))
    return max(available, 0)
