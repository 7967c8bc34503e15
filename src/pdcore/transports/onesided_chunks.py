"""A checked plan as calls of an engine: addresses instead of offsets, a bounded part at a time.

Addresses exist between here and the vendor only. The API knows offsets into regions; where
a peer's regions begin, its welcome says (:class:`Welcome`), which is checked like anything
that comes from outside.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import Final

import attrs
import numpy as np

from pdcore.errors import TransportError
from pdcore.kv.plan import Int64Array
from pdcore.transports.check import CopyPlan, expand_rows
from pdcore.transports.copy import cut_pieces
from pdcore.transports.descriptor import MAX_REGIONS

#: What one call moves at most: a cancel waits for one call.
CHUNK_BYTES: Final = 8 << 20
MAX_ADDRESS_BYTES: Final = 1 << 16
#: Ends of regions stay below this, so that sums of addresses and lengths fit an int64.
_END_OF_MEMORY: Final = 1 << 62

_MAGIC: Final = b"PDOS"
_HEAD: Final = struct.Struct("<4sBI")
_BASE: Final = struct.Struct("<IQ")
_VERSION: Final = 1


@attrs.frozen
class Welcome:
    """What a receiver tells a sender besides its regions: where they begin (region id to
    address), and what the sender's engine needs to reach its own."""

    bases: dict[int, int]
    address: bytes = attrs.field(repr=False)

    def encode(self) -> bytes:
        """Raises TransportError for an address that is too long."""
        if len(self.address) > MAX_ADDRESS_BYTES:
            raise TransportError(
                f"the engine's address has {len(self.address)} bytes, at most {MAX_ADDRESS_BYTES}"
            )
        rows = b"".join(_BASE.pack(*item) for item in self.bases.items())
        return _HEAD.pack(_MAGIC, _VERSION, len(self.bases)) + rows + self.address


def decode_welcome(data: bytes, sizes: Mapping[int, int]) -> Welcome:
    """``sizes``: the peer's regions in bytes. Raises TransportError for anything malformed,
    and unless each of them has a place in memory."""
    if len(data) < _HEAD.size:
        raise TransportError("the peer does not say where its memory is: another transport?")
    magic, version, count = _HEAD.unpack_from(data)
    if magic != _MAGIC or version != _VERSION:
        raise TransportError(f"the peer's welcome is of another version ({magic!r}, {version})")
    end = _HEAD.size + count * _BASE.size
    if count > MAX_REGIONS or not end <= len(data) <= end + MAX_ADDRESS_BYTES:
        raise TransportError("the peer's welcome is malformed: truncated, or too long")
    bases = dict(_BASE.iter_unpack(data[_HEAD.size : end]))
    for region, size in sizes.items():
        base = bases.get(region, 0)
        if not 0 < base <= _END_OF_MEMORY - size:
            raise TransportError(f"the peer's welcome is malformed: region {region} lies nowhere")
    return Welcome({region: bases[region] for region in sizes}, data[end:])


@attrs.frozen(eq=False)
class Chunk:
    """One call of an engine; arrays of equal length (int64), none of the lengths 0."""

    local: Int64Array
    remote: Int64Array
    lengths: Int64Array


def cut(
    plan: CopyPlan,
    local: Mapping[int, int],
    remote: Mapping[int, int],
    max_rows: int,
    max_bytes: int,
) -> Iterator[Chunk]:
    """``local`` and ``remote``: where the regions begin. Rows longer than ``max_bytes`` are
    cut; a chunk holds at most ``max_rows`` of them and ``max_bytes``."""
    for pair in plan.pairs:
        start, into, width = cut_pieces(expand_rows(pair.pieces), max_bytes)
        start = start + local[pair.local_region]
        into = into + remote[pair.remote_region]
        done = np.cumsum(width)
        at, moved = 0, 0
        while at < len(width):
            end = int(np.searchsorted(done, moved + max_bytes, side="right"))
            end = min(end, at + max_rows)
            yield Chunk(start[at:end], into[at:end], width[at:end])
            at, moved = end, int(done[end - 1])


def base_of(array: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> int:
    """Where a registered buffer begins."""
    return int(array.ctypes.data)
