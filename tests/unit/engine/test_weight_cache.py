"""The weight cache: built once however many start, rebuilt when it is not what it should be."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import zlib
from pathlib import Path
from zlib import crc32

import msgspec
import numpy as np
import pytest

from pdcore.engine import weight_cache
from pdcore.engine.gguf import GGUFFile
from pdcore.engine.safetensors import widen_bf16
from pdcore.engine.weight_cache import cached_weights, file_sha256
from pdcore.engine.weights import GGUFWeights, LlamaConfig, fused_layout, random_weights
from pdcore.errors import EngineError
from tests.unit.engine.files import TINY, Float32Array, parts_of, write_tiny_gguf

WEIGHTS = random_weights(TINY, 1)
IDENTITY = "ab" * 32


class Source:
    """Counts how often the cache asked for the tensors."""

    def __init__(self, config: LlamaConfig = TINY) -> None:
        self.config = config
        self.opened = 0
        self._parts = parts_of(TINY, WEIGHTS)

    def open(self) -> Source:
        self.opened += 1
        return self

    def part(self, name: str) -> Float32Array:
        return self._parts[name]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_built_is_the_weights(tmp_path: Path, dtype: str) -> None:
    source = Source()
    file = cached_weights(source.open, TINY, IDENTITY, dtype, tmp_path)
    for tensor in fused_layout(TINY):
        found = file.tensor(tensor.name)
        assert found.shape == tensor.shape
        if dtype == "float32" or tensor.is_norm:
            assert np.array_equal(found, WEIGHTS[tensor.name])
        else:
            assert file.tensors[tensor.name].dtype == "BF16"
            assert np.allclose(found, WEIGHTS[tensor.name], rtol=2**-8)
            bits = file.raw(tensor.name).view(np.uint16).reshape(found.shape)
            assert np.array_equal(widen_bf16(bits), found)
    cached_weights(source.open, TINY, IDENTITY, dtype, tmp_path)
    assert source.opened == 1
    assert [p.suffix for p in sorted(tmp_path.iterdir())] == [
        ".lock",
        ".safetensors",
        ".verified",
    ]


def test_key_is_identity_and_dtype(tmp_path: Path) -> None:
    source = Source()
    for identity in (IDENTITY, "cd" * 32):
        for dtype in ("float32", "bfloat16"):
            cached_weights(source.open, TINY, identity, dtype, tmp_path)
    assert source.opened == 4


@pytest.mark.parametrize("damage", ["truncated", "empty", "foreign", "longer", "half header"])
def test_a_damaged_file_is_rebuilt(tmp_path: Path, damage: str) -> None:
    source = Source()
    path = cached_weights(source.open, TINY, IDENTITY, "float32", tmp_path).path
    whole = path.read_bytes()
    path.write_bytes(
        {
            "truncated": whole[:-1000],
            "empty": b"",
            "foreign": whole.replace(IDENTITY.encode(), b"cd" * 32),
            "longer": whole + b"x",
            "half header": whole[:100],
        }[damage]
    )
    cached_weights(source.open, TINY, IDENTITY, "float32", tmp_path)
    assert source.opened == 2
    assert path.read_bytes() == whole


def overwrite(path: Path, start: int, data: bytes) -> None:
    """Same size and inode, another mtime (set, since a kernel tick may hide two writes)."""
    seen = path.stat()
    with path.open("rb+") as file:
        file.seek(start)
        file.write(data)
    os.utime(path, ns=(seen.st_atime_ns, seen.st_mtime_ns + 1_000_000))
    assert path.stat().st_size == seen.st_size


@pytest.mark.parametrize("where", [0.02, 0.5, 1.0])
def test_a_damaged_payload_is_rebuilt(tmp_path: Path, where: float) -> None:
    """4096 bytes overwritten: the same size and header, but empty answers if it were used."""
    source = Source()
    path = cached_weights(source.open, TINY, IDENTITY, "float32", tmp_path).path
    whole = path.read_bytes()
    overwrite(path, int((len(whole) - 4096) * where), b"\xff" * 4096)
    file = cached_weights(source.open, TINY, IDENTITY, "float32", tmp_path)
    assert source.opened == 2
    assert path.read_bytes() == whole
    assert np.array_equal(file.tensor("2.gate_up"), WEIGHTS["2.gate_up"])


def test_a_checksum_that_is_damaged_itself(tmp_path: Path) -> None:
    source = Source()
    path = cached_weights(source.open, TINY, IDENTITY, "float32", tmp_path).path
    whole = path.read_bytes()
    at = whole.index(b'"crc32":"') + len(b'"crc32":"')
    for digits in (b"0123abcd", b"no crc32"):
        overwrite(path, at, digits)
        cached_weights(source.open, TINY, IDENTITY, "float32", tmp_path)
        assert path.read_bytes() == whole
    assert source.opened == 3


def test_a_file_is_verified_once_per_boot_and_identity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A normal start reads no payload."""
    source = Source()
    path = cached_weights(source.open, TINY, IDENTITY, "float32", tmp_path).path
    checked = []

    def counted(data: memoryview, value: int = 0) -> int:
        checked.append(len(data))
        return crc32(data, value)

    monkeypatch.setattr(zlib, "crc32", counted)

    def start() -> int:
        checked.clear()
        cached_weights(source.open, TINY, IDENTITY, "float32", tmp_path)
        return sum(checked)

    assert start() == 0
    overwrite(path, 0, b"")
    payload = start()
    assert 0 < path.stat().st_size - payload < 8192
    assert start() == 0
    monkeypatch.setattr(weight_cache, "_boot_id", lambda: "another boot")
    assert (start(), start()) == (payload, 0)
    path.with_suffix(".verified").write_bytes(b"{")
    assert (start(), start()) == (payload, 0)
    assert source.opened == 1


def test_a_crash_while_building_leaves_nothing_in_the_way(tmp_path: Path) -> None:
    """What a killed builder leaves (its temporary file, its lock file) is no obstacle."""
    source = Source()
    path = cached_weights(source.open, TINY, IDENTITY, "float32", tmp_path).path
    path.with_suffix(".tmp").write_bytes(path.read_bytes()[:100])
    path.unlink()
    cached_weights(source.open, TINY, IDENTITY, "float32", tmp_path)
    assert not path.with_suffix(".tmp").exists()


def test_a_source_that_fails_leaves_no_file(tmp_path: Path) -> None:
    def broken() -> Source:
        raise EngineError("broken source")

    with pytest.raises(EngineError, match="broken source"):
        cached_weights(broken, TINY, IDENTITY, "float32", tmp_path)
    source = Source()
    cached_weights(source.open, TINY, IDENTITY, "float32", tmp_path)
    assert source.opened == 1


def test_config_and_tensors_that_differ(tmp_path: Path) -> None:
    source = Source()
    del source._parts["3.v"]
    source._parts["3.v"] = np.ones((1, 128), np.float32)
    with pytest.raises(EngineError, match="do not fit"):
        cached_weights(source.open, TINY, IDENTITY, "float32", tmp_path)
    assert not list(tmp_path.glob("*.tmp"))
    assert not list(tmp_path.glob("*.safetensors"))


CHILD = """
import json, sys
from pathlib import Path
from pdcore.engine.gguf import GGUFFile
from pdcore.engine.weight_cache import cached_weights
from pdcore.engine.weights import GGUFWeights
model, folder = Path(sys.argv[1]), Path(sys.argv[2])
def source():
    with open(folder / "builds", "a") as log:
        log.write("built\\n")
    return GGUFWeights(GGUFFile(model))
config = GGUFWeights(GGUFFile(model)).config
sys.stdin.readline()
file = cached_weights(source, config, "ab" * 32, "float32", folder / "cache")
print(json.dumps(float(file.tensor("3.down").sum())))
"""


def test_processes_that_start_at_once_build_once(tmp_path: Path) -> None:
    model = write_tiny_gguf(tmp_path / "m.gguf", TINY, WEIGHTS)
    children = [
        subprocess.Popen(
            [sys.executable, "-c", CHILD, str(model), str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    # All wait for the line, so that they reach the lock together.
    for child in children:
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
    sums = {json.loads(child.communicate(timeout=60)[0]) for child in children}
    assert len(sums) == 1
    assert (tmp_path / "builds").read_text() == "built\n"


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("not a folder")
    with pytest.raises(EngineError, match=r"cannot write the weight cache .*file.* MB\)"):
        cached_weights(Source().open, TINY, IDENTITY, "float32", blocker / "cache")


def test_a_full_disk_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Space is reserved before anything is mapped: a full disk must not be a SIGBUS."""

    def no_space(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", no_space)
    with pytest.raises(EngineError, match=r"\(3 MB\): no space left\. Free space there or set"):
        cached_weights(Source().open, TINY, IDENTITY, "float32", tmp_path)
    assert not list(tmp_path.glob("*.tmp"))
    assert not list(tmp_path.glob("*.safetensors"))


def test_sha256_is_remembered_until_the_file_changes(tmp_path: Path) -> None:
    model, cache = tmp_path / "m.bin", tmp_path / "cache"
    model.write_bytes(b"abc")
    expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert file_sha256(model, None) == expected
    assert file_sha256(model, cache) == expected
    (stamp,) = (cache / "stamps").iterdir()
    # The stamp is believed: a marked one comes back.
    stamp.write_bytes(stamp.read_bytes().replace(expected.encode(), b"remembered"))
    assert file_sha256(model, cache) == "remembered"
    model.write_bytes(b"abcd")
    assert file_sha256(model, cache) != "remembered"
    stamp.write_bytes(b"{")
    assert file_sha256(model, cache) == file_sha256(model, None)
    assert msgspec.json.decode(stamp.read_bytes())["size"] == 4


def test_a_stamp_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    model, blocker = tmp_path / "m.bin", tmp_path / "file"
    model.write_bytes(b"abc")
    blocker.write_text("not a folder")
    assert file_sha256(model, blocker) == file_sha256(model, None)
    with pytest.raises(EngineError, match="cannot read the model file"):
        file_sha256(tmp_path / "absent", tmp_path)


def test_a_gguf_source(tmp_path: Path) -> None:
    source = GGUFWeights(GGUFFile(write_tiny_gguf(tmp_path / "m.gguf", TINY, WEIGHTS)))
    file = cached_weights(lambda: source, source.config, IDENTITY, "float32", tmp_path)
    assert np.array_equal(file.tensor("2.gate_up"), WEIGHTS["2.gate_up"])
