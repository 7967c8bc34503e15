"""The receiving half of the shm transport: our regions, who has them, what they may."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from pdcore.errors import TransportError
from pdcore.transports.base import DeviceBuffer, Notification, Region
from pdcore.transports.regions import RegionTable
from pdcore.transports.shm_attach import Attachable
from pdcore.transports.shm_door import Door
from pdcore.transports.shm_links import MAX_OUTBOX, Link, LinkSet
from pdcore.transports.shm_segment import Segment, create_segment
from pdcore.transports.shm_wire import Offer, SharedRegion, pack_revoke, unpack_lease
from pdcore.types import Incarnation, LeaseId


class Receiver:
    """Calls come from the owner's thread, but for ``_share``, which the door's calls."""

    def __init__(
        self,
        incarnation: Incarnation,
        regions: RegionTable,
        links: LinkSet,
        named_directory: str | None,
    ) -> None:
        self._incarnation = incarnation
        self._regions = regions
        self._links = links
        self._named_directory = named_directory
        self._segments: dict[int, Segment] = {}
        self._attachable = Attachable()
        #: Held while regions are handed over, and while they change.
        self._sharing = threading.Lock()
        self._door: Door | None = None

    def allocate(self, size_bytes: int) -> Region:
        segment = create_segment(size_bytes, self._incarnation, self._named_directory)
        region = self._regions.add(segment.buffer, target=True)
        with self._sharing:
            self._segments[region.region_id] = segment
        return region

    def register(self, buffer: memoryview | DeviceBuffer) -> Region:
        """Memory that is there already: peers may write it where it is writable."""
        region = self._regions.add(buffer, target=not buffer.readonly)
        if not buffer.readonly:
            address = int(self._regions.arrays[region.region_id].ctypes.data)
            try:
                with self._sharing:
                    self._attachable.add(region.region_id, address, region.size_bytes)
            except TransportError:
                self._regions.remove(region)
                raise
        return region

    def withdraw(self, region: Region) -> None:
        """No later peer gets it. The pages of a segment live until the last mapping is gone;
        registered memory, which may be used for anything now, nobody can write any more."""
        with self._sharing:
            self._attachable.remove(region.region_id)
            segment = self._segments.pop(region.region_id, None)
            if segment is not None:
                os.close(segment.fd)

    def address(self) -> bytes:
        if self._door is None:
            self._door = Door(self._incarnation, self._share, self._links.ring)
        return self._door.address.encode()

    def welcome(self) -> None:
        """Adopt the connections that the door answered."""
        if self._door is not None:
            for arrival in self._door.arrivals():
                link = Link(arrival.sock, arrival.incarnation, arrival.process)
                self._links.add(link, arrival.pidfd)
                for lease in self._regions.revoked():
                    self._links.send(link, pack_revoke(lease))

    def revoke(self, lease: LeaseId) -> None:
        """Tell every sender to stop; only they can say when they did. One that has been stopped
        for so long that much waits for it had its leases before: it hears of those."""
        self._regions.revoke(lease)
        self.welcome()
        for link in self._links.links():
            if len(link.outbox) < MAX_OUTBOX:
                self._links.send(link, pack_revoke(lease))

    def notified(self, link: Link, body: bytes) -> Notification | None:
        """A wake-up for a lease that is over, or never was, wakes nobody."""
        lease, payload = unpack_lease(body)
        if self._regions.granted(lease) is None:
            return None
        return Notification(link.incarnation, payload)

    def close(self, timeout_s: float) -> list[str]:
        left = []
        if self._door is not None and not self._door.close(timeout_s):
            left.append("the thread that answers connections")
        # Those who were answered but never polled for must hear of the end, too.
        self.welcome()
        self._door = None
        with self._sharing:
            for segment in self._segments.values():
                os.close(segment.fd)
            self._segments.clear()
            self._attachable.close()
        return left

    def abandon(self) -> None:
        """In a forked child: close the descriptors that are copies of the parent's."""
        if self._door is not None:
            self._door.abandon()
        for segment in self._segments.values():
            os.close(segment.fd)

    def _share(self, hand_over: Callable[[Offer], None]) -> None:
        with self._sharing:
            shared = [
                (SharedRegion(region_id, s.size_bytes, s.offset, s.sealed), s.fd)
                for region_id, s in sorted(self._segments.items())
            ]
            hand_over(Offer(shared, self._attachable.regions(), self._attachable.key))
