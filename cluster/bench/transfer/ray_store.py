"""One actor that puts arrays into Ray's object store; the benchmark gets them and copies them out."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import ray

__all__ = ["open_ray_store"]


class _Source:
    def make(self, nbytes: int) -> Any:
        """An array of `nbytes` as the call's result, which Ray puts into its store."""
        return np.ones(nbytes, np.uint8)


@contextlib.contextmanager
def open_ray_store() -> Iterator[Callable[[int], float]]:
    """Start a local Ray with one actor; yields a function of bytes -> bytes per second."""
    ray.init(
        address="local", num_cpus=2, object_store_memory=512 << 20, include_dashboard=False, log_to_driver=False,
        logging_level=logging.ERROR,
    )  # fmt: skip
    try:
        source: Any = ray.remote(_Source)
        source = source.remote()
        target = np.zeros(1, np.uint8)

        def measure(nbytes: int) -> float:
            nonlocal target
            if len(target) != nbytes:
                target = np.zeros(nbytes, np.uint8)
            started = time.perf_counter()
            np.copyto(target, ray.get(source.make.remote(nbytes), timeout=60))
            return nbytes / (time.perf_counter() - started)

        measure(1 << 20)
        yield measure
    finally:
        ray.shutdown()
