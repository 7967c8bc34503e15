"""The bytes a transport publishes so that peers can connect and bound-check.

Layout, little-endian: magic, format version, transport name, incarnation, regions
(id, length), an opaque back-end blob, crc32 of all before it. Read from a peer: every
field is checked, nothing is allocated on its word.
"""

from __future__ import annotations

import struct
import zlib
from typing import Final

import attrs

from pdcore.errors import TransportError
from pdcore.transports.check import MAX_REGION_BYTES
from pdcore.types import Incarnation

MAGIC: Final = b"PDKV"
VERSION: Final = 1
INCARNATION_BYTES: Final = 16
MAX_REGIONS: Final = 4096
MAX_BLOB_BYTES: Final = 65536
MAX_NAME_BYTES: Final = 32

_HEAD = struct.Struct("<4sHB")
_COUNT = struct.Struct("<I")
_REGION = struct.Struct("<IQ")


@attrs.frozen
class EndpointDescriptor:
    """``regions`` maps region ids to bytes; ``blob`` is the transport's own business."""

    transport: str
    incarnation: Incarnation
    regions: dict[int, int]
    blob: bytes = b""

    def encode(self) -> bytes:
        name = self.transport.encode()
        if not 0 < len(name) <= MAX_NAME_BYTES or len(self.incarnation) != INCARNATION_BYTES:
            raise TransportError(
                f"a descriptor needs a name of 1 to {MAX_NAME_BYTES} bytes and an incarnation of "
                f"{INCARNATION_BYTES} bytes, got {self.transport!r} and "
                f"{len(self.incarnation)} bytes"
            )
        if len(self.regions) > MAX_REGIONS or len(self.blob) > MAX_BLOB_BYTES:
            raise TransportError(f"a descriptor holds at most {MAX_REGIONS} regions")
        body = b"".join(
            [
                _HEAD.pack(MAGIC, VERSION, len(name)),
                name,
                self.incarnation,
                _COUNT.pack(len(self.regions)),
                *(_REGION.pack(region, size) for region, size in self.regions.items()),
                _COUNT.pack(len(self.blob)),
                self.blob,
            ]
        )
        return body + _COUNT.pack(zlib.crc32(body))


def decode(data: bytes, transport: str) -> EndpointDescriptor:
    """Raises TransportError for anything but a well-formed descriptor of ``transport``
    in this version (G6)."""
    try:
        found = _decode(bytes(data))
    except (struct.error, UnicodeDecodeError) as error:
        raise TransportError(f"malformed endpoint descriptor: {error}") from None
    if found.transport != transport:
        raise TransportError(
            f"the peer's data plane is {found.transport!r}, ours is {transport!r}: "
            "configure the same transport on both sides"
        )
    return found


def _decode(data: bytes) -> EndpointDescriptor:
    magic, version, name_bytes = _HEAD.unpack_from(data)
    if magic != MAGIC:
        raise TransportError("malformed endpoint descriptor: wrong magic")
    if version != VERSION:
        raise TransportError(f"endpoint descriptor has version {version}, this one reads {VERSION}")
    at = _HEAD.size
    name, at = _take(data, at, name_bytes)
    incarnation, at = _take(data, at, INCARNATION_BYTES)
    (count,) = _COUNT.unpack_from(data, at)
    at += _COUNT.size
    if count > MAX_REGIONS:
        raise TransportError(f"malformed endpoint descriptor: {count} regions")
    regions: dict[int, int] = {}
    for _ in range(count):
        region, size = _REGION.unpack_from(data, at)
        at += _REGION.size
        if region in regions or not 0 < size <= MAX_REGION_BYTES:
            raise TransportError("malformed endpoint descriptor: a region is twice or sized wrong")
        regions[region] = size
    (blob_bytes,) = _COUNT.unpack_from(data, at)
    blob, at = _take(data, at + _COUNT.size, blob_bytes)
    (crc,) = _COUNT.unpack_from(data, at)
    if at + _COUNT.size != len(data) or crc != zlib.crc32(data[:at]):
        raise TransportError("malformed endpoint descriptor: wrong length or checksum")
    return EndpointDescriptor(name.decode(), Incarnation(incarnation), regions, blob)


def _take(data: bytes, at: int, count: int) -> tuple[bytes, int]:
    if count > len(data) - at:
        raise TransportError("malformed endpoint descriptor: truncated")
    return data[at : at + count], at + count
