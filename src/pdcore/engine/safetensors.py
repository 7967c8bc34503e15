"""Read and lay out safetensors files: 8-byte header length, JSON header, raw tensors.

Own parser (JSON and mmap) so that a Hugging Face folder needs no further dependency;
pdcore's weight cache is written in the same format. A file is untrusted input.
"""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import attrs
import msgspec
import numpy as np
from numpy.typing import NDArray

from pdcore.errors import EngineError

Float32Array = NDArray[np.float32]

#: safetensors dtype -> bytes per value; only what a Llama checkpoint may hold.
DTYPE_BYTES: Final[dict[str, int]] = {"F32": 4, "F16": 2, "BF16": 2}

_LENGTH: Final = struct.Struct("<Q")

#: The reference implementation's own limit.
_MAX_HEADER_BYTES: Final = 100_000_000

#: Tensors start at multiples of this in files pdcore writes (a cache line).
ALIGNMENT: Final = 64


class _HeaderEntry(msgspec.Struct, frozen=True):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


@attrs.frozen
class StoredTensor:
    """``offset`` counts from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size_bytes: int


def num_values(shape: Sequence[int]) -> int:
    """Product of the dimensions."""
    n = 1
    for dim in shape:
        n *= dim
    return n


class SafetensorsFile:
    """One ``.safetensors`` file, mapped read-only; ``metadata`` holds the header's texts.

    Raises EngineError naming file and reason when it is missing, truncated or malformed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as exc:
            raise EngineError(f"{path}: cannot read the weights file: {exc}") from exc
        self.metadata: dict[str, str] = {}
        self.tensors: dict[str, StoredTensor] = {}
        self._read_header()

    def _read_header(self) -> None:
        size = len(self._map)
        length = _LENGTH.unpack_from(self._map)[0] if size >= _LENGTH.size else 0
        start = _LENGTH.size + length
        if not 2 <= length <= _MAX_HEADER_BYTES or start > size:
            raise self._fail(f"header length {length} in a file of {size} bytes")
        try:
            header = msgspec.json.decode(
                self._map[_LENGTH.size : start], type=dict[str, msgspec.Raw]
            )
            if "__metadata__" in header:
                raw = header.pop("__metadata__")
                self.metadata = msgspec.json.decode(raw, type=dict[str, str])
            entries = {
                name: msgspec.json.decode(raw, type=_HeaderEntry) for name, raw in header.items()
            }
        except (msgspec.DecodeError, RecursionError) as exc:
            raise self._fail(f"broken header: {exc}") from exc
        for name, entry in entries.items():
            self.tensors[name] = self._placed(name, entry, start, size)

    def _placed(self, name: str, entry: _HeaderEntry, start: int, size: int) -> StoredTensor:
        begin, end = entry.data_offsets
        if any(dim < 0 for dim in entry.shape):
            raise self._fail(f"tensor {name} has shape {entry.shape}")
        if not 0 <= begin <= end or start + end > size:
            raise self._fail(f"truncated: tensor {name} ends at byte {start + end} of {size}")
        item = DTYPE_BYTES.get(entry.dtype)
        if item is not None and end - begin != item * num_values(entry.shape):
            raise self._fail(f"tensor {name}: {end - begin} bytes do not fit shape {entry.shape}")
        return StoredTensor(name, entry.dtype, tuple(entry.shape), start + begin, end - begin)

    def _fail(self, what: str) -> EngineError:
        return EngineError(f"{self.path}: not a usable safetensors file: {what}")

    def raw(self, name: str) -> NDArray[np.uint8]:
        """The tensor's bytes, a view of the mapping. Raises EngineError if absent."""
        info = self.tensors.get(name)
        if info is None:
            raise EngineError(f"{self.path}: tensor {name} is missing")
        return np.frombuffer(self._map, np.uint8, info.size_bytes, info.offset)

    def tensor(self, name: str) -> Float32Array:
        """The tensor as float32, in its shape. Raises EngineError for another dtype."""
        raw = self.raw(name)
        info = self.tensors[name]
        if info.dtype not in DTYPE_BYTES:
            raise EngineError(
                f"{self.path}: tensor {name} has dtype {info.dtype}; supported are "
                f"{', '.join(DTYPE_BYTES)}. Convert the checkpoint to one of them."
            )
        if info.dtype == "BF16":
            return widen_bf16(raw.view(np.uint16)).reshape(info.shape)
        values = raw.view(np.float32 if info.dtype == "F32" else np.float16)
        return values.astype(np.float32).reshape(info.shape)


class SafetensorsFolder:
    """All ``*.safetensors`` of a folder as one name space (sharded checkpoints)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        paths = sorted(folder.glob("*.safetensors"))
        if not paths:
            raise EngineError(f"{folder}: no *.safetensors file in this folder")
        self.files = [SafetensorsFile(path) for path in paths]
        self._where: dict[str, SafetensorsFile] = {}
        for file in self.files:
            for name in file.tensors:
                if name in self._where:
                    other = self._where[name].path.name
                    raise EngineError(f"{file.path}: tensor {name} is also in {other}")
                self._where[name] = file

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor. Raises EngineError if absent."""
        return self._find(name).tensors[name].shape

    def tensor(self, name: str) -> Float32Array:
        """One tensor as float32. Raises EngineError if absent."""
        return self._find(name).tensor(name)

    def _find(self, name: str) -> SafetensorsFile:
        file = self._where.get(name)
        if file is None:
            raise EngineError(f"{self.folder}: tensor {name} is missing; is this a Llama model?")
        return file


def widen_bf16(values: NDArray[np.uint16]) -> Float32Array:
    """bfloat16 bit patterns to float32 (exact)."""
    return (values.astype(np.uint32) << 16).view(np.float32)


def narrow_bf16(values: Float32Array) -> NDArray[np.uint16]:
    """float32 to bfloat16 bit patterns, round to nearest even, as torch does."""
    bits = values.view(np.uint32)
    rounded = (bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16
    return rounded.astype(np.uint16)


def layout(
    tensors: Mapping[str, tuple[str, Sequence[int]]], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, StoredTensor], int]:
    """Plan a file: name -> (dtype, shape) to (its first bytes, placements, total size).

    Offsets are multiples of ALIGNMENT (legal: the format allows a padded header; between
    tensors the padding belongs to nobody and only this parser's files have it).
    """
    offset = 0
    spans: dict[str, tuple[int, int]] = {}
    for name, (dtype, shape) in tensors.items():
        size = DTYPE_BYTES[dtype] * num_values(shape)
        spans[name] = (offset, offset + size)
        offset += -(-size // ALIGNMENT) * ALIGNMENT
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    for name, (dtype, shape) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": spans[name]}
    text = json.dumps(header, separators=(",", ":")).encode()
    start = -(-(len(text) + _LENGTH.size) // ALIGNMENT) * ALIGNMENT
    text = text.ljust(start - _LENGTH.size)
    placed = {
        name: StoredTensor(name, dtype, tuple(shape), start + spans[name][0],
                           spans[name][1] - spans[name][0])
        for name, (dtype, shape) in tensors.items()
    }  # fmt: skip
    return _LENGTH.pack(len(text)) + text, placed, start + offset
