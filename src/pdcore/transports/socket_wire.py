"""Frames of the socket transport: what may come in which phase, and how long it may be.

A connection belongs to one session: the sender of KV dialled the receiver. Every frame has
a head of 12 bytes and a body whose length is bounded by its kind before a byte of it is
read. The KV bytes of a WRITE follow its body: they have no place in any buffer of ours, the
kernel puts them where they belong.

Opening: HELLO, CHALLENGE, PROOF, WELCOME (or REFUSED, in place of either answer; or STALE:
the life that HELLO means is not, or not any more, at this address). Then the
sender writes WRITE and END, the receiver answers every END with one ACK and may REJECT
before; it may REVOKE a lease, so that a sender whose bytes it does not place itself stops.
Either side ends with BYE (this incarnation closes its transport), the sender also
with DISCONNECT (this session).
"""

from __future__ import annotations

import enum
import struct
from typing import Final

import attrs
import numpy as np

from pdcore.errors import TransportError
from pdcore.kv.plan import Int64Array
from pdcore.transports.check import MAX_REGION_BYTES
from pdcore.transports.descriptor import MAX_REGIONS
from pdcore.types import Incarnation, LeaseId

MAGIC: Final = b"PDSO"
VERSION: Final = 1
#: Pieces of one WRITE: what the kernel takes in one call (IOV_MAX), less the head and body.
MAX_PIECES: Final = 1000
#: A WRITE holds about one chunk (a piece of another may follow), so never two.
CHUNK_BYTES: Final = 1 << 20
MAX_WRITE_BYTES: Final = 2 * CHUNK_BYTES
MAX_PAYLOAD_BYTES: Final = 65536
MAX_REASON_BYTES: Final = 512
#: What a receiver may tell a welcomed sender besides, of a transport built upon this one.
MAX_EXTRA_BYTES: Final = 1 << 17
NONCE_BYTES: Final = 32
MAC_BYTES: Final = 32

HEAD: Final = struct.Struct("<4sBBHI")
_HELLO: Final = struct.Struct("<16s16sQQ32s")
_CHALLENGE: Final = struct.Struct("<B32s")
_WRITE: Final = struct.Struct("<Q16sqII")
_END: Final = struct.Struct("<Q16sqBB")
_ANSWER: Final = struct.Struct("<QB")
_LEASE: Final = struct.Struct("<16sq")
_COUNT: Final = struct.Struct("<I")
_REGION: Final = struct.Struct("<IQ")
_PIECE_BYTES: Final = 16


class Kind(enum.IntEnum):
    HELLO = 1
    CHALLENGE = 2
    PROOF = 3
    WELCOME = 4
    REFUSED = 5
    WRITE = 6
    END = 7
    REJECT = 8
    ACK = 9
    DISCONNECT = 10
    BYE = 11
    STALE = 12
    REVOKE = 13


#: A peer that announces more is not one of us: its connection ends.
MAX_BODY: Final[dict[Kind, int]] = {
    Kind.HELLO: 1024,
    Kind.CHALLENGE: _CHALLENGE.size,
    Kind.PROOF: MAC_BYTES,
    Kind.WELCOME: MAC_BYTES + _COUNT.size + MAX_REGIONS * _REGION.size + MAX_EXTRA_BYTES,
    Kind.REFUSED: MAX_REASON_BYTES,
    Kind.WRITE: _WRITE.size + MAX_PIECES * _PIECE_BYTES,
    Kind.END: _END.size + MAX_PAYLOAD_BYTES,
    Kind.REJECT: _ANSWER.size + MAX_REASON_BYTES,
    Kind.ACK: _ANSWER.size + MAX_REASON_BYTES,
    Kind.DISCONNECT: 0,
    Kind.BYE: 0,
    Kind.STALE: 0,
    Kind.REVOKE: _LEASE.size,
}
FROM_SENDER: Final = frozenset({Kind.WRITE, Kind.END, Kind.DISCONNECT, Kind.BYE})
FROM_RECEIVER: Final = frozenset({Kind.REJECT, Kind.ACK, Kind.REVOKE, Kind.BYE})


@attrs.frozen
class Hello:
    """``number`` counts the sessions of a sender; those below ``oldest`` are over, and
    nothing of them may be placed after this one was welcomed. ``home``: an encoded Home."""

    incarnation: Incarnation
    target: Incarnation
    number: int
    oldest: int
    nonce: bytes
    home: bytes = b""


@attrs.frozen
class Welcome:
    """The receiver's regions (id to bytes), its proof, and what it tells besides."""

    regions: dict[int, int]
    mac: bytes
    extra: bytes = b""


@attrs.frozen(eq=False)
class Write:
    """``pieces`` (n, 2) int64: offset in the region and bytes; ``num_bytes`` of all."""

    handle: int
    lease: LeaseId
    region: int
    pieces: Int64Array
    num_bytes: int


@attrs.frozen
class End:
    """The last frame of a transfer; ``complete`` False: the sender stopped before its end."""

    handle: int
    lease: LeaseId
    complete: bool
    notify: bytes | None


@attrs.frozen
class Answer:
    """Of a REJECT or an ACK; ``placed``: every byte of a complete transfer is in place."""

    handle: int
    placed: bool
    reason: str


def pack(kind: Kind, body: bytes = b"") -> bytes:
    return HEAD.pack(MAGIC, VERSION, kind, 0, len(body)) + body


def unpack_head(data: bytes | bytearray | memoryview) -> tuple[Kind, int]:
    """(kind, bytes of its body). Raises TransportError for a head of another protocol or
    version, an unknown kind, and a body longer than its kind may be."""
    magic, version, number, reserved, size = HEAD.unpack(data)
    if magic != MAGIC or version != VERSION or reserved:
        raise TransportError(f"frame of another protocol or version ({magic!r}, {version})")
    try:
        kind = Kind(number)
    except ValueError:
        raise TransportError(f"unknown frame kind {number}") from None
    if size > MAX_BODY[kind]:
        raise TransportError(f"{kind.name} frame of {size} bytes, at most {MAX_BODY[kind]}")
    return kind, size


def pack_hello(hello: Hello) -> bytes:
    fixed = (hello.incarnation, hello.target, hello.number, hello.oldest, hello.nonce)
    return _HELLO.pack(*fixed) + hello.home


def unpack_hello(body: bytes) -> Hello:
    """Raises TransportError."""
    if len(body) < _HELLO.size:
        raise TransportError("truncated HELLO frame")
    mine, target, number, oldest, nonce = _HELLO.unpack_from(body)
    home = body[_HELLO.size :]
    return Hello(Incarnation(mine), Incarnation(target), number, oldest, nonce, home)


def pack_challenge(nonce: bytes, *, has_secret: bool) -> bytes:
    return _CHALLENGE.pack(has_secret, nonce)


def unpack_challenge(body: bytes) -> tuple[bool, bytes]:
    """(does the receiver want a proof, its nonce). Raises TransportError."""
    if len(body) != _CHALLENGE.size:
        raise TransportError("truncated CHALLENGE frame")
    has_secret, nonce = _CHALLENGE.unpack(body)
    return bool(has_secret), nonce


def pack_regions(regions: dict[int, int]) -> bytes:
    """What a WELCOME says; its proof is put in front."""
    listed = b"".join(_REGION.pack(region, size) for region, size in regions.items())
    return _COUNT.pack(len(regions)) + listed


def unpack_welcome(body: bytes) -> Welcome:
    """Raises TransportError."""
    at = MAC_BYTES + _COUNT.size
    if len(body) < at:
        raise TransportError("truncated WELCOME frame")
    (count,) = _COUNT.unpack_from(body, MAC_BYTES)
    end = at + count * _REGION.size
    if end > len(body):
        raise TransportError("truncated WELCOME frame")
    regions = dict(_REGION.iter_unpack(body[at:end]))
    if len(regions) != count or any(not 0 < size <= MAX_REGION_BYTES for size in regions.values()):
        raise TransportError("malformed WELCOME frame: a region is twice or sized wrong")
    return Welcome(regions, body[:MAC_BYTES], body[end:])


def pack_write(handle: int, lease: LeaseId, region: int, pieces: Int64Array) -> bytes:
    """``pieces`` (n, 2): offset and bytes."""
    fixed = _WRITE.pack(handle, *lease, region, len(pieces))
    return pack(Kind.WRITE, fixed + pieces.astype("<i8").tobytes())


def unpack_write(body: bytes) -> Write:
    """Raises TransportError for a table that is truncated, empty, negative or announces more
    than a WRITE may hold."""
    if len(body) < _WRITE.size:
        raise TransportError("truncated WRITE frame")
    handle, incarnation, counter, region, count = _WRITE.unpack_from(body)
    if count == 0 or len(body) != _WRITE.size + count * _PIECE_BYTES:
        raise TransportError(f"WRITE frame with {count} pieces in {len(body)} bytes")
    table = np.frombuffer(body, "<i8", offset=_WRITE.size).astype(np.int64).reshape(-1, 2)
    offsets, sizes = table[:, 0], table[:, 1]
    if offsets.min() < 0 or offsets.max() > MAX_REGION_BYTES or sizes.min() <= 0:
        raise TransportError("WRITE frame with a piece that lies nowhere")
    # The largest first: a sum of absurd sizes could look small.
    if sizes.max() > MAX_WRITE_BYTES or sizes.sum() > MAX_WRITE_BYTES:
        raise TransportError(f"WRITE frame of more than {MAX_WRITE_BYTES} bytes")
    lease = LeaseId(Incarnation(incarnation), counter)
    return Write(handle, lease, region, table, int(sizes.sum()))


def pack_end(end: End) -> bytes:
    fixed = _END.pack(end.handle, *end.lease, end.complete, end.notify is not None)
    return pack(Kind.END, fixed + (end.notify or b""))


def unpack_end(body: bytes) -> End:
    """Raises TransportError."""
    if len(body) < _END.size:
        raise TransportError("truncated END frame")
    handle, incarnation, counter, complete, has_notify = _END.unpack_from(body)
    payload = body[_END.size :]
    if payload and not has_notify:
        raise TransportError("END frame with a payload it does not announce")
    lease = LeaseId(Incarnation(incarnation), counter)
    return End(handle, lease, bool(complete), payload if has_notify else None)


def pack_answer(kind: Kind, answer: Answer) -> bytes:
    reason = answer.reason.encode()[:MAX_REASON_BYTES]
    return pack(kind, _ANSWER.pack(answer.handle, answer.placed) + reason)


def unpack_answer(body: bytes) -> Answer:
    """Raises TransportError."""
    if len(body) < _ANSWER.size:
        raise TransportError("truncated answer")
    handle, placed = _ANSWER.unpack_from(body)
    return Answer(handle, bool(placed), body[_ANSWER.size :].decode(errors="replace"))


def pack_revoke(lease: LeaseId) -> bytes:
    return pack(Kind.REVOKE, _LEASE.pack(*lease))


def unpack_revoke(body: bytes) -> LeaseId:
    """Raises TransportError."""
    if len(body) != _LEASE.size:
        raise TransportError("truncated REVOKE frame")
    incarnation, counter = _LEASE.unpack(body)
    return LeaseId(Incarnation(incarnation), counter)
