"""Reading GGUF headers: right values, and a named error for every damage."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter

from cluster.engine import ModelLoadError
from cluster.engine.gguf_file import GgufFile
from cluster.engine.gguf_weights import read_gguf_tensor


@pytest.fixture
def path(tmp_path: Path) -> Path:
    target = tmp_path / "small.gguf"
    writer = GGUFWriter(str(target), "llama")
    writer.add_string("text", "héllo")
    writer.add_bool("flag", True)
    writer.add_float32("ratio", 0.5)
    writer.add_array("words", ["a", "", "ü"])
    writer.add_array("numbers", [3, 1, 2])
    writer.add_tensor("one", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("half", np.arange(8, dtype=np.float16).reshape(4, 2))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def test_values_and_tensors(path: Path) -> None:
    file = GgufFile(path)
    expected: dict[str, Any] = {
        "general.architecture": "llama",
        "text": "héllo",
        "flag": True,
        "ratio": 0.5,
        "words": ["a", "", "ü"],
        "numbers": [3, 1, 2],
    }
    assert {key: file.metadata[key] for key in expected} == expected
    np.testing.assert_array_equal(read_gguf_tensor(file, "one"), np.arange(6).reshape(2, 3))
    half = read_gguf_tensor(file, "half")
    assert half.dtype == np.float32
    np.testing.assert_array_equal(half, np.arange(8).reshape(4, 2))
    with pytest.raises(ModelLoadError, match="no tensor two"):
        read_gguf_tensor(file, "two")


def _read_all(path: Path) -> None:
    file = GgufFile(path)
    for name in ("one", "half"):
        read_gguf_tensor(file, name)


def test_every_truncation_is_named(path: Path, tmp_path: Path) -> None:
    whole = path.read_bytes()
    end = GgufFile(path).tensors["half"].offset + 16  # what follows is padding
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(whole[:end])
    _read_all(cut)
    for length in (*range(0, end, 7), end - 1):
        cut.write_bytes(whole[:length])
        with pytest.raises(ModelLoadError, match=r"cut\.gguf"):
            _read_all(cut)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "cannot read"),
        (b"PK\x03\x04" + bytes(60), "not a GGUF file"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(60), "version 1"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0) + bytes(60), "announces"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<I", 99) + bytes(60), "unknown type 99"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"\xff" + bytes(60), "damaged"),
    ],
)
def test_other_content_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(content)
    with pytest.raises(ModelLoadError, match=words):
        GgufFile(bad)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"cannot read .*gone\.gguf"):
        GgufFile(tmp_path / "gone.gguf")
