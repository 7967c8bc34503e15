"""An engine of one-sided writes that needs no vendor: process_vm_writev into the peer's
process; and what vendors do wrong, on demand.

The faults lie in the sender's engine: ``fail_next`` calls that raise, ``hang`` until released,
``late_s``: the bytes of a call come that much after it returned, ``partial``: half of them
never come.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import os
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import attrs
import numpy as np

from pdcore.errors import PeerGone, TransportError
from pdcore.kv.plan import Int64Array
from pdcore.testing.transport_harness import RemotePeer
from pdcore.transports.base import Transport
from pdcore.transports.engines import EngineLimits, WriteFailed
from pdcore.transports.onesided import OneSidedTransport, caps_of
from pdcore.transports.onesided_side import SideOptions
from pdcore.transports.process_proof import ProcessKey, start_ticks, this_process
from pdcore.transports.registry import ENTRY_POINT_GROUP, TransportPlugin
from pdcore.transports.socket_address import free_port
from pdcore.types import Incarnation

NAME: Final = "attach"
LIMITS: Final = EngineLimits(max_batch=1024, max_bytes=1 << 30, alignment=1, lands_late_s=0.0)
PLAIN: Final = SideOptions()
_ADDRESS: Final = struct.Struct("<IQ")


class IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("size", ctypes.c_size_t))


@attrs.define(eq=False)
class Faults:
    fail_next: int = 0
    #: What they raise.
    failure: Callable[[], TransportError] = attrs.field(
        default=lambda: WriteFailed("the vendor says -1")
    )
    hang: bool = False
    hang_at_open: bool = False
    partial: bool = False
    late: bool = False
    release: threading.Event = attrs.field(factory=threading.Event)
    entered: threading.Event = attrs.field(factory=threading.Event)
    #: (rows, bytes) of each call.
    calls: list[tuple[int, int]] = attrs.field(factory=list)
    late_writes: list[Callable[[], None]] = attrs.field(factory=list)


class AttachEngine:
    """See :class:`pdcore.transports.engines.Engine`."""

    def __init__(self, limits: EngineLimits = LIMITS) -> None:
        self.limits = limits
        self.faults = Faults()
        self.registered: set[tuple[int, int]] = set()
        self.is_closed = False
        self.peers: dict[int, ProcessKey] = {}
        self._ids = itertools.count(1)
        libc = ctypes.CDLL(None, use_errno=True)
        self._writev = libc.process_vm_writev
        self._writev.restype = ctypes.c_ssize_t

    def address(self) -> bytes:
        return _ADDRESS.pack(*this_process())

    def register(self, base: int, size_bytes: int) -> None:
        self.registered.add((base, size_bytes))

    def unregister(self, base: int, size_bytes: int) -> None:
        self.registered.remove((base, size_bytes))

    def open(self, address: bytes) -> int:
        if self.faults.hang_at_open:
            assert self.faults.release.wait(20)
        if len(address) != _ADDRESS.size:
            raise TransportError("malformed address")
        key = ProcessKey(*_ADDRESS.unpack(address))
        if start_ticks(key.pid) != key.start_ticks:
            raise PeerGone("that process is gone")
        peer = next(self._ids)
        self.peers[peer] = key
        return peer

    def write(
        self,
        peer: int,
        local: Int64Array,
        remote: Int64Array,
        lengths: Int64Array,
        is_stopping: Callable[[], bool],
    ) -> None:
        faults = self.faults
        assert len(local) == len(remote) == len(lengths) <= self.limits.max_batch
        assert lengths.min() > 0
        assert lengths.sum() <= self.limits.max_bytes
        faults.calls.append((len(lengths), int(lengths.sum())))
        faults.entered.set()
        if faults.hang:
            assert faults.release.wait(20)
        if faults.partial:
            half = (len(lengths) + 1) // 2
            self._move(peer, local[:half], remote[:half], lengths[:half])
            raise WriteFailed("only a part of it arrived")
        if faults.late:
            later = local.copy(), remote.copy(), lengths.copy()
            faults.late_writes.append(lambda: self._move(peer, *later))
            raise WriteFailed("the vendor's time-out", may_land=True)
        if faults.fail_next:
            faults.fail_next -= 1
            raise faults.failure()
        self._move(peer, local, remote, lengths)

    def shut(self, peer: int) -> None:
        self.peers.pop(peer, None)

    def close(self) -> None:
        self.is_closed = True

    def _move(self, peer: int, local: Int64Array, remote: Int64Array, lengths: Int64Array) -> None:
        sizes = lengths.tolist()
        ours = (IoVec * len(sizes))(*zip(local.tolist(), sizes, strict=True))
        theirs = (IoVec * len(sizes))(*zip(remote.tolist(), sizes, strict=True))
        pid = self.peers[peer].pid
        count = self._writev(pid, ours, len(sizes), theirs, len(sizes), 0)
        if count != lengths.sum():
            code = ctypes.get_errno() if count < 0 else 0
            gone = code in (errno.ESRCH, errno.EFAULT)
            raise WriteFailed(f"process_vm_writev: {os.strerror(code)}", is_peer_gone=gone)


def create(
    incarnation: Incarnation, *, lands_late_s: float = 0.0, **options: object
) -> OneSidedTransport:
    engine = AttachEngine(attrs.evolve(LIMITS, lands_late_s=lands_late_s))
    return make(incarnation, engine, SideOptions(**options))  # type: ignore[arg-type]


def make(
    incarnation: Incarnation, engine: AttachEngine, options: SideOptions = PLAIN
) -> OneSidedTransport:
    return OneSidedTransport(NAME, incarnation, engine, options, cross_host=False)


def why_unavailable() -> str | None:
    """A sandbox may forbid it, even towards ourselves."""
    if sys.platform != "linux":
        return "process_vm_writev is Linux"
    one, two = np.zeros(8, np.uint8), np.ones(8, np.uint8)
    engine = AttachEngine()
    peer = engine.open(engine.address())
    at = [np.array([array.ctypes.data], np.int64) for array in (two, one)]
    try:
        engine.write(peer, *at, np.array([8], np.int64), lambda: False)
    except TransportError as error:
        return str(error)
    return None


PLUGIN = TransportPlugin(
    create=create,
    why_unavailable=why_unavailable,
    caps=caps_of(LIMITS, cross_host=False),
    variants={"acknowledged": {}, "late": {"lands_late_s": 0.5}},
    fixed_address=lambda: {"port": free_port("127.0.0.1")},
)


@contextlib.contextmanager
def installed(folder: Path) -> Iterator[None]:
    """As a package that was installed would be found, also by processes started from here."""
    info = folder / "attach_transport-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: attach-transport\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        f"[{ENTRY_POINT_GROUP}]\n{NAME} = tests.unit.transports.attach_engine:PLUGIN\n"
    )
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


class AttachHarness:
    """Pairs of transports in this process whose engines are at hand, for their faults."""

    name = NAME
    cycles = 30
    quiet_s = 0.03

    def __init__(self, limits: EngineLimits = LIMITS, options: SideOptions = PLAIN) -> None:
        self.engines: list[AttachEngine] = []
        self._limits = limits
        self._options = options

    def create(self) -> Transport:
        self.engines.append(AttachEngine(self._limits))
        return make(Incarnation(os.urandom(16)), self.engines[-1], self._options)

    def peer(self) -> RemotePeer:
        raise TransportError("this harness starts no processes")

    def successor(self, peer: RemotePeer) -> RemotePeer:
        raise TransportError(f"this harness starts no processes: {peer}")
