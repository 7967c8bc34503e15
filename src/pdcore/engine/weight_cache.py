"""One dequantised copy of the weights per host, mapped by every worker.

The first process that needs a model writes its fused weights into a file under the
cache folder, under a lock, and renames it into place; all others map the finished file
read-only, so that prefill and decode on one host share the pages. The file is keyed by
the model's sha256, the dtype and the format version.

The header holds a crc32 of everything after it, since damaged weights give no error but
wrong or empty answers. Computing it takes about 0.25 s of CPU per 540 MB, so a stamp
beside the file remembers, for this boot, which file was found whole.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import mmap
import os
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from pdcore.engine.safetensors import SafetensorsFile, layout, narrow_bf16
from pdcore.engine.weights import LlamaConfig, WeightSource, fused, fused_layout
from pdcore.errors import EngineError

#: Raise with any change of names, fusion or layout: older files are then not found.
FORMAT_VERSION: Final = 2

#: pdcore dtype -> safetensors dtype. Norm vectors stay float32 in every file.
STORED_DTYPE: Final = {"float32": "F32", "bfloat16": "BF16"}

#: Read size of the verification; larger is not faster.
_CHUNK_BYTES: Final = 1 << 18

_CRC_PATTERN: Final = re.compile(rb'"crc32":"([0-9a-f]{8})"')


class _Stamp(msgspec.Struct, frozen=True):
    size: int
    mtime_ns: int
    inode: int
    sha256: str


class _Verified(msgspec.Struct, frozen=True):
    """What the stamp beside a cache file says was found whole."""

    size: int
    mtime_ns: int
    inode: int
    boot_id: str
    crc32: str


def file_sha256(path: Path, cache_dir: Path | None) -> str:
    """Hex sha256 of a file, remembered in ``cache_dir`` by (path, size, mtime, inode).

    Hashing costs about 0.1 s per 100 MB; the stamp makes it once per file instead of
    once per process start. A stamp that cannot be written is no error.
    """
    try:
        stat = path.stat()
        seen = (stat.st_size, stat.st_mtime_ns, stat.st_ino)
        key = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:32]
        stamp_path = cache_dir / "stamps" / f"{key}.json" if cache_dir else None
        if stamp_path is not None and (remembered := _read_stamp(stamp_path, seen)):
            return remembered
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as exc:
        raise EngineError(f"{path}: cannot read the model file: {exc}") from exc
    if stamp_path is not None:
        _write_stamp(stamp_path, _Stamp(*seen, digest))
    return digest


def _read_stamp(path: Path, seen: tuple[int, int, int]) -> str | None:
    try:
        stamp = msgspec.json.decode(path.read_bytes(), type=_Stamp)
    except (OSError, msgspec.DecodeError):
        return None
    return stamp.sha256 if (stamp.size, stamp.mtime_ns, stamp.inode) == seen else None


def _write_stamp(stamp_path: Path, fresh: _Stamp | _Verified) -> None:
    temporary = stamp_path.with_suffix(f".{os.getpid()}.tmp")
    try:
        stamp_path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(msgspec.json.encode(fresh))
        temporary.replace(stamp_path)
    except OSError:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def cached_weights(
    open_source: Callable[[], WeightSource],
    config: LlamaConfig,
    identity: str,
    dtype: str,
    cache_dir: Path,
) -> SafetensorsFile:
    """The finished cache file of a model, built first if need be.

    ``identity`` is the sha256 of the model files. ``open_source`` is called only when the
    file must be built. Several processes may call this at once: one builds, the others
    wait. A truncated, foreign or damaged file is rebuilt; the payload is checked once per
    boot and whenever the file's size, mtime or inode changed. Raises EngineError when the
    folder is not writable or the disk is full.
    """
    path = cache_dir / f"{identity[:32]}.{dtype}.v{FORMAT_VERSION}.safetensors"
    ready = _open_if_valid(path, config, identity, dtype)
    if ready is not None:
        return ready
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_suffix(".lock")):
            ready = _open_if_valid(path, config, identity, dtype)
            if ready is None:
                _build(path, open_source(), identity, dtype)
                ready = _open_if_valid(path, config, identity, dtype)
    except OSError as exc:
        need = _plan(config, identity, dtype, 0)[2]
        reason = "no space left" if exc.errno in (errno.ENOSPC, errno.EDQUOT) else str(exc)
        raise EngineError(
            f"cannot write the weight cache {path} ({need / 1e6:.0f} MB): {reason}. "
            "Free space there or set another cache folder."
        ) from exc
    if ready is None:
        raise EngineError(f"{path}: the weight cache is unusable right after it was built")
    return ready


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Exclusive across processes; the kernel drops it when the holder dies."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _plan(
    config: LlamaConfig, identity: str, dtype: str, crc: int
) -> tuple[bytes, dict[str, int], int]:
    """(header, tensor offsets, file size); only the header's digits depend on ``crc``."""
    tensors = {
        t.name: ("F32" if t.is_norm else STORED_DTYPE[dtype], t.shape) for t in fused_layout(config)
    }
    metadata = {
        "identity": identity,
        "dtype": dtype,
        "format": str(FORMAT_VERSION),
        "crc32": f"{crc:08x}",
    }
    header, placed, size = layout(tensors, metadata)
    return header, {name: tensor.offset for name, tensor in placed.items()}, size


def _open_if_valid(
    path: Path, config: LlamaConfig, identity: str, dtype: str
) -> SafetensorsFile | None:
    """None when absent or not exactly what we would write (header, length, payload)."""
    blank, _, size = _plan(config, identity, dtype, 0)
    try:
        with path.open("rb", buffering=0) as file:
            header = file.read(len(blank))
            digits = _CRC_PATTERN.search(header)
            if os.fstat(file.fileno()).st_size != size or digits is None:
                return None
            crc = int(digits[1], 16)
            if header != _plan(config, identity, dtype, crc)[0]:
                return None
            if not _is_whole(file, path.with_suffix(".verified"), crc):
                return None
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as exc:
        raise EngineError(f"{path}: cannot read the weight cache: {exc}") from exc
    return SafetensorsFile(path)


def _is_whole(file: FileIO, stamp_path: Path, crc: int) -> bool:
    """Whether the rest of the file has this crc32; a success is remembered in the stamp.

    Read rather than mapped: a bad disk is then an OSError, not a SIGBUS.
    """
    stat = os.fstat(file.fileno())
    found = _Verified(stat.st_size, stat.st_mtime_ns, stat.st_ino, _boot_id(), f"{crc:08x}")
    with suppress(OSError, msgspec.DecodeError):
        if msgspec.json.decode(stamp_path.read_bytes(), type=_Verified) == found:
            return True
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    actual = 0
    while count := file.readinto(buffer):
        actual = zlib.crc32(buffer[:count], actual)
    if actual != crc:
        return False
    _write_stamp(stamp_path, found)
    return True


def _boot_id() -> str:
    """A crash or a disk that lost writes shows after a boot, without a new mtime."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _build(path: Path, source: WeightSource, identity: str, dtype: str) -> None:
    blank, offsets, size = _plan(source.config, identity, dtype, 0)
    # One fixed name is enough under the lock, and a crash leaves at most one of them.
    temporary = path.with_suffix(".tmp")
    try:
        with temporary.open("wb+") as file:
            # Reserve first: a full disk must be an error here, not a SIGBUS below.
            os.posix_fallocate(file.fileno(), 0, size)
            with mmap.mmap(file.fileno(), size) as target:
                for tensor in fused_layout(source.config):
                    values = fused(source, tensor).reshape(-1)
                    stored = values if tensor.is_norm or dtype == "float32" else narrow_bf16(values)
                    start = offsets[tensor.name]
                    view = np.frombuffer(target, stored.dtype, stored.size, start)
                    view[:] = stored
                    # The mapping cannot be closed while an array exports it.
                    del view
                with memoryview(target) as whole:
                    crc = zlib.crc32(whole[len(blank) :])
                header = _plan(source.config, identity, dtype, crc)[0]
                target[: len(header)] = header
                target.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
