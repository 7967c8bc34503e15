"""Frames of the control connection of a torchdist pair, and the address one dials.

Read from a peer: every field is checked, nothing is allocated on its word.
"""

from __future__ import annotations

import enum
import ipaddress
import struct
import zlib
from typing import Final

import attrs
import numpy as np

from pdcore.errors import TransportError
from pdcore.kv.plan import Int64Array
from pdcore.transports.check import MAX_REGION_BYTES
from pdcore.transports.descriptor import MAX_REGIONS
from pdcore.transports.torchdist_witness import STAMP
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
MAX_REASON_BYTES: Final = 2000

_HELLO: Final = struct.Struct(f"<16s16s16s{STAMP.size}sQQ")
_REGION: Final = struct.Struct("<IQ")
_GROUP: Final = struct.Struct("<I16s")
_KEY: Final = struct.Struct("<H")
_CHUNK: Final = struct.Struct("<16sqqIBI")
_MAX_WELCOME_BYTES: Final = MAX_REGIONS * _REGION.size
_BLOB: Final = struct.Struct("<IH16sB")

_LAST: Final = 1
_NOTIFY: Final = 2


class Kind(enum.IntEnum):
    """HELLO comes from the sender; the receiver answers WELCOME with its regions, or
    REFUSED. JOIN from the sender is answered by GROUP; then both build, and each KEY is what
    the group's store of one side has for the other.

    Each chunk is CHUNK (what, where to, under which lease), READY (a receive is posted),
    the bytes in the group, SENT, and PLACED; REJECTED may take the place of READY and of
    PLACED. Either side ends with DISCONNECT (nothing of this pair lands any more) or BYE
    (nothing of this incarnation does)."""

    HELLO = 1
    WELCOME = 2
    REFUSED = 3
    JOIN = 4
    GROUP = 5
    KEY = 6
    CHUNK = 7
    READY = 8
    SENT = 9
    PLACED = 10
    REJECTED = 11
    DISCONNECT = 12
    BYE = 13


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
    """``number`` names a session of this sender (0: none, only a question); of the one named
    by ``drops`` nothing may be placed any more once this is answered."""

    incarnation: Incarnation
    target: Incarnation
    token: bytes
    #: Which process the sender is (see torchdist_witness).
    stamp: bytes
    number: int = 0
    drops: int = 0

    def encode(self) -> bytes:
        fixed = self.incarnation, self.target, self.token, self.stamp
        return _HELLO.pack(*fixed, self.number, self.drops)


def decode_hello(body: bytes) -> Hello:
    """Raises TransportError."""
    if len(body) != _HELLO.size:
        raise TransportError("malformed HELLO")
    incarnation, target, *rest = _HELLO.unpack(body)
    return Hello(Incarnation(incarnation), Incarnation(target), *rest)


@attrs.frozen
class Welcome:
    """``regions`` maps ids to bytes; ``stamp`` says which process the receiver is."""

    stamp: bytes
    regions: dict[int, int]

    def encode(self) -> bytes:
        parts = [_REGION.pack(region, size) for region, size in self.regions.items()]
        return b"".join([self.stamp, *parts])


def decode_welcome(body: bytes) -> Welcome:
    """Raises TransportError."""
    stamp, rows = body[: STAMP.size], body[STAMP.size :]
    if len(stamp) != STAMP.size or len(rows) % _REGION.size or len(rows) > _MAX_WELCOME_BYTES:
        raise TransportError("malformed WELCOME")
    regions = dict(_REGION.iter_unpack(rows))
    is_listed_once = len(regions) * _REGION.size == len(rows)
    if not is_listed_once or any(not 0 < size <= MAX_REGION_BYTES for size in regions.values()):
        raise TransportError("malformed WELCOME: a region is twice or sized wrong")
    return Welcome(stamp, regions)


@attrs.frozen
class Meeting:
    """What both sides of a pair build their group with: the prefix of its keys (16 bytes),
    and the largest chunk that the receiver takes."""

    chunk_bytes: int
    key: bytes

    def encode(self) -> bytes:
        return _GROUP.pack(self.chunk_bytes, self.key)


def decode_meeting(body: bytes) -> Meeting:
    """Raises TransportError."""
    if len(body) != _GROUP.size:
        raise TransportError("malformed GROUP")
    chunk_bytes, key = _GROUP.unpack(body)
    if not MIN_CHUNK_BYTES <= chunk_bytes <= MAX_CHUNK_BYTES:
        raise TransportError(f"the peer takes chunks of {chunk_bytes} bytes")
    return Meeting(chunk_bytes, key)


def encode_key(key: str, value: bytes) -> bytes:
    name = key.encode()
    return _KEY.pack(len(name)) + name + value


def decode_key(body: bytes) -> tuple[str, bytes]:
    """Raises TransportError."""
    if len(body) < _KEY.size:
        raise TransportError("malformed KEY")
    (size,) = _KEY.unpack_from(body)
    end = _KEY.size + size
    if len(body) < end:
        raise TransportError("malformed KEY")
    try:
        return body[_KEY.size : end].decode(), body[end:]
    except UnicodeDecodeError as error:
        raise TransportError(f"malformed KEY: {error}") from None


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
