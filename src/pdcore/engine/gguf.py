"""Read GGUF v3 files: metadata, tensor directory, dequantisation to float32.

Own parser (mmap, struct, numpy) because the ``gguf`` package needs seconds for the
vocabulary strings and one more dependency; it is bit-identical on the tensor types
below. A file is untrusted input: every length is checked against the file's size.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Final

import attrs
import numpy as np
from numpy.typing import NDArray

from pdcore.errors import EngineError

MetaValue = bool | int | float | str | list["MetaValue"]
Float32Array = NDArray[np.float32]
ByteArray = NDArray[np.uint8]

#: Values decoded at a time, so that temporaries stay in cache (multiple of every block).
_CHUNK_VALUES: Final = 1 << 18

#: More than any real model has; a garbage count must not allocate gigabytes.
_MAX_COUNT: Final = 1 << 20

_SCALARS: Final[dict[int, struct.Struct]] = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_STRING: Final = 8
_ARRAY: Final = 9
_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")


@attrs.frozen
class TensorType:
    """How ``block_values`` values are packed into ``block_bytes`` bytes."""

    name: str
    block_values: int
    block_bytes: int


TENSOR_TYPES: Final[dict[int, TensorType]] = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    3: TensorType("Q4_1", 32, 20),
    8: TensorType("Q8_0", 32, 34),
    30: TensorType("BF16", 1, 2),
}


@attrs.frozen
class TensorInfo:
    """``shape`` as numpy has it (rows first; the file stores it reversed)."""

    name: str
    shape: tuple[int, ...]
    type: TensorType
    offset: int
    size_bytes: int


class _Cursor:
    """Bounds-checked reading position in the mapped file."""

    __slots__ = ("_data", "_path", "pos")

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data = data
        self._path = path
        self.pos = 0

    def fail(self, what: str) -> EngineError:
        return EngineError(f"{self._path}: not a usable GGUF file: {what} at byte {self.pos}")

    def scalar(self, form: struct.Struct) -> bool | int | float:
        try:
            value: bool | int | float = form.unpack_from(self._data, self.pos)[0]
        except struct.error:
            raise self.fail("the file ends too early") from None
        self.pos += form.size
        return value

    def count(self, what: str, limit: int = _MAX_COUNT) -> int:
        n = int(self.scalar(_U64))
        if n > limit:
            raise self.fail(f"{what} of {n} (limit {limit})")
        return n

    def string(self) -> str:
        n = self.count("string length", len(self._data))
        end = self.pos + n
        if end > len(self._data):
            raise self.fail("the file ends inside a string")
        raw = self._data[self.pos : end]
        self.pos = end
        # Vocabularies may hold invalid UTF-8; the tokenizer would refuse surrogates.
        return raw.decode("utf-8", "replace")

    def value(self, kind: int) -> MetaValue:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            item_kind = int(self.scalar(_U32))
            n = self.count("array length", len(self._data))
            if item_kind == _STRING:
                return [self.string() for _ in range(n)]
            if item_kind == _ARRAY:
                raise self.fail("an array of arrays")
            return self._numbers(item_kind, n)
        form = _SCALARS.get(kind)
        if form is None:
            raise self.fail(f"unknown value type {kind}")
        return self.scalar(form)

    def _numbers(self, kind: int, n: int) -> MetaValue:
        form = _SCALARS.get(kind)
        if form is None:
            raise self.fail(f"unknown array type {kind}")
        size = form.size * n
        if self.pos + size > len(self._data):
            raise self.fail("the file ends inside an array")
        raw = self._data[self.pos : self.pos + size]
        self.pos += size
        return [value for (value,) in form.iter_unpack(raw)]


class GGUFFile:
    """One GGUF file, mapped read-only.

    Raises EngineError (naming file, reason, byte) when it is missing, truncated or not
    GGUF v3. ``metadata`` holds plain Python values, ``tensors`` the directory by name.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as exc:
            raise EngineError(f"{path}: cannot read the model file: {exc}") from exc
        cursor = _Cursor(self._map, path)
        if self._map[:4] != b"GGUF":
            raise cursor.fail("no GGUF magic")
        cursor.pos = 4
        if (version := int(cursor.scalar(_U32))) != 3:
            raise cursor.fail(f"version {version}, only 3 is supported")
        num_tensors = cursor.count("tensor count")
        num_values = cursor.count("metadata count")
        self.metadata: dict[str, MetaValue] = {}
        for _ in range(num_values):
            key = cursor.string()
            self.metadata[key] = cursor.value(int(cursor.scalar(_U32)))
        self.tensors = self._read_directory(cursor, num_tensors)

    def _read_directory(self, cursor: _Cursor, num_tensors: int) -> dict[str, TensorInfo]:
        found = [self._read_entry(cursor) for _ in range(num_tensors)]
        alignment = self.integer("general.alignment", 32)
        if alignment < 1:
            raise cursor.fail(f"general.alignment is {alignment}")
        start = -(-cursor.pos // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        for info in found:
            placed = attrs.evolve(info, offset=start + info.offset)
            if placed.offset + placed.size_bytes > len(self._map):
                raise EngineError(
                    f"{self.path}: truncated: tensor {info.name} ends at byte "
                    f"{placed.offset + placed.size_bytes}, the file has {len(self._map)}"
                )
            tensors[info.name] = placed
        if len(tensors) != num_tensors:
            raise cursor.fail("a tensor name appears twice")
        return tensors

    def _read_entry(self, cursor: _Cursor) -> TensorInfo:
        name = cursor.string()
        num_dims = int(cursor.scalar(_U32))
        if not 1 <= num_dims <= 4:
            raise cursor.fail(f"tensor {name} has {num_dims} dimensions")
        dims = [cursor.count("dimension", 1 << 40) for _ in range(num_dims)]
        if 0 in dims:
            raise cursor.fail(f"tensor {name} has an empty dimension")
        kind = int(cursor.scalar(_U32))
        offset = cursor.count("tensor offset", 1 << 60)
        form = TENSOR_TYPES.get(kind)
        if form is None:
            known = ", ".join(t.name for t in TENSOR_TYPES.values())
            raise EngineError(
                f"{self.path}: tensor {name} has type {kind}; supported are {known}. "
                "Use a file quantised as Q4_1 or Q8_0, or an unquantised one."
            )
        if dims[0] % form.block_values:
            raise cursor.fail(f"tensor {name}: rows of {dims[0]} do not fit {form.name}")
        size = form.block_bytes
        for i, dim in enumerate(dims):
            size *= dim // form.block_values if i == 0 else dim
        return TensorInfo(name, tuple(reversed(dims)), form, offset, size)

    def integer(self, key: str, default: int | None = None) -> int:
        """Metadata value as int. Raises EngineError when absent without a default."""
        value = self.metadata.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise EngineError(f"{self.path}: metadata {key} is {value!r}, expected an integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Metadata value as float. Raises EngineError when absent without a default."""
        value = self.metadata.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise EngineError(f"{self.path}: metadata {key} is {value!r}, expected a number")
        return float(value)

    def text(self, key: str, default: str | None = None) -> str:
        """Metadata value as str. Raises EngineError when absent without a default."""
        value = self.metadata.get(key, default)
        if not isinstance(value, str):
            raise EngineError(f"{self.path}: metadata {key} is {value!r}, expected text")
        return value

    def texts(self, key: str) -> list[str]:
        """Metadata array of str. Raises EngineError when absent."""
        value = self.metadata.get(key)
        if not isinstance(value, list):
            raise EngineError(f"{self.path}: metadata {key} is missing, expected a list of texts")
        return [item for item in value if isinstance(item, str)]

    def integers(self, key: str) -> list[int]:
        """Metadata array of int. Raises EngineError when absent."""
        value = self.metadata.get(key)
        if not isinstance(value, list):
            raise EngineError(f"{self.path}: metadata {key} is missing, expected a list of ints")
        return [item for item in value if isinstance(item, int)]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor. Raises EngineError if absent."""
        return self._find(name).shape

    def tensor(self, name: str) -> Float32Array:
        """One tensor dequantised to float32, in its shape. Raises EngineError if absent."""
        info = self._find(name)
        raw = np.frombuffer(self._map, np.uint8, info.size_bytes, info.offset)
        return dequantise(raw, info.type).reshape(info.shape)

    def _find(self, name: str) -> TensorInfo:
        info = self.tensors.get(name)
        if info is None:
            raise EngineError(f"{self.path}: tensor {name} is missing; is this a Llama model?")
        return info


def _decode_q4_1(raw: ByteArray, out: Float32Array) -> None:
    """20 bytes per 32 values: f16 scale, f16 minimum, 16 bytes of low then high nibbles."""
    blocks = raw.reshape(-1, 20)
    scale = blocks[:, 0:2].copy().view(np.float16).astype(np.float32)
    minimum = blocks[:, 2:4].copy().view(np.float16).astype(np.float32)
    nibbles = blocks[:, 4:]
    values = out.reshape(-1, 32)
    for half, part in ((values[:, :16], nibbles & 15), (values[:, 16:], nibbles >> 4)):
        np.multiply(part, scale, out=half)
        half += minimum


def _decode_q8_0(raw: ByteArray, out: Float32Array) -> None:
    """34 bytes per 32 values: f16 scale, 32 int8."""
    blocks = raw.reshape(-1, 34)
    scale = blocks[:, 0:2].copy().view(np.float16).astype(np.float32)
    np.multiply(blocks[:, 2:].view(np.int8), scale, out=out.reshape(-1, 32))


def _decode_f16(raw: ByteArray, out: Float32Array) -> None:
    out[:] = raw.view(np.float16)


def _decode_f32(raw: ByteArray, out: Float32Array) -> None:
    out[:] = raw.view(np.float32)


def _decode_bf16(raw: ByteArray, out: Float32Array) -> None:
    out.view(np.uint32)[:] = raw.view(np.uint16).astype(np.uint32) << 16


_DECODERS: Final[dict[str, Callable[[ByteArray, Float32Array], None]]] = {
    "F32": _decode_f32,
    "F16": _decode_f16,
    "BF16": _decode_bf16,
    "Q4_1": _decode_q4_1,
    "Q8_0": _decode_q8_0,
}


def dequantise(raw: ByteArray, form: TensorType) -> Float32Array:
    """Packed bytes to float32, flat. ``raw`` holds whole blocks of ``form``."""
    out = np.empty(raw.size // form.block_bytes * form.block_values, np.float32)
    decode = _DECODERS[form.name]
    for start in range(0, out.size, _CHUNK_VALUES):
        part = out[start : start + _CHUNK_VALUES]
        first = start // form.block_values * form.block_bytes
        decode(raw[first : first + part.size // form.block_values * form.block_bytes], part)
    return out
