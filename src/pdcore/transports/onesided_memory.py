"""The memory of a transport over a vendor's engine: as the engine needs it, and no more of it
open to peers than was registered."""

from __future__ import annotations

from typing import Final

import numpy as np

from pdcore.errors import TransportError
from pdcore.transports.base import DeviceBuffer, Region
from pdcore.transports.copy import ByteArray
from pdcore.transports.engines import CPU, Engine
from pdcore.transports.onesided_chunks import Welcome, base_of
from pdcore.transports.regions import RegionTable, zeroed_pages

#: What a vendor does not let go of stays where it is for the life of this process: whoever writes
#: to it yet writes to nobody else's.
kept_memory: Final[list[list[ByteArray]]] = []


class StillRegistered(TransportError):
    """``Engine.register`` failed, and the vendor has the memory all the same."""


class EngineMemory:
    """Regions, and what the engine knows of them. Everything raises TransportError."""

    def __init__(self, engine: Engine, regions: RegionTable) -> None:
        self._engine = engine
        self._regions = regions
        #: region id -> the bytes that the engine knows there.
        self._entered: dict[int, int] = {}

    def allocate(self, size_bytes: int) -> Region:
        """Aligned, and in pages of its own where the engine opens memory by pages."""
        limits = self._engine.limits
        self._check_host()
        page = limits.target_page
        whole = zeroed_pages(-(-size_bytes // page) * page, max(page, limits.alignment))
        return self._add(whole[:size_bytes], whole.nbytes, target=True)

    def register(self, buffer: memoryview | DeviceBuffer) -> Region:
        """A target unless it is read-only, or shares pages that the engine would open."""
        page = self._engine.limits.target_page
        if isinstance(buffer, memoryview):
            self._check_host()
            target = not buffer.readonly and (page == 1 or _is_whole(buffer, page))
            return self._add(buffer, buffer.nbytes, target=target)
        if self._engine.limits.device_kinds == (CPU,):
            return self._regions.add(buffer, target=False)  # says why not
        is_whole = buffer.address % page == 0 and buffer.size_bytes % page == 0
        region = self._regions.add_device(buffer, target=is_whole and not buffer.readonly)
        return self._enter(region, buffer.size_bytes)

    def _check_host(self) -> None:
        kinds = self._engine.limits.device_kinds
        if CPU not in kinds:
            raise TransportError(
                f"memory of this transport is that of a device ({', '.join(kinds)}): let the "
                "engine allocate it, and register it as a DeviceBuffer"
            )

    def remove(self, region: Region) -> tuple[int, int]:
        """It is a region no more; where the engine still knows it, and how many bytes."""
        array = self._regions.arrays.get(region.region_id)
        base = 0 if array is None else base_of(array)
        self._regions.remove(region)
        return base, self._entered.pop(region.region_id)

    def welcome(self) -> tuple[dict[int, int], bytes]:
        """Target regions, and what a sender is told of them."""
        targets = self._regions.targets()
        bases = {region: base_of(self._regions.arrays[region]) for region in targets}
        return targets, Welcome(bases, self._engine.address()).encode()

    def _add(self, buffer: memoryview, entered_bytes: int, *, target: bool) -> Region:
        return self._enter(self._regions.add(buffer, target=target), entered_bytes)

    def _enter(self, region: Region, entered_bytes: int) -> Region:
        """Tell the engine. A region that it does not take is none."""
        base = base_of(self._regions.arrays[region.region_id])
        try:
            alignment = self._engine.limits.alignment
            if base % alignment:
                raise TransportError(f"memory must be aligned to {alignment} bytes: use allocate")
            self._engine.register(base, entered_bytes)
        except TransportError as error:
            if isinstance(error, StillRegistered):
                kept_memory.append([self._regions.arrays[region.region_id]])
            self._regions.remove(region)
            raise
        self._entered[region.region_id] = entered_bytes
        return region


def _is_whole(buffer: memoryview, page: int) -> bool:
    if not buffer.c_contiguous or buffer.nbytes % page:
        return False
    return buffer.nbytes > 0 and base_of(np.frombuffer(buffer, np.uint8)) % page == 0
