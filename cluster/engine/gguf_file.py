"""Reads a GGUF file's header: metadata and where each tensor lies.

Far faster than the gguf package's reader, and it names what is wrong with a damaged file. Tensor bytes are mapped, not
read; decoding quantised ones is the converter's job.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.engine.errors import ModelLoadError

__all__ = ["GgufFile", "GgufTensor"]

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_MAX_ITEMS = 1 << 24  # of an array or of the header: more is a damaged length


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor: `shape` outermost dimension first, `type_id` a GGML type number, `offset` from the file's start."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int


class GgufFile:
    """The header of one file, read on construction; the file stays mapped while this object lives.

    Raises ModelLoadError when the file cannot be read, is no GGUF file or is cut short in its header.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GgufTensor] = {}
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ModelLoadError(f"cannot read the model file {path}: {error}") from error
        self._at = 0
        try:
            self._read()
        except (struct.error, UnicodeDecodeError, IndexError) as error:
            raise ModelLoadError(f"{path} is truncated or damaged in its header: fetch the file again") from error

    def data(self, tensor: GgufTensor, nbytes: int) -> memoryview:
        """The `nbytes` raw bytes of a tensor. Raises ModelLoadError when the file ends before them."""
        end = tensor.offset + nbytes
        if end > len(self._map):
            raise ModelLoadError(
                f"{self.path} is truncated: tensor {tensor.name} ends at byte {end}, the file at {len(self._map)}; "
                "fetch the file again"
            )
        return memoryview(self._map)[tensor.offset : end]

    def _read(self) -> None:
        if self._map[:4] != b"GGUF":
            raise ModelLoadError(f"{self.path} is not a GGUF file (it does not start with 'GGUF')")
        self._at = 4
        version = self._scalar(4)
        if version not in (2, 3):
            raise ModelLoadError(
                f"{self.path} is GGUF version {version}; versions 2 and 3 (little-endian) are supported"
            )
        num_tensors, num_keys = self._count(), self._count()
        for _ in range(num_keys):
            key = self._string()
            self.metadata[key] = self._value(self._scalar(4))
        infos: list[tuple[str, tuple[int, ...], int, int]] = []
        for _ in range(num_tensors):
            name = self._string()
            shape = tuple(self._scalar(10) for _ in range(self._scalar(4)))[::-1]
            infos.append((name, shape, self._scalar(4), self._scalar(10)))
        alignment = int(self.metadata.get("general.alignment", 32))
        start = -(-self._at // alignment) * alignment
        self.tensors = {name: GgufTensor(name, shape, kind, start + offset) for name, shape, kind, offset in infos}
        beyond = [tensor.name for tensor in self.tensors.values() if tensor.offset >= len(self._map)]
        if beyond:
            raise ModelLoadError(
                f"{self.path} is truncated: {len(beyond)} of {len(infos)} tensors, {beyond[0]} for one, begin beyond "
                f"its end at byte {len(self._map)}; fetch the file again"
            )

    def _scalar(self, kind: int) -> Any:
        code = _SCALARS[kind]
        (value,) = struct.unpack_from(code, self._map, self._at)
        self._at += struct.calcsize(code)
        return value

    def _count(self) -> int:
        count = int(self._scalar(10))
        if count > _MAX_ITEMS:
            raise ModelLoadError(f"{self.path} is damaged: its header announces {count} items")
        return count

    def _string(self) -> str:
        (length,) = struct.unpack_from("<Q", self._map, self._at)
        start = self._at + 8
        raw = self._map[start : start + length]
        if len(raw) != length:
            raise IndexError("string beyond the end")
        self._at = start + length
        return raw.decode()

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            item, count = self._scalar(4), self._count()
            if item in _SCALARS:
                values = list(struct.unpack_from(f"<{count}{_SCALARS[item][1]}", self._map, self._at))
                self._at += struct.calcsize(f"<{count}{_SCALARS[item][1]}")
                return values
            return [self._value(item) for _ in range(count)]
        if kind not in _SCALARS:
            raise ModelLoadError(f"{self.path} is damaged: metadata of unknown type {kind}")
        return self._scalar(kind)
