"""Frames on the control connection of a torchdist pair, and the address one dials.

torch.distributed moves bytes but says little else: it has no refusal, no cancel, and its
waits know no other end than a time-out. So each pair has a TCP connection of its own
beside the group, which says what comes next, what was placed, and, by its end, that the
other process is gone.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import ipaddress
import os
import select
import socket
import struct
import time
import zlib
from typing import Final

import attrs
import numpy as np

from pdcore.errors import PeerGone, TransportError
from pdcore.kv.plan import Int64Array
from pdcore.transports.descriptor import MAX_REGIONS
from pdcore.types import Incarnation, LeaseId

MAGIC: Final = b"PDTD"
VERSION: Final = 1
#: A table of MAX_ROWS rows, a payload, and room.
MAX_BODY_BYTES: Final = 1 << 20
MAX_ROWS: Final = 8192
MIN_CHUNK_BYTES: Final = 4096
MAX_CHUNK_BYTES: Final = 1 << 30
MAX_PAYLOAD_BYTES: Final = 65000
TABLE_COLUMNS: Final = 5
#: Seconds until an unreachable host is noticed: idle, then probes at intervals.
KEEPALIVE_IDLE_S: Final = 10
KEEPALIVE_INTERVAL_S: Final = 5
KEEPALIVE_PROBES: Final = 4
MAX_BACKEND_BYTES: Final = 32
MAX_REASON_BYTES: Final = 2000
#: How long the last word to a peer may take.
FAREWELL_TIMEOUT_S: Final = 0.2

_HEAD: Final = struct.Struct("<4sBBI")
_HELLO: Final = struct.Struct("<16s16s16s")
_REGION: Final = struct.Struct("<IQ")
_GROUP: Final = struct.Struct("<HI16s")
_CHUNK: Final = struct.Struct("<16sqqIBI")
_BLOB: Final = struct.Struct("<IH16sB")

_LAST: Final = 1
_NOTIFY: Final = 2


class Kind(enum.IntEnum):
    """HELLO comes from the sender; the receiver answers WELCOME with its regions, or
    REFUSED. JOIN from the sender is answered by GROUP, where to meet; with BUILD both build,
    and not before, since whoever builds alone is held up; then JOINED, or NO_GROUP and
    another JOIN.

    Each chunk is CHUNK (what, where to, under which lease), READY (a receive is posted),
    the bytes in the group, SENT, and PLACED; REJECTED may take the place of READY and of
    PLACED. Either side ends with DISCONNECT (nothing of this pair lands any more) or BYE
    (nothing of this incarnation does)."""

    HELLO = 1
    WELCOME = 2
    REFUSED = 3
    JOIN = 4
    GROUP = 5
    BUILD = 6
    JOINED = 7
    NO_GROUP = 8
    CHUNK = 9
    READY = 10
    SENT = 11
    PLACED = 12
    REJECTED = 13
    DISCONNECT = 14
    BYE = 15


class End(enum.Enum):
    """How a control connection ended, as far as this side can prove it."""

    #: The other side said that nothing of this pair lands any more.
    DISCONNECTED = "disconnected"
    #: It said so for its whole incarnation.
    CLOSED = "closed"
    #: Its process is gone: nobody else closes the connection without a word.
    DIED = "died"
    #: Unreachable; the process may be alive.
    LOST = "lost"


class LinkOver(TransportError):
    """The control connection is over."""

    def __init__(self, end: End, detail: str) -> None:
        super().__init__(detail)
        self.end = end
        self.detail = detail


@attrs.frozen
class Address:
    """The blob of an endpoint descriptor. ``token`` is known only to those who were
    given the descriptor; ``host`` is numeric."""

    backend: str
    host: str
    port: int
    token: bytes

    def encode(self) -> bytes:
        name, host = self.backend.encode(), self.host.encode()
        body = _BLOB.pack(0, self.port, self.token, len(name))[4:] + name + host
        return struct.pack("<I", zlib.crc32(body)) + body


def decode_address(blob: bytes) -> Address:
    """Raises TransportError. The checksum of its own keeps a damaged address from being
    dialled, wherever it may lead."""
    if len(blob) < _BLOB.size:
        raise TransportError("malformed endpoint descriptor: not an address of torchdist")
    crc, port, token, name_bytes = _BLOB.unpack_from(blob)
    if crc != zlib.crc32(blob[4:]):
        raise TransportError("malformed endpoint descriptor: the address is damaged")
    rest = blob[_BLOB.size :]
    try:
        backend, host = rest[:name_bytes].decode("ascii"), rest[name_bytes:].decode("ascii")
        ipaddress.ip_address(host)
    except ValueError as error:
        raise TransportError(f"malformed endpoint descriptor: {error}") from None
    return Address(backend, host, port, token)


@attrs.frozen
class Hello:
    incarnation: Incarnation
    target: Incarnation
    token: bytes

    def encode(self) -> bytes:
        return _HELLO.pack(self.incarnation, self.target, self.token)


def decode_hello(body: bytes) -> Hello:
    """Raises TransportError."""
    if len(body) != _HELLO.size:
        raise TransportError("malformed HELLO")
    incarnation, target, token = _HELLO.unpack(body)
    return Hello(Incarnation(incarnation), Incarnation(target), token)


def encode_regions(regions: dict[int, int]) -> bytes:
    return b"".join(_REGION.pack(region, size) for region, size in regions.items())


def decode_regions(body: bytes) -> dict[int, int]:
    """Raises TransportError."""
    if len(body) % _REGION.size or len(body) > MAX_REGIONS * _REGION.size:
        raise TransportError("malformed WELCOME")
    return dict(_REGION.iter_unpack(body))


@attrs.frozen
class Meeting:
    """Where a pair builds its group: the port of its store, the prefix of its keys (16
    bytes), and the largest chunk that the receiver takes."""

    port: int
    chunk_bytes: int
    key: bytes

    def encode(self) -> bytes:
        return _GROUP.pack(self.port, self.chunk_bytes, self.key)


def decode_meeting(body: bytes) -> Meeting:
    """Raises TransportError."""
    if len(body) != _GROUP.size:
        raise TransportError("malformed GROUP")
    port, chunk_bytes, key = _GROUP.unpack(body)
    if not MIN_CHUNK_BYTES <= chunk_bytes <= MAX_CHUNK_BYTES:
        raise TransportError(f"the peer takes chunks of {chunk_bytes} bytes")
    return Meeting(port, chunk_bytes, key)


@attrs.frozen(eq=False)
class ChunkHead:
    """``table`` is (n, 5) int64: remote region, offset, row bytes, rows, stride. The bytes
    come one row after the other. ``notify`` only with the last chunk."""

    lease: LeaseId
    num_bytes: int
    table: Int64Array
    is_last: bool
    notify: bytes | None = None

    def encode(self) -> bytes:
        flags = _LAST * self.is_last + _NOTIFY * (self.notify is not None)
        payload = self.notify or b""
        rows = np.ascontiguousarray(self.table, "<i8")
        head = _CHUNK.pack(*self.lease, self.num_bytes, len(rows), flags, len(payload))
        return head + rows.tobytes() + payload


def decode_chunk(body: bytes) -> ChunkHead:
    """Raises TransportError for anything malformed; regions, bounds and lease are for the
    caller to check."""
    if len(body) < _CHUNK.size:
        raise TransportError("malformed CHUNK: truncated")
    incarnation, counter, num_bytes, rows, flags, payload_bytes = _CHUNK.unpack_from(body)
    table_bytes = 8 * TABLE_COLUMNS * rows
    if len(body) != _CHUNK.size + table_bytes + payload_bytes:
        raise TransportError("malformed CHUNK: wrong length")
    flat = np.frombuffer(body, "<i8", TABLE_COLUMNS * rows, _CHUNK.size)
    payload = body[_CHUNK.size + table_bytes :]
    return ChunkHead(
        LeaseId(Incarnation(incarnation), counter),
        num_bytes,
        flat.astype(np.int64).reshape(rows, TABLE_COLUMNS),
        bool(flags & _LAST),
        payload if flags & _NOTIFY else None,
    )


class _Empty(Exception):
    """Nothing to read now."""


class Channel:
    """One control connection, used by one thread at a time; takes the socket over."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)
        self._sock = sock
        self._buffered = bytearray()

    def send(self, kind: Kind, body: bytes = b"", *, timeout_s: float) -> None:
        """Raises LinkOver when the connection is over or takes nothing for so long."""
        data = memoryview(_HEAD.pack(MAGIC, VERSION, kind, len(body)) + body)
        deadline = time.monotonic() + timeout_s
        poller = select.poll()
        poller.register(self._sock, select.POLLOUT)
        while data:
            try:
                data = data[self._sock.send(data, socket.MSG_NOSIGNAL) :]
            except BlockingIOError:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise LinkOver(End.LOST, "the peer reads nothing: stopped?") from None
                poller.poll(max(1, int(left * 1000)))
            except OSError as error:
                raise self._last_word() or _over(error) from None

    def farewell(self, kind: Kind, why: str = "") -> None:
        """The last word, if there is anybody to hear it. Without one the peer would take
        the end of the connection for the end of this process."""
        with contextlib.suppress(LinkOver):
            body = why.encode()[:MAX_REASON_BYTES]
            self.send(kind, body, timeout_s=FAREWELL_TIMEOUT_S)

    def receive(self, wake: int | None, deadline: float | None = None) -> tuple[Kind, bytes] | None:
        """The next frame; None when ``wake`` became readable or the deadline passed.

        Raises LinkOver: the peer said goodbye, the connection broke, or this is no frame.
        """
        poller = select.poll()
        poller.register(self._sock, select.POLLIN)
        if wake is not None:
            poller.register(wake, select.POLLIN)
        while True:
            frame = self._take()
            if frame is not None:
                return _heard(*frame)
            left = None if deadline is None else max(0, int((deadline - time.monotonic()) * 1000))
            ready = [fd for fd, _ in poller.poll(left)]
            if self._sock.fileno() in ready:
                with contextlib.suppress(_Empty):
                    self._fill()
            elif wake in ready:
                os.eventfd_read(wake)
                return None
            elif deadline is not None and time.monotonic() >= deadline:
                return None

    def close(self) -> None:
        """What was sent before still arrives."""
        self._sock.close()

    def _last_word(self) -> LinkOver | None:
        """A goodbye that came before the connection broke under us."""
        try:
            while True:
                frame = self._take()
                if frame is None:
                    self._fill()
                else:
                    _heard(*frame)
        except LinkOver as over:
            return over
        except _Empty:
            return None

    def _fill(self) -> None:
        try:
            data = self._sock.recv(1 << 18)
        except BlockingIOError:
            raise _Empty from None
        except OSError as error:
            raise _over(error) from None
        if not data:
            raise LinkOver(End.DIED, "its process is gone")
        self._buffered += data

    def _take(self) -> tuple[Kind, bytes] | None:
        if len(self._buffered) < _HEAD.size:
            return None
        magic, version, number, size = _HEAD.unpack_from(self._buffered)
        if magic != MAGIC or version != VERSION or size > MAX_BODY_BYTES:
            raise LinkOver(End.LOST, "the peer speaks another protocol or version")
        end = _HEAD.size + size
        if len(self._buffered) < end:
            return None
        body = bytes(self._buffered[_HEAD.size : end])
        del self._buffered[:end]
        try:
            return Kind(number), body
        except ValueError:
            raise LinkOver(End.LOST, f"the peer sent an unknown frame {number}") from None


def _heard(kind: Kind, body: bytes) -> tuple[Kind, bytes]:
    """Raises LinkOver for a goodbye."""
    if kind is Kind.DISCONNECT:
        raise LinkOver(End.DISCONNECTED, body.decode(errors="replace"))
    if kind is Kind.BYE:
        raise LinkOver(End.CLOSED, "closed its transport")
    return kind, body


def _over(error: OSError) -> LinkOver:
    # Whoever closes in order says so first: a reset is what is left of a dead process. A
    # host that cannot be reached proves nothing.
    if error.errno in (errno.ECONNRESET, errno.EPIPE):
        return LinkOver(End.DIED, f"its process is gone ({error.strerror})")
    return LinkOver(End.LOST, f"the connection broke: {error.strerror}")


def dial(address: Address, timeout_s: float) -> Channel:
    """Raises PeerGone when nobody answers, TransportError when it cannot be reached."""
    try:
        return Channel(socket.create_connection((address.host, address.port), timeout_s))
    except ConnectionRefusedError:
        raise PeerGone("nobody listens at the peer's address: its process is gone") from None
    except TimeoutError:
        raise PeerGone("the peer does not accept connections: stopped, or overloaded") from None
    except OSError as error:
        raise TransportError(f"cannot connect to the peer: {error.strerror}") from error
