"""Frames between shm transports, and how one dials the other.

An AF_UNIX SOCK_SEQPACKET socket keeps frames whole, passes descriptors, and ends when
its process does. Its name is abstract (no file to leave behind) and random; the kernel
says which process is at the other end, and only our own uid is answered.
"""

from __future__ import annotations

import array
import enum
import os
import socket
import struct
import time
from typing import Final

import attrs

from pdcore.errors import PeerGone, TransportError
from pdcore.transports.process_proof import ProcessKey
from pdcore.types import Incarnation, LeaseId

MAGIC: Final = b"PDSM"
VERSION: Final = 1
MAX_FRAME_BYTES: Final = 65536
#: sun_path holds 108 bytes; the abstract name takes a leading zero.
MAX_ADDRESS_BYTES: Final = 107
#: The kernel passes at most 253 descriptors in one message.
REGIONS_PER_FRAME: Final = 200
#: Registered regions, which need no descriptor.
ATTACHED_PER_FRAME: Final = 2000
#: What opens an address space to its peers (see shm_attach).
KEY_PAGES: Final = 8
NONCE_BYTES: Final = 8
#: Sums of two of them fit an int64.
MAX_ATTACHED_ADDRESS: Final = 1 << 62

_HEAD: Final = struct.Struct("<4sBB")
_HELLO: Final = struct.Struct("<16s16sQ")
_REGION: Final = struct.Struct("<IQIB")
_COUNTS: Final = struct.Struct("<II")
_KEY: Final = struct.Struct(f"<{NONCE_BYTES}s{KEY_PAGES}Q")
_ATTACHED: Final = struct.Struct("<IQQQ")
_LEASE: Final = struct.Struct("<16sq")
_BLOB: Final = struct.Struct("<16sIQ")
_CREDENTIALS: Final = struct.Struct("<iII")

MAX_PAYLOAD_BYTES: Final = MAX_FRAME_BYTES - _HEAD.size - _LEASE.size


class Kind(enum.IntEnum):
    """HELLO is the sender's first frame; the receiver answers WELCOME, REGIONS and
    ATTACHED, or REFUSED. Afterwards NOTIFY goes to the receiver, REVOKE to the sender, and either
    side ends with DISCONNECT (this session) or BYE (this incarnation, quiesced)."""

    HELLO = 1
    WELCOME = 2
    REFUSED = 3
    REGIONS = 4
    NOTIFY = 5
    REVOKE = 6
    DISCONNECT = 7
    BYE = 8
    ATTACHED = 9


@attrs.frozen
class Hello:
    incarnation: Incarnation
    target: Incarnation
    start_ticks: int


@attrs.frozen
class SharedRegion:
    region_id: int
    size_bytes: int
    offset: int
    sealed: bool


@attrs.frozen
class AttachedRegion:
    """Registered memory of the peer's process: where it lies there, and the page that stays
    mapped as long as it is registered."""

    region_id: int
    size_bytes: int
    address: int
    latch: int


@attrs.frozen
class SpaceKey:
    """Addresses of pages which only one address space has, and what stands in each."""

    nonce: bytes = attrs.field(repr=False)
    pages: tuple[int, ...]


@attrs.frozen(eq=False)
class Offer:
    """What a receiver lets its peers write. ``shared``: with the descriptor of each segment;
    ``key`` is there when anything is ``attached``."""

    shared: list[tuple[SharedRegion, int]]
    attached: tuple[AttachedRegion, ...] = ()
    key: SpaceKey | None = None


@attrs.frozen
class Address:
    """The blob of an endpoint descriptor: where, and whose, the listening socket is."""

    boot_id: bytes
    process: ProcessKey
    name: bytes

    def encode(self) -> bytes:
        return _BLOB.pack(self.boot_id, *self.process) + self.name


def decode_address(blob: bytes) -> Address:
    """Raises TransportError."""
    name = blob[_BLOB.size :]
    if len(blob) < _BLOB.size or not 1 < len(name) <= MAX_ADDRESS_BYTES or name[0]:
        raise TransportError("malformed endpoint descriptor: not an address of shm")
    host, pid, ticks = _BLOB.unpack_from(blob)
    return Address(host, ProcessKey(pid, ticks), name)


def pack(kind: Kind, body: bytes = b"") -> bytes:
    return _HEAD.pack(MAGIC, VERSION, kind) + body


def unpack(frame: bytes) -> tuple[Kind, bytes]:
    """Raises TransportError for anything that is not a frame of this version."""
    if len(frame) < _HEAD.size:
        raise TransportError(f"truncated frame of {len(frame)} bytes")
    magic, version, number = _HEAD.unpack_from(frame)
    if magic != MAGIC or version != VERSION:
        raise TransportError(f"frame of another protocol or version ({magic!r}, {version})")
    try:
        return Kind(number), frame[_HEAD.size :]
    except ValueError:
        raise TransportError(f"unknown frame kind {number}") from None


def pack_hello(hello: Hello) -> bytes:
    body = _HELLO.pack(hello.incarnation, hello.target, hello.start_ticks)
    return pack(Kind.HELLO, body)


def unpack_hello(frame: bytes) -> Hello:
    """Raises TransportError."""
    kind, body = unpack(frame)
    if kind is not Kind.HELLO or len(body) != _HELLO.size:
        raise TransportError("expected a HELLO frame")
    incarnation, target, ticks = _HELLO.unpack(body)
    return Hello(Incarnation(incarnation), Incarnation(target), ticks)


def pack_notify(lease: LeaseId, payload: bytes) -> bytes:
    return pack(Kind.NOTIFY, _LEASE.pack(*lease) + payload)


def pack_revoke(lease: LeaseId) -> bytes:
    return pack(Kind.REVOKE, _LEASE.pack(*lease))


def unpack_lease(body: bytes) -> tuple[LeaseId, bytes]:
    """The lease a NOTIFY or REVOKE names, and what follows. Raises TransportError."""
    if len(body) < _LEASE.size:
        raise TransportError("truncated frame: no lease")
    incarnation, counter = _LEASE.unpack_from(body)
    return LeaseId(Incarnation(incarnation), counter), body[_LEASE.size :]


def send_offer(sock: socket.socket, offer: Offer) -> None:
    """WELCOME, the descriptors of all segments, and where registered memory is. Raises OSError."""
    regions = offer.shared
    counts = _COUNTS.pack(len(regions), len(offer.attached))
    sock.send(pack(Kind.WELCOME, counts), socket.MSG_NOSIGNAL)
    for start in range(0, len(regions), REGIONS_PER_FRAME):
        part = regions[start : start + REGIONS_PER_FRAME]
        body = b"".join(
            _REGION.pack(r.region_id, r.size_bytes, r.offset, r.sealed) for r, _ in part
        )
        rights = array.array("i", [fd for _, fd in part]).tobytes()
        control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)]
        sock.sendmsg([pack(Kind.REGIONS, body)], control, socket.MSG_NOSIGNAL)
    if offer.key is None:
        return
    key = _KEY.pack(offer.key.nonce, *offer.key.pages)
    for start in range(0, len(offer.attached), ATTACHED_PER_FRAME):
        entries = (
            _ATTACHED.pack(r.region_id, r.size_bytes, r.address, r.latch)
            for r in offer.attached[start : start + ATTACHED_PER_FRAME]
        )
        sock.send(pack(Kind.ATTACHED, key + b"".join(entries)), socket.MSG_NOSIGNAL)


def receive_offer(sock: socket.socket, deadline: float) -> Offer:
    """What ``send_offer`` sent; the caller owns the descriptors.

    Raises PeerGone when nothing comes in time, TransportError when refused or malformed;
    no descriptor stays open then.
    """
    kind, body, fds = _receive(sock, deadline)
    found: list[tuple[SharedRegion, int]] = []
    try:
        if kind is Kind.REFUSED:
            raise TransportError(f"the peer refused: {body.decode(errors='replace')[:500]}")
        if kind is not Kind.WELCOME or len(body) != _COUNTS.size or fds:
            raise TransportError("the peer answered with something else than WELCOME")
        num_shared, num_attached = _COUNTS.unpack(body)
        while len(found) < num_shared:
            kind, body, fds = _receive(sock, deadline)
            if kind is not Kind.REGIONS or len(body) != _REGION.size * len(fds) or not fds:
                raise TransportError(
                    "the peer's regions are malformed, or this process has no descriptors left"
                )
            for i, entry in enumerate(_REGION.iter_unpack(body)):
                region_id, size, offset, sealed = entry
                found.append((SharedRegion(region_id, size, offset, bool(sealed)), fds[i]))
            fds = []
        attached: list[AttachedRegion] = []
        key = None
        while len(attached) < num_attached:
            kind, body, fds = _receive(sock, deadline)
            if kind is not Kind.ATTACHED or fds:
                raise TransportError("the peer's registered regions are malformed")
            key, part = _unpack_attached(body)
            attached += part
        return Offer(found, tuple(attached), key)
    except TransportError:
        for fd in [*fds, *(fd for _, fd in found)]:
            os.close(fd)
        raise


def _unpack_attached(body: bytes) -> tuple[SpaceKey, list[AttachedRegion]]:
    """Raises TransportError; the addresses are those of another process, and mean nothing here."""
    if len(body) <= _KEY.size or (len(body) - _KEY.size) % _ATTACHED.size:
        raise TransportError("the peer's registered regions are malformed")
    nonce, *pages = _KEY.unpack_from(body)
    found = [AttachedRegion(*entry) for entry in _ATTACHED.iter_unpack(body[_KEY.size :])]
    for region in found:
        last = region.address + region.size_bytes
        if not region.size_bytes or max(last, region.latch, *pages) >= MAX_ATTACHED_ADDRESS:
            raise TransportError("the peer's registered regions are malformed")
    return SpaceKey(nonce, tuple(pages)), found


def _receive(sock: socket.socket, deadline: float) -> tuple[Kind, bytes, list[int]]:
    left = deadline - time.monotonic()
    sock.settimeout(max(0.001, left))
    try:
        # Not socket.recv_fds: it drops the flags (3.11), and with them close-on-exec.
        frame, control, flags, _ = sock.recvmsg(
            MAX_FRAME_BYTES, socket.CMSG_SPACE(4 * REGIONS_PER_FRAME), socket.MSG_CMSG_CLOEXEC
        )
    except TimeoutError:
        raise PeerGone("the peer did not answer in time: stopped, or overloaded") from None
    except OSError as error:
        raise PeerGone(f"the peer closed the connection: {error.strerror}") from error
    fds: list[int] = []
    for level, kind_of, data in control:
        if level == socket.SOL_SOCKET and kind_of == socket.SCM_RIGHTS:
            fds += array.array("i", data[: len(data) // 4 * 4])
    try:
        if not frame:
            raise PeerGone("the peer closed the connection")
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise TransportError("the peer's frame came truncated: too many open descriptors?")
        kind, body = unpack(frame)
    except TransportError:
        for fd in fds:
            os.close(fd)
        raise
    return kind, body, fds


def credentials(sock: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the process at the other end, as the kernel recorded them."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return pid, uid


def dial(name: bytes, timeout_s: float) -> socket.socket:
    """Connect within ``timeout_s``; the peer need not be running for this to succeed, but
    its backlog must have room. Raises PeerGone or TransportError."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        # A blocking connect waits for room in the backlog no longer than SO_SNDTIMEO;
        # a non-blocking one would fail at once.
        seconds = struct.pack("@ll", int(timeout_s), int(timeout_s % 1 * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, seconds)
        sock.connect(name)
    except (ConnectionRefusedError, FileNotFoundError):
        sock.close()
        raise PeerGone("nobody listens at the peer's address: its process is gone") from None
    except BlockingIOError:
        sock.close()
        raise PeerGone("the peer does not accept connections: stopped, or overloaded") from None
    except OSError as error:
        sock.close()
        raise TransportError(f"cannot connect to the peer: {error.strerror}") from error
    return sock
