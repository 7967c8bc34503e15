"""The memory one transport has registered, and who may still touch it.

A region has two kinds of holders: leases (granted to peers, they write it) and pins
(handles of our own that read or write it). ``remove`` refuses while there is any (G5).
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

import attrs
import numpy as np

from pdcore.errors import TransportError
from pdcore.transports.base import DeviceBuffer, Region, RemoteLease
from pdcore.transports.check import MAX_REGION_BYTES, check_lease
from pdcore.transports.copy import ByteArray
from pdcore.transports.shm_segment import FEWER_BLOCKS, available_bytes
from pdcore.types import LeaseId

_FEW_RANGES: Final = 16
#: Addresses and sums of them fit an int64.
_LAST_ADDRESS: Final = 1 << 62


@attrs.define
class _Grant:
    lease: RemoteLease
    revoked: bool = False


def is_plainly_sound(lease: RemoteLease, sizes: Mapping[int, int]) -> bool:
    """Whether a lease of a few ranges is what :func:`check_lease` asks for, told without
    arrays: a handshake of one run of blocks waits for it. False: ask that one."""
    for region, ranges in lease.ranges.items():
        if len(ranges) > _FEW_RANGES or ranges.dtype != np.int64 or ranges.shape[1:] != (2,):
            return False
        reach = 0
        for start, end in ranges.tolist():
            if not reach <= start < end:
                return False
            reach = end
        if region not in sizes or reach > sizes[region]:
            return False
    return True


class RegionTable:
    """``arrays`` and ``sizes`` are by region id, for checks and copies; read only."""

    def __init__(self) -> None:
        self.arrays: dict[int, ByteArray] = {}
        self.sizes: dict[int, int] = {}
        self._ids = itertools.count(1)
        self._regions: dict[int, Region] = {}
        self._targets: set[int] = set()
        self._pins: Counter[int] = Counter()
        self._grants: dict[LeaseId, _Grant] = {}

    def add(self, buffer: memoryview | DeviceBuffer, *, target: bool) -> Region:
        """``target``: peers may be granted parts of it. Raises TransportError unless the
        buffer is contiguous, not empty, and writable where it is a target; and for a device's
        memory: who can move it calls :meth:`add_device`."""
        if isinstance(buffer, DeviceBuffer):
            raise TransportError(
                "this transport moves memory of its process only, not that of a device: use one "
                "whose device_kinds name it (nixl with mem_type VRAM, mooncake with protocol "
                "ascend, memfabric), or copy to the host first"
            )
        if not buffer.c_contiguous or buffer.nbytes == 0 or buffer.nbytes > MAX_REGION_BYTES:
            raise TransportError(
                f"a region must be contiguous and hold 1 to {MAX_REGION_BYTES} bytes, "
                f"got {buffer.nbytes}"
            )
        if target and buffer.readonly:
            raise TransportError("a region that peers write must be writable")
        flat = buffer.cast("B")
        return self._add(flat, np.frombuffer(flat, np.uint8), target=target)

    def add_device(self, buffer: DeviceBuffer, *, target: bool) -> Region:
        """Memory that only a device can read and write: its array says where it lies, and
        ends the process that looks into it. Raises TransportError for a place that is none."""
        address, size_bytes = buffer.address, buffer.size_bytes
        if not 0 < size_bytes <= MAX_REGION_BYTES or not 0 < address <= _LAST_ADDRESS - size_bytes:
            raise TransportError(
                f"no region of a device: {size_bytes} bytes at {address:#x}; give a tensor's "
                f"data_ptr() and nbytes, 1 to {MAX_REGION_BYTES} bytes"
            )
        items = memoryview((ctypes.c_ubyte * size_bytes).from_address(address))
        return self._add(memoryview(b""), np.frombuffer(items, np.uint8), target=target)

    def _add(self, buffer: memoryview, array: ByteArray, *, target: bool) -> Region:
        region = Region(next(self._ids), array.nbytes, buffer)
        self._regions[region.region_id] = region
        self.arrays[region.region_id] = array
        self.sizes[region.region_id] = array.nbytes
        if target:
            self._targets.add(region.region_id)
        return region

    def remove(self, region: Region) -> None:
        """Raises TransportError for a region that is unknown, leased or in flight."""
        region_id = region.region_id
        if self._regions.get(region_id) is not region:
            raise TransportError(f"region {region_id} is not registered here")
        leases = [grant.lease for grant in self._grants.values() if region_id in grant.lease.ranges]
        if leases:
            raise TransportError(
                f"region {region_id} is under {len(leases)} lease(s), for one {leases[0].lease}: "
                "release them before deregister"
            )
        if self._pins[region_id]:
            raise TransportError(
                f"region {region_id} is used by {self._pins[region_id]} transfer(s) in flight: "
                "wait until they are quiesced before deregister"
            )
        del self._regions[region_id], self.arrays[region_id], self.sizes[region_id]
        self._targets.discard(region_id)

    def targets(self) -> dict[int, int]:
        """Region id to bytes, of what peers may be granted."""
        return {region_id: self.sizes[region_id] for region_id in sorted(self._targets)}

    def pin(self, region_ids: Iterable[int]) -> None:
        for region_id in region_ids:
            self._pins[region_id] += 1

    def unpin(self, region_ids: Iterable[int]) -> None:
        for region_id in region_ids:
            self._pins[region_id] -= 1
            if not self._pins[region_id]:
                del self._pins[region_id]

    def grant(self, lease: RemoteLease) -> None:
        """Raises TransportError for ranges outside our target regions, and for a lease id
        that was used before and not yet released (ids are fresh, rule 1)."""
        if lease.lease in self._grants:
            raise TransportError(f"{lease.lease} is granted already; lease ids are used once")
        targets = self.targets()
        if not is_plainly_sound(lease, targets):
            check_lease(lease, targets)
        self._grants[lease.lease] = _Grant(lease)

    def revoke(self, lease: LeaseId) -> None:
        grant = self._grants.get(lease)
        if grant is not None:
            grant.revoked = True

    def release(self, lease: LeaseId) -> None:
        self._grants.pop(lease, None)

    def granted(self, lease: LeaseId) -> RemoteLease | None:
        """The lease while it is granted and not revoked."""
        grant = self._grants.get(lease)
        return None if grant is None or grant.revoked else grant.lease

    def revoked(self) -> list[LeaseId]:
        """Leases that were revoked and are not released yet."""
        return [lease for lease, grant in self._grants.items() if grant.revoked]

    def clear(self) -> None:
        """Let go of everything at the end: memory lives on only under others' views."""
        for table in (self.arrays, self.sizes, self._regions, self._pins, self._grants):
            table.clear()
        self._targets.clear()

    def __repr__(self) -> str:
        return (
            f"RegionTable(regions={len(self._regions)}, leases={len(self._grants)}, "
            f"pins={sum(self._pins.values())})"
        )


def zeroed_pages(size_bytes: int, alignment: int = 1) -> memoryview:
    """Memory of our own, every page of it there, that begins at a multiple of ``alignment``.
    Raises TransportError when there is not that much."""
    if size_bytes <= 0:
        raise TransportError(f"size_bytes must be positive, got {size_bytes}")
    room = 0 if alignment <= mmap.PAGESIZE else alignment
    if size_bytes + room > (free := available_bytes()):
        raise TransportError(
            f"not enough memory: {size_bytes} bytes wanted, {free} available; {FEWER_BLOCKS}"
        )
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
    try:
        pages = memoryview(mmap.mmap(-1, size_bytes + room, flags))
    except OSError as error:
        raise TransportError(
            f"cannot map {size_bytes} bytes: {error.strerror}; {FEWER_BLOCKS}"
        ) from error
    start = -np.frombuffer(pages, np.uint8).ctypes.data % alignment
    return pages[start : start + size_bytes]
