"""GGUF files: what is read is what was written; a broken file is one clear error."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import numpy as np
import pytest

from pdcore.engine.gguf import TENSOR_TYPES, GGUFFile, TensorType, dequantise
from pdcore.errors import EngineError
from tests.unit.engine.files import pack, write_gguf

METADATA: dict[str, object] = {
    "general.architecture": "llama",
    "a.flag": True,
    "a.integer": -5,
    "a.number": 0.25,
    "a.texts": ["é", "", "漢字"],
    "a.numbers": [1, -2, 3],
}


def sample(path: Path) -> Path:
    rng = np.random.default_rng(0)
    values = rng.standard_normal((4, 64)).astype(np.float32)
    tensors = {f"t{kind}": (values, kind) for kind in TENSOR_TYPES}
    return write_gguf(path, METADATA, tensors)


def test_metadata_round_trips(tmp_path: Path) -> None:
    file = GGUFFile(sample(tmp_path / "m.gguf"))
    assert file.metadata == METADATA
    assert file.integer("a.integer") == -5
    assert file.number("a.number") == 0.25
    assert file.number("a.integer") == -5.0
    assert file.text("general.architecture") == "llama"
    assert file.texts("a.texts") == ["é", "", "漢字"]
    assert file.integers("a.numbers") == [1, -2, 3]
    assert file.integer("absent", 7) == 7


@pytest.mark.parametrize("read", ["integer", "number", "text", "texts", "integers"])
def test_a_missing_key_names_file_and_key(tmp_path: Path, read: str) -> None:
    file = GGUFFile(sample(tmp_path / "m.gguf"))
    calls = {
        "integer": file.integer,
        "number": file.number,
        "text": file.text,
        "texts": file.texts,
        "integers": file.integers,
    }
    with pytest.raises(EngineError, match=r"m\.gguf: metadata absent\.key"):
        calls[read]("absent.key")


def slow_decode(raw: bytes, form: TensorType) -> list[float]:
    """The formats once more, one value at a time, from their description."""
    out: list[float] = []
    for start in range(0, len(raw), form.block_bytes):
        block = raw[start : start + form.block_bytes]
        if form.name == "F32":
            out += struct.unpack("<f", block)
        elif form.name == "F16":
            out += struct.unpack("<e", block)
        elif form.name == "BF16":
            out += struct.unpack("<f", b"\0\0" + block)
        elif form.name == "Q8_0":
            (scale,) = struct.unpack("<e", block[:2])
            out += [scale * q for q in struct.unpack("<32b", block[2:])]
        else:
            scale, low = struct.unpack("<2e", block[:4])
            nibbles = [b & 15 for b in block[4:]] + [b >> 4 for b in block[4:]]
            out += [float(np.float32(scale * q)) + low for q in nibbles]
    return out


@pytest.mark.parametrize("kind", list(TENSOR_TYPES))
def test_each_type_decodes_as_described(kind: int) -> None:
    form = TENSOR_TYPES[kind]
    values = np.random.default_rng(kind).standard_normal(32 * 40).astype(np.float32)
    raw = pack(values, kind)
    found = dequantise(np.frombuffer(raw, np.uint8), form)
    assert found.dtype == np.float32
    assert np.array_equal(found, np.array(slow_decode(raw, form), np.float32))
    limit = {"F32": 0.0, "F16": 2e-3, "BF16": 5e-2, "Q8_0": 2e-2, "Q4_1": 0.25}[form.name]
    assert np.abs(found - values).max() <= limit


def test_chunks_of_a_large_tensor_meet() -> None:
    values = np.arange((1 << 18) * 2 + 64, dtype=np.float32) % 127
    raw = np.frombuffer(pack(values[:64], 8) * 8194, np.uint8)
    found = dequantise(raw, TENSOR_TYPES[8]).reshape(-1, 64)
    assert (found == found[0]).all()


def test_tensors_have_numpy_shape(tmp_path: Path) -> None:
    file = GGUFFile(sample(tmp_path / "m.gguf"))
    for name in file.tensors:
        assert file.tensor(name).shape == (4, 64)
    with pytest.raises(EngineError, match="tensor absent is missing"):
        file.tensor("absent")


def test_truncation_anywhere_is_an_error(tmp_path: Path) -> None:
    whole = sample(tmp_path / "m.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    for size in [*range(600), *range(600, len(whole), 17)]:
        path.write_bytes(whole[:size])
        with pytest.raises(EngineError, match=r"cut\.gguf"):
            GGUFFile(path)


def test_garbage_is_an_error_or_a_file(tmp_path: Path) -> None:
    """Whatever the bytes, nothing but EngineError comes out, and no huge allocation."""
    whole = sample(tmp_path / "m.gguf").read_bytes()
    rng = random.Random(3)
    path = tmp_path / "garbage.gguf"
    refused = 0
    for _ in range(400):
        broken = bytearray(whole)
        for _ in range(rng.randrange(1, 6)):
            broken[rng.randrange(500)] = rng.randrange(256)
        path.write_bytes(broken)
        try:
            file = GGUFFile(path)
            with np.errstate(all="ignore"):
                for name in file.tensors:
                    file.tensor(name)
        except EngineError:
            refused += 1
    assert refused > 100


def test_other_files_say_what_they_are(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    with pytest.raises(EngineError, match="cannot read the model file"):
        GGUFFile(path)
    path.write_bytes(b"")
    with pytest.raises(EngineError, match="cannot read the model file"):
        GGUFFile(path)
    path.write_bytes(b"PK\3\4 a zip file, not a model")
    with pytest.raises(EngineError, match="no GGUF magic"):
        GGUFFile(path)
    write_gguf(path, {}, {}, version=2)
    with pytest.raises(EngineError, match="version 2, only 3"):
        GGUFFile(path)


def test_an_unknown_tensor_type_names_the_remedy(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", {}, {"t": (np.ones((1, 32), np.float32), 0)})
    raw = path.read_bytes()
    old = struct.pack("<IQQIQ", 2, 32, 1, 0, 0)
    assert raw.count(old) == 1
    path.write_bytes(raw.replace(old, struct.pack("<IQQIQ", 2, 32, 1, 12, 0)))
    with pytest.raises(EngineError, match=r"tensor t has type 12; supported are .*Q4_1.*Use a"):
        GGUFFile(path)
