"""safetensors files: own parser against bytes written by hand."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from pdcore.engine.safetensors import (
    ALIGNMENT,
    SafetensorsFile,
    SafetensorsFolder,
    layout,
    narrow_bf16,
    num_values,
    widen_bf16,
)
from pdcore.errors import EngineError
from tests.unit.engine.files import write_safetensors


def by_hand(path: Path, header: object, data: bytes) -> Path:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def test_three_dtypes_and_metadata(tmp_path: Path) -> None:
    half = np.array([0.5, -2.0], np.float16)
    header = {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [2, 1], "data_offsets": [0, 8]},
        "b": {"dtype": "F16", "shape": [2], "data_offsets": [8, 12]},
        "c": {"dtype": "BF16", "shape": [1], "data_offsets": [12, 14]},
        "d": {"dtype": "I64", "shape": [1], "data_offsets": [14, 22]},
    }
    data = struct.pack("<2f", 1.5, -3.0) + half.tobytes() + b"\x80\x3f" + bytes(8)
    file = SafetensorsFile(by_hand(tmp_path / "x.safetensors", header, data))
    assert file.metadata == {"format": "pt"}
    assert file.tensor("a").tolist() == [[1.5], [-3.0]]
    assert file.tensor("b").tolist() == [0.5, -2.0]
    assert file.tensor("c").tolist() == [1.0]
    with pytest.raises(EngineError, match="tensor d has dtype I64; supported are F32"):
        file.tensor("d")
    with pytest.raises(EngineError, match="tensor e is missing"):
        file.tensor("e")


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 12]}, "truncated"),
        ({"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}, "do not fit shape"),
        ({"dtype": "F32", "shape": [-1], "data_offsets": [0, 8]}, "has shape"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}, "truncated"),
        ({"dtype": "F32", "shape": "2", "data_offsets": [0, 8]}, "broken header"),
        ({"dtype": "F32"}, "broken header"),
        (5, "broken header"),
    ],
)
def test_a_broken_entry_is_refused(tmp_path: Path, entry: object, reason: str) -> None:
    path = by_hand(tmp_path / "x.safetensors", {"t": entry}, bytes(8))
    with pytest.raises(EngineError, match=rf"x\.safetensors.*{reason}"):
        SafetensorsFile(path)


def test_truncation_at_every_byte_is_an_error(tmp_path: Path) -> None:
    tensors = {"a": np.ones((3, 4), np.float32), "b": np.ones(5, np.float32)}
    whole = write_safetensors(tmp_path / "x.safetensors", tensors).read_bytes()
    path = tmp_path / "cut.safetensors"
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(EngineError, match=r"cut\.safetensors"):
            SafetensorsFile(path)


def test_a_folder_is_one_name_space(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"no \*\.safetensors"):
        SafetensorsFolder(tmp_path)
    write_safetensors(tmp_path / "1.safetensors", {"a": np.ones(2, np.float32)})
    write_safetensors(tmp_path / "2.safetensors", {"b": np.zeros(3, np.float32)})
    folder = SafetensorsFolder(tmp_path)
    assert "a" in folder
    assert "c" not in folder
    assert folder.shape("b") == (3,)
    assert folder.tensor("a").tolist() == [1.0, 1.0]
    with pytest.raises(EngineError, match="is this a Llama"):
        folder.tensor("c")
    write_safetensors(tmp_path / "3.safetensors", {"a": np.ones(2, np.float32)})
    with pytest.raises(EngineError, match=r"tensor a is also in 1\.safetensors"):
        SafetensorsFolder(tmp_path)


def test_layout_is_aligned_and_readable(tmp_path: Path) -> None:
    header, placed, size = layout({"a": ("F32", (3,)), "b": ("BF16", (2, 2))}, {"k": "v"})
    assert all(tensor.offset % ALIGNMENT == 0 for tensor in placed.values())
    path = tmp_path / "x.safetensors"
    path.write_bytes(header.ljust(size, b"\0"))
    file = SafetensorsFile(path)
    assert file.metadata == {"k": "v"}
    assert file.tensors == placed
    assert num_values((2, 3, 4)) == 24


def test_bfloat16_rounds_as_torch_does() -> None:
    rng = np.random.default_rng(0)
    values = (rng.standard_normal(10_000) * 10.0 ** rng.integers(-20, 20, 10_000)).astype(
        np.float32
    )
    values[:4] = [0.0, -0.0, 1.00390625, 1.01171875]
    expected = torch.from_numpy(values).to(torch.bfloat16)
    assert np.array_equal(narrow_bf16(values), expected.view(torch.int16).numpy().view(np.uint16))
    assert np.array_equal(widen_bf16(narrow_bf16(values)), expected.float().numpy())
