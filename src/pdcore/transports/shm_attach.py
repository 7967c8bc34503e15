"""Cross-memory attach: writing ordinary private memory of a peer, which nobody shares with us.

The kernel copies from our blocks into the peer's (process_vm_writev), in one copy, for a
process of the same user where neither Yama nor seccomp forbids it. The call names a pid, and
that is the trap. A pid is free as soon as its process was reaped, whoever holds a pidfd; a
sender may be preempted, or stopped for hours, between its look at the pidfd and the call; and
an exec leaves pid, start time and pidfd as they are while all the memory behind them is
another program's. Then the bytes would land in whatever lies at that address there, and
no look before the call can prevent it. Ways that were tried or thought through:

- the peer's /proc/self/mem, handed over its socket, belongs to an address space and not to
  a pid (a write after death or exec puts 0 bytes). But it copies twice, page by page: 64 MiB
  in blocks of 16 KiB take 29 ms where process_vm_writev takes 16 and a row loop of numpy 14;
  and it writes through PROT_NONE and read-only pages, text included;
- to keep the pid from being reused: only its parent, a tracer, or somebody in a process group
  of that number can, and none of these is ours to be.

So the call itself carries the proof. The peer maps ``KEY_PAGES`` pages at addresses that it
draws at random and tells only over the authenticated socket. Every call names these pages
first, with what stands in them already. The kernel resolves one address space per call, takes
its pieces in their order and stops at the first that is not mapped writable: elsewhere, at the
first page. The addresses are drawn from the middle of the address space, where kernels put
nothing by themselves (programs and heaps lie above, libraries and mappings far above). Let f be
the part of it that another program mapped there by its own choice: 0 for nearly all, 1e-3 for
64 GiB. Then f is the chance that 8 bytes of the nonce land, f^8 = 1e-24 that KV does, given
that the pid came back between look and call at all. Children of the peer by fork have its
layout, but not these pages (MADV_DONTFORK); a new program after exec has none of them.

In the same way each region has one such page of its own, its latch, which goes when the region
is deregistered: whoever still wrote would write memory that has become something else. At
``close`` the key goes, and with it everybody's way in. A call that is already under way ends
within two megabytes; that nobody starts one is what leases are for.

A short count is an error: the kernel stops in front of a page that is not mapped writable and
says so with a number only. Linux on 64 bits; nothing here needs the peer to run.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import itertools
import mmap
import os
import secrets
import select
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pdcore.errors import PeerGone, TransportError
from pdcore.kv.plan import Int64Array
from pdcore.transports.check import expand_rows
from pdcore.transports.copy import CHUNK_BYTES, ByteArray, cut_pieces, few_rows
from pdcore.transports.process_proof import ProcessKey
from pdcore.transports.shm_wire import KEY_PAGES, NONCE_BYTES, AttachedRegion, SpaceKey

#: (n, 2): address and bytes, as struct iovec has them.
Iovecs = NDArray[np.uint64]

#: The kernel's limit on either side of a call (UIO_MAXIOV).
MAX_IOVECS: Final = 1024
#: Key pages and one latch come first.
MAX_ROWS: Final = MAX_IOVECS - KEY_PAGES - 1
#: Rows that are expanded at once: a few calls' worth, some hundred microseconds.
_ROWS_AT_ONCE: Final = 8 * MAX_ROWS
YAMA: Final = Path("/proc/sys/kernel/yama/ptrace_scope")

_MAP_FIXED_NOREPLACE: Final = 0x100000
#: 47 bits are what a process has on x86-64 (48 on most of arm64), 39 the least on arm64.
_ADDRESS_BITS: Final = (47, 39)
#: Of 128 parts of such a space, those between the shadow memory of sanitizers and the place of
#: programs.
_FIRST_PART: Final = 0x11
_END_PART: Final = 0x50
_DRAWS: Final = 16


@functools.cache
def _libc() -> ctypes.CDLL:
    """Raises AttributeError where the C library lacks what is used here."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.process_vm_writev.restype = ctypes.c_ssize_t
    vector = (ctypes.c_void_p, ctypes.c_ulong)
    libc.process_vm_writev.argtypes = [ctypes.c_int, *vector, *vector, ctypes.c_ulong]
    return libc


def why_unavailable() -> str | None:
    """One sentence why no process here writes memory of another that way, or None. What only
    a certain peer forbids shows when it is connected to."""
    try:
        written = ctypes.create_string_buffer(1)
        one = np.array([[ctypes.addressof(written), 1]], np.uint64)
        moved = _write(os.getpid(), one, one)
    except AttributeError as error:
        return f"the C library of this system lacks a function: {error}"
    if moved != 1:
        return f"process_vm_writev does not work here: {_reason(ctypes.get_errno())}"
    if _yama_scope() > 0 and not _may_trace_all():
        return f"process_vm_writev is forbidden here: {_reason(errno.EPERM)}"
    return None


def _yama_scope() -> int:
    try:
        return int(YAMA.read_text("ascii"))
    except (OSError, ValueError):
        return 0


def _may_trace_all() -> bool:
    """CAP_SYS_PTRACE, which Yama (but for scope 3) does not ask any further."""
    for line in Path("/proc/self/status").read_text("ascii", "replace").splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> 19 & 1) and _yama_scope() < 3
    return False


def _reason(code: int) -> str:
    if code == errno.EPERM and _yama_scope() > 0:
        return f"{os.strerror(code)} (kernel.yama.ptrace_scope is {_yama_scope()}, 0 would do)"
    if code == errno.EPERM:
        return f"{os.strerror(code)} (seccomp, or a process that may not be traced)"
    return os.strerror(code)


# --- the side that is written ------------------------------------------------------------


class Attachable:
    """Registered memory of this process that peers may write, and the key to it.

    Not thread-safe. Pages are unmapped by ``remove`` and ``close`` only, never by a garbage
    collector: in a forked child, where they are missing, another mapping may have their place.
    """

    def __init__(self) -> None:
        self.key: SpaceKey | None = None
        self._regions: dict[int, AttachedRegion] = {}

    def add(self, region_id: int, address: int, size_bytes: int) -> None:
        """Raises TransportError when no page can be mapped."""
        if self.key is None:
            nonce = secrets.token_bytes(NONCE_BYTES)
            self.key = SpaceKey(nonce, tuple(map_page(nonce) for _ in range(KEY_PAGES)))
        latch = map_page(self.key.nonce)
        self._regions[region_id] = AttachedRegion(region_id, size_bytes, address, latch)

    def remove(self, region_id: int) -> None:
        """No call that names this region succeeds from now on. Unknown ones are none of ours."""
        region = self._regions.pop(region_id, None)
        if region is not None:
            unmap_page(region.latch)

    def regions(self) -> tuple[AttachedRegion, ...]:
        return tuple(self._regions[region_id] for region_id in sorted(self._regions))

    def close(self) -> None:
        """Nobody writes anything from now on."""
        for page in self.key.pages if self.key is not None else ():
            unmap_page(page)
        self.key = None
        for region_id in list(self._regions):
            self.remove(region_id)


def map_page(content: bytes) -> int:
    """The random address of a private page that starts with ``content`` and that no child by
    fork has. Raises TransportError."""
    libc = _libc()
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED_NOREPLACE
    size = mmap.PAGESIZE
    for bits in _ADDRESS_BITS:
        part = (1 << bits) // 128 // size
        for _ in range(_DRAWS):
            wanted = (
                _FIRST_PART * part + secrets.randbelow((_END_PART - _FIRST_PART) * part)
            ) * size
            found: int | None = libc.mmap(wanted, size, protection, flags, -1, 0)
            if found == ctypes.c_void_p(-1).value or found is None:
                continue
            # A kernel before 4.17 takes the address for a hint.
            if found == wanted and libc.madvise(found, size, mmap.MADV_DONTFORK) == 0:
                ctypes.memmove(found, content, len(content))
                return found
            libc.munmap(found, size)
    raise TransportError(
        f"no page could be mapped for the key of this process: {os.strerror(ctypes.get_errno())}"
    )


def unmap_page(address: int) -> None:
    _libc().munmap(address, mmap.PAGESIZE)


# --- the side that writes ----------------------------------------------------------------


class PeerSpace:
    """The address space of one process, as its owner described it.

    ``pidfd`` is duplicated. Raises TransportError when no descriptor is left. Used by the
    owner's thread and the mover; what it holds goes with the last region of it.
    """

    def __init__(self, process: ProcessKey, pidfd: int, key: SpaceKey) -> None:
        self._pid = process.pid
        try:
            self._pidfd = os.dup(pidfd)
        except OSError as error:
            raise TransportError(f"cannot watch the peer's process: {error.strerror}") from error
        weakref.finalize(self, os.close, self._pidfd)
        self._nonce = np.frombuffer(key.nonce, np.uint8)
        #: What every call starts with; a row for the latch is the last one.
        self._heads = _iovecs([self._nonce.ctypes.data] * (KEY_PAGES + 1), NONCE_BYTES)
        self._key = _iovecs(key.pages, NONCE_BYTES)

    def probe(self, latch: int) -> None:
        """Write nothing, into a region that has this latch: may we, and is it that process?
        Raises as :meth:`write`."""
        self.write(latch, self._key[:0], self._key[:0])

    def write(self, latch: int, local: Iovecs, remote: Iovecs) -> None:
        """Copy ``local`` into ``remote``, up to ``MAX_ROWS`` of each, of the same bytes.

        Raises PeerGone when the process is dead or its memory no longer what was described,
        before byte 0; TransportError when not everything could be written, and then any part
        of it may have been.
        """
        poller = select.poll()
        poller.register(self._pidfd, select.POLLIN)
        if poller.poll(0):
            raise PeerGone("the peer's process is dead")
        theirs = np.concatenate((self._key, _iovecs([latch], NONCE_BYTES), remote))
        ours = np.concatenate((self._heads, local))
        wanted = int(ours[:, 1].sum())
        moved = _write(self._pid, ours, theirs)
        if moved != wanted:
            _refuse(moved, wanted)


def _write(pid: int, local: Iovecs, remote: Iovecs) -> int:
    moved: int = _libc().process_vm_writev(
        pid, local.ctypes.data, len(local), remote.ctypes.data, len(remote), 0
    )
    return moved


def _refuse(moved: int, wanted: int) -> None:
    """Say what a count that is too small means."""
    code = ctypes.get_errno()
    if moved < 0 and code not in (errno.EFAULT, errno.ESRCH):
        raise TransportError(_reason(code))
    if moved < KEY_PAGES * NONCE_BYTES:
        raise PeerGone(
            "the peer's process is gone, runs another program, or has closed: nothing was written"
        )
    head = (KEY_PAGES + 1) * NONCE_BYTES
    if moved < head:
        raise TransportError("the peer has deregistered this region: nothing was written")
    raise TransportError(
        f"only {moved - head} of {wanted - head} bytes could be written: the target, or the "
        "source, has pages that are not mapped, or not writable"
    )


def _iovecs(addresses: Iterable[int], size_bytes: int) -> Iovecs:
    return np.array([[address, size_bytes] for address in addresses], np.uint64)


class AttachedMemory:
    """One registered region of a peer."""

    def __init__(self, region: AttachedRegion, space: PeerSpace) -> None:
        self.size_bytes = region.size_bytes
        self._address = region.address
        self._latch = region.latch
        self._space = space

    def write(self, pieces: Int64Array, source: ByteArray) -> Iterator[int]:
        """Copy checked ``pieces`` (n, 6) out of ``source``; each step is one call of about a
        chunk and yields its bytes. Raises as :meth:`PeerSpace.write`."""
        for part in few_rows(pieces, _ROWS_AT_ONCE):
            yield from self._write_rows(expand_rows(part), source)

    def _write_rows(self, pieces: Int64Array, source: ByteArray) -> Iterator[int]:
        start, into, width = cut_pieces(pieces, CHUNK_BYTES)
        local = np.column_stack((start + source.ctypes.data, width)).astype(np.uint64)
        remote = np.column_stack((into + self._address, width)).astype(np.uint64)
        done = np.cumsum(width)
        # A row belongs to the chunk in which it ends: a call has less than two chunks.
        chunk_of = (done - 1) // CHUNK_BYTES
        cuts = [0, *(np.flatnonzero(np.diff(chunk_of)) + 1).tolist(), len(width)]
        copied = 0
        for first, end in itertools.pairwise(cuts):
            for at in range(first, end, MAX_ROWS):
                stop = min(end, at + MAX_ROWS)
                self._space.write(self._latch, local[at:stop], remote[at:stop])
                total = int(done[stop - 1])
                yield total - copied
                copied = total
