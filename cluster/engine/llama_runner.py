"""The ModelRunner of Llama-architecture models on torch, over TorchPageStorage.

It turns a step plan into tensors, runs the model and samples. `load` sets the number of torch threads of this process:
one by default, because with several workers on a machine every parallel region waits for its slowest thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from cluster.engine.attention import Kernels, SequencePages, TorchKernels
from cluster.engine.device_choice import resolve_device_type, resolve_dtype
from cluster.engine.errors import EngineError, ModelLoadError
from cluster.engine.llama_model import LlamaModel, StepRows
from cluster.engine.model_description import ModelDescription
from cluster.engine.model_runner import StepPlan
from cluster.engine.plan_check import check_plan
from cluster.engine.sampler import sample_plan
from kvcache.layout import KvLayout
from kvcache.storage.page_storage import PageStorage

if TYPE_CHECKING:
    from cluster.engine.model_source import ModelSource

__all__ = ["LlamaRunner"]


class LlamaRunner:
    """ModelRunner of one model on one device. Not thread-safe."""

    def __init__(self, description: ModelDescription, model: LlamaModel) -> None:
        self._description = description
        self._model = model
        self._pool: torch.Tensor | None = None

    @classmethod
    def load(
        cls,
        source: ModelSource,
        *,
        tokens_per_block: int,
        device: str = "auto",
        dtype: str = "auto",
        num_threads: int = 1,
    ) -> LlamaRunner:
        """Load the weights of `source`; see `load_runner`. Raises ModelLoadError."""
        torch.set_num_threads(num_threads)
        target = _resolve_device(device)
        name = resolve_dtype(dtype, target.type)
        element: torch.dtype = getattr(torch, name)
        tensors = {key: tensor.to(device=target, dtype=element) for key, tensor in source.load_weights().items()}
        description = source.config.describe(source.fingerprint(), tokens_per_block, name)
        kernels = _choose_kernels(target, name, source.config.head_dim)
        return cls(description, LlamaModel(source.config, tensors, kernels))

    @property
    def layout(self) -> KvLayout:
        """One full-attention group of all layers."""
        return self._description.layout

    @property
    def vocab_size(self) -> int:
        """Length of a row of logits."""
        return self._description.vocab_size

    @property
    def max_position(self) -> int:
        """Longest sequence in tokens."""
        return self._description.max_position

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""
        return self._description.eos_token_ids

    @property
    def device(self) -> str:
        """Where weights and KV are: "cpu" or "cuda:N"."""
        return str(self._model.device)

    def bind(self, storage: PageStorage) -> None:
        """Use `storage` for KV. Raises EngineError unless it is a TorchPageStorage of this layout on this device."""
        from kvcache.storage.torch_storage import TorchPageStorage

        if not isinstance(storage, TorchPageStorage):
            raise EngineError("this model needs a TorchPageStorage: use make_storage(runner, num_pages)")
        if storage.layout != self.layout:
            raise EngineError("the storage was made for another layout: use make_storage(runner, num_pages)")
        pool = storage.tensor(0)
        if pool.device != self._model.device:
            raise EngineError(f"the storage is on {pool.device}, the model on {self._model.device}")
        self._pool = pool

    def execute(self, plan: StepPlan) -> list[int | None]:
        """See ModelRunner."""
        return sample_plan(plan, self.forward(plan), self.eos_token_ids)

    def forward(self, plan: StepPlan) -> list[NDArray[np.float32] | None]:
        """Write the KV of the step, return a row of logits (float32, vocab) for each sequence that samples."""
        if self._pool is None:
            raise EngineError("bind a storage before the first step")
        check_plan(plan, self.layout, len(self._pool), self.vocab_size, self.max_position)
        if not plan.sequences:
            return []
        with torch.inference_mode():
            logits = self._model.forward(self._pool, self._rows(plan)).cpu().numpy()
            if self._model.device.type == "cuda":  # nothing to copy, nothing waited: peers may read this KV next
                torch.cuda.synchronize(self._model.device)
        wanted = iter(logits)
        return [None if sequence.sampling is None else next(wanted) for sequence in plan.sequences]

    def _rows(self, plan: StepPlan) -> StepRows:
        block = self.layout.tokens_per_block
        device = self._model.device
        positions, pages, sequences, sampled = [], [], [], []
        rows = 0
        for sequence in plan.sequences:
            end = sequence.start + len(sequence.token_ids)
            where = np.arange(sequence.start, end, dtype=np.int64)
            table = sequence.pages[0][: -(-end // block)].astype(np.int64)
            positions.append(where)
            pages.append(table[where // block])
            sequences.append(SequencePages(sequence.start, end, table))
            rows += len(where)
            if sequence.sampling is not None:
                sampled.append(rows - 1)
        tokens = np.concatenate([sequence.token_ids for sequence in plan.sequences]).astype(np.int64)
        at = np.concatenate(positions)
        return StepRows(
            token_ids=torch.from_numpy(tokens).to(device),
            positions=torch.from_numpy(at).to(device),
            pages=torch.from_numpy(np.concatenate(pages)).to(device),
            offsets=torch.from_numpy(at % block).to(device),
            attention=self._model.kernels.plan(sequences),
            sampled=torch.tensor(sampled, dtype=torch.int64, device=device),
        )


def _choose_kernels(device: torch.device, dtype: str, head_dim: int) -> Kernels:
    """The native ones where they serve the case and can be compiled, else torch's."""
    if device.type == "cpu" and dtype == "float32" and head_dim % 8 == 0:
        from cluster.engine.native_kernels import NativeKernels, load_native_library

        library = load_native_library()
        if library is not None:
            return NativeKernels(library)
    return TorchKernels(device)


def _resolve_device(device: str) -> torch.device:
    if resolve_device_type(device) == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ModelLoadError(f"device {device!r} is wanted but torch sees no GPU: use device cpu")
    if device in ("auto", "cuda"):
        return torch.device("cuda", torch.cuda.current_device())
    try:
        target = torch.device(device)
    except RuntimeError as error:
        raise ModelLoadError(f"unknown device {device!r}: use auto, cpu, cuda or cuda:N") from error
    if target.index >= torch.cuda.device_count():
        raise ModelLoadError(f"there is no {device}: this machine has {torch.cuda.device_count()} GPUs")
    return target
