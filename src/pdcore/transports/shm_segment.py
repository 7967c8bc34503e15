"""Shared segments that cannot be resized, outlive no owner and are not inherited.

Rules, each with the trap it avoids (all reproduced on Python 3.11):

- anonymous memfd: no name to collide with or to leave behind; freed by the kernel after
  any kind of death (multiprocessing.shared_memory registers attachers with a tracker
  that unlinks the owner's live segment);
- posix_fallocate before mapping: too little memory is an error now, not a SIGBUS at the
  first touch; seals against resizing for the same reason;
- MADV_DONTFORK: a forked child would keep writing after its parent's pidfd said dead;
- never ``mmap.close()``: a view that still exists would be a SIGSEGV. Dropping the last
  reference unmaps;
- the owner touches every page at once, or the first transfer looks 20 times slower; a
  peer maps what it is about to write (shm_pages).

Where memfd is missing, a file in /dev/shm takes its place. It loses its name before
anybody hears of it (peers get the descriptor), so only a crash between two system calls
leaves one behind; ``sweep_stale`` removes those.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import secrets
import stat
import struct
from pathlib import Path
from typing import Final

import attrs
import numpy as np

from pdcore.errors import TransportError
from pdcore.transports.process_proof import boot_id, this_process
from pdcore.types import Incarnation

NAMED_DIRECTORY: Final = "/dev/shm"
#: What helps whoever wants more memory than there is.
FEWER_BLOCKS: Final = "configure fewer KV blocks"
HEADER_BYTES: Final = mmap.PAGESIZE

#: From linux/mman.h (5.14); not in Python's mmap module.
_MADV_POPULATE_READ: Final = 22
_MADV_POPULATE_WRITE: Final = 23
_PREFAULT_STEP: Final = 16 << 20
#: magic, version, incarnation, owner's pid and start time.
_HEADER: Final = struct.Struct("<8sI16sIQ")
_HEADER_MAGIC: Final = b"PDCOREKV"


@attrs.frozen(eq=False)
class Segment:
    """One mapping. ``fd`` is what peers get (-1 on the attached side); the segment lives
    as long as ``buffer`` or a view of it does."""

    size_bytes: int
    #: Where the data starts in the file.
    offset: int
    sealed: bool
    fd: int
    mapping: mmap.mmap = attrs.field(repr=False)
    buffer: memoryview = attrs.field(repr=False)


def create_segment(
    size_bytes: int, incarnation: Incarnation, named_directory: str | None = None
) -> Segment:
    """Zeroed, reserved, sealed, touched. ``named_directory`` forces the named fallback.

    Raises TransportError when there is not that much memory, or no way to share it.
    """
    _check_size(size_bytes)
    if named_directory is None and not memfd_works():
        named_directory = NAMED_DIRECTORY
    if named_directory is None:
        offset, fd = 0, os.memfd_create("pdcore-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    else:
        offset, fd = HEADER_BYTES, _create_named(named_directory, incarnation)
    with contextlib.ExitStack() as unless_finished:
        unless_finished.callback(os.close, fd)
        _reserve(fd, offset + size_bytes, named_directory)
        mapping = _map(fd, offset, size_bytes)
        for start in range(0, size_bytes, _PREFAULT_STEP):
            populate(mapping, start, min(_PREFAULT_STEP, size_bytes - start), write=True)
        if named_directory is None:
            _seal(fd)
        unless_finished.pop_all()
    sealed = named_directory is None
    return Segment(size_bytes, offset, sealed, fd, mapping, memoryview(mapping))


def attach_segment(fd: int, size_bytes: int, offset: int, *, sealed: bool) -> Segment:
    """Map a peer's segment after checking that it is what was announced. Takes ``fd``
    over and closes it; no page is touched yet. Raises TransportError for another size,
    owner or missing seals."""
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_size != offset + size_bytes:
            raise TransportError(
                f"the peer's segment has {found.st_size} bytes, {offset + size_bytes} announced"
            )
        if found.st_uid != os.geteuid():
            raise TransportError(f"the peer's segment belongs to uid {found.st_uid}")
        if offset not in (0, HEADER_BYTES):
            raise TransportError(f"the peer's segment starts at {offset}")
        if sealed and not _is_sealed(fd):
            raise TransportError("the peer's segment can be resized: its seals are missing")
        mapping = _map(fd, offset, size_bytes)
    except OSError as error:
        raise TransportError(f"mapping the peer's segment: {error.strerror}") from error
    finally:
        os.close(fd)
    return Segment(size_bytes, offset, sealed, -1, mapping, memoryview(mapping))


def memfd_works() -> bool:
    try:
        os.close(os.memfd_create("pdcore-probe", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    except (AttributeError, OSError):
        return False
    return True


def available_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """What can be allocated without driving the machine, or our cgroup, out of memory."""
    try:
        lines = (proc / "meminfo").read_text("ascii").splitlines()
    except OSError:  # another system than Linux
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = 1 << 62
    for line in lines:
        if line.startswith("MemAvailable:"):
            limit = int(line.split()[1]) * 1024
    for directory in _cgroups(proc, cgroups):
        try:
            text = (directory / "memory.max").read_text("ascii").strip()
            if text == "max":
                continue
            ceiling = int(text)
            used = int((directory / "memory.current").read_text("ascii"))
            stat_lines = (directory / "memory.stat").read_text("ascii").splitlines()
        except (OSError, ValueError):
            continue
        counted = dict(line.split(maxsplit=1) for line in stat_lines)
        # Cached files (a model's weights, above all) make room when memory is needed.
        cached = int(counted.get("active_file", 0)) + int(counted.get("inactive_file", 0))
        limit = min(limit, max(0, ceiling - used + cached))
    return limit


def _cgroups(proc: Path, root: Path) -> list[Path]:
    """Our cgroup (version 2) and those above it, each of which may have a limit."""
    try:
        lines = (proc / "self/cgroup").read_text("ascii").splitlines()
    except OSError:
        return [root]
    paths = [line[3:].lstrip("/") for line in lines if line.startswith("0::")]
    own = root / paths[0] if paths else root
    return [own, *(parent for parent in own.parents if parent.is_relative_to(root))]


def sweep_stale(directory: str = NAMED_DIRECTORY) -> list[str]:
    """Remove named segments of ours whose owner is gone; the names removed.

    The owner holds a lock for life and the kernel drops it on any death, so whoever
    gets the lock may unlink. A file without our header is not ours, or not finished.
    """
    import fcntl

    prefix = f"pdcore-{os.geteuid()}-"
    removed: list[str] = []
    try:
        names = [name for name in os.listdir(directory) if name.startswith(prefix)]
    except OSError:
        return removed
    for name in names:
        path = os.path.join(directory, name)
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            mine = os.fstat(fd).st_uid == os.geteuid()
            if mine and os.pread(fd, len(_HEADER_MAGIC), 0) == _HEADER_MAGIC:
                os.unlink(path)
                removed.append(name)
        except OSError:
            continue
        finally:
            os.close(fd)
    return removed


def _create_named(directory: str, incarnation: Incarnation) -> int:
    """A locked file without a name. Raises TransportError."""
    import fcntl

    owner = this_process()
    name = f"pdcore-{os.geteuid()}-{boot_id().hex()[:8]}-{owner.pid}-{secrets.token_hex(8)}"
    path = os.path.join(directory, name)
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(path, flags, 0o600)
    except OSError as error:
        raise TransportError(f"cannot create a segment in {directory}: {error.strerror}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        os.pwrite(fd, _HEADER.pack(_HEADER_MAGIC, 1, incarnation, *owner), 0)
    except OSError as error:
        os.close(fd)
        raise TransportError(f"cannot write to {directory}: {error.strerror}") from error
    finally:
        os.unlink(path)
    return fd


def _check_size(size_bytes: int) -> None:
    if size_bytes <= 0:
        raise TransportError(f"size_bytes must be positive, got {size_bytes}")
    free = available_bytes()
    if size_bytes > free:
        raise TransportError(
            f"not enough memory for a segment of {size_bytes} bytes: {free} are available; "
            f"{FEWER_BLOCKS}"
        )


def _reserve(fd: int, total_bytes: int, named_directory: str | None) -> None:
    while True:
        try:
            os.posix_fallocate(fd, 0, total_bytes)
            return
        except InterruptedError:
            continue
        except OSError as error:
            where = named_directory or "memory"
            hint = (
                f"; {where} is too small (containers often give /dev/shm 64 MiB)"
                if named_directory and error.errno == errno.ENOSPC
                else f"; {FEWER_BLOCKS}"
            )
            raise TransportError(
                f"cannot reserve {total_bytes} bytes in {where}: {error.strerror}{hint}"
            ) from error


def _seal(fd: int) -> None:
    import fcntl

    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)


def _is_sealed(fd: int) -> bool:
    import fcntl

    wanted = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & wanted == wanted
    except OSError:
        return False


def _map(fd: int, offset: int, size_bytes: int) -> mmap.mmap:
    try:
        mapping = mmap.mmap(fd, size_bytes, flags=mmap.MAP_SHARED, offset=offset)
    except OSError as error:
        raise TransportError(
            f"cannot map {size_bytes} bytes: {error.strerror}; {FEWER_BLOCKS}"
        ) from error
    except ValueError as error:  # a peer's file that has become shorter since it was looked at
        raise TransportError(f"cannot map {size_bytes} bytes: {error}") from error
    # Before the first page is there, so that no fork can ever share one.
    mapping.madvise(mmap.MADV_DONTFORK)
    return mapping


def populate(mapping: mmap.mmap, start: int, length: int, *, write: bool) -> None:
    """Map the pages of [start, start + length); ``start`` is a page's. ``write``: pages
    that nobody ever touched, which the kernel clears now."""
    try:
        mapping.madvise(_MADV_POPULATE_WRITE if write else _MADV_POPULATE_READ, start, length)
    except OSError:
        # An older kernel: reading one byte of each page maps it just as well.
        np.frombuffer(mapping, np.uint8, length, start)[:: mmap.PAGESIZE].max()
