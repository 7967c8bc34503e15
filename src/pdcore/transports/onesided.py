"""A transport out of a vendor's engine of one-sided writes (:mod:`pdcore.transports.engines`).

The vendor's engine puts bytes where they belong, and nothing else of it is relied upon. What
the contract of :mod:`pdcore.transports.base` asks besides is done here:

- a side channel (onesided_side) for who is who, where regions lie, notifications, goodbyes and
  deaths: what the socket transport does, without its bytes;
- every submit is checked against regions and lease by the sender before byte 0 (G3), in
  offsets; addresses exist only between here and the vendor (D58);
- one thread a session (onesided_lane), which calls the vendor in bounded parts, with a time
  limit of our own above the vendor's (D23). Cancelled between two calls;
- a notification is sent when the last call has returned with all bytes in place (G1);
- a handle is quiesced when no call of it is running, and, where the vendor cannot say that a
  failed call's bytes have come to rest, after the time it declares (G2).

Revocation is SENDER_ACK where bytes land only while the sender is in a call: its quiesced mark
and its death are the fence. It is QUARANTINE where bytes that a dead sender left in the
vendor's or the kernel's buffers may land after it (``EngineLimits.lands_late_s``).
"""

from __future__ import annotations

import atexit
import os
import sys
import time
import weakref
from collections.abc import Sequence
from typing import Final

import attrs
import numpy as np

from pdcore.errors import TransportError
from pdcore.kv.plan import WriteBatch
from pdcore.transports.base import (
    Completion,
    DeviceBuffer,
    Notification,
    PeerDied,
    PeerSession,
    Region,
    RemoteLease,
    Revocation,
    TransportCaps,
    TransportEvent,
)
from pdcore.transports.descriptor import EndpointDescriptor, decode
from pdcore.transports.engines import Engine, EngineLimits
from pdcore.transports.onesided_memory import EngineMemory, kept_memory
from pdcore.transports.onesided_sender import Sender
from pdcore.transports.onesided_side import SideChannel, SideOptions
from pdcore.transports.regions import RegionTable
from pdcore.transports.socket_address import TCP
from pdcore.transports.socket_links import NoteCame
from pdcore.types import Incarnation, LeaseId

#: What a transport that nobody closed may take at the end of its process.
EXIT_TIMEOUT_S: Final = 1.0
#: What the goodbye gets when the vendor took all the time there was.
_LEAST_S: Final = 0.5


def caps_of(limits: EngineLimits, *, cross_host: bool) -> TransportCaps:
    """What a transport over an engine with these limits declares."""
    lands_late = limits.lands_late_s > 0
    return TransportCaps(
        one_sided=True,
        native_notify=True,
        revocation=Revocation.QUARANTINE if lands_late else Revocation.SENDER_ACK,
        submit_blocks=False,
        max_batch=limits.max_batch,
        alignment=limits.alignment,
        detects_peer_death=True,
        death_fences=not lands_late,
        quarantine_s=limits.lands_late_s,
        device_kinds=limits.device_kinds,
        cross_host=cross_host,
    )


class OneSidedTransport:
    """See :class:`pdcore.transports.base.Transport`. One thread uses it; one of its own keeps
    the side channel, and one per session writes. Takes the engine over, and closes it where
    this raises TransportError (addresses that cannot be used)."""

    def __init__(
        self,
        name: str,
        incarnation: Incarnation,
        engine: Engine,
        options: SideOptions,
        *,
        cross_host: bool = True,
    ) -> None:
        self.name = name
        self.incarnation = incarnation
        reaches = cross_host and TCP in options.families
        self.caps = caps_of(engine.limits, cross_host=reaches)
        self._engine = engine
        self._regions = RegionTable()
        self._memory = EngineMemory(engine, self._regions)
        try:
            self._side = SideChannel(incarnation, self._regions, options)
        except TransportError:
            engine.close()
            raise
        self._sender = Sender(name, engine, self._regions, self._side, options)
        self._closed = self._is_described = False
        #: Not all of it could be closed.
        self._is_stuck = False
        _living.add(self)

    def allocate(self, size_bytes: int) -> Region:
        _check_open(self._closed)
        return _published(self, self._memory.allocate(size_bytes))

    def register(self, buffer: memoryview | DeviceBuffer) -> Region:
        """Peers may be granted parts of it, unless it is read-only, or not whole pages where
        the engine opens memory by pages. Raises TransportError also for memory that is not
        aligned as the engine needs it."""
        _check_open(self._closed)
        return _published(self, self._memory.register(buffer))

    def deregister(self, region: Region) -> None:
        """Raises TransportError also where the engine does not let go of the memory, which
        then stays where it is for the life of this process."""
        _withdraw(self, region)
        if not self._closed:
            _publish(self)

    def descriptor(self) -> bytes:
        _check_open(self._closed)
        self._is_described = True
        _publish(self)
        home, regions = self._side.listen(), self._regions.targets()
        return EndpointDescriptor(self.name, self.incarnation, regions, home).encode()

    def connect(self, descriptor: bytes) -> PeerSession:
        _check_open(self._closed)
        return self._sender.connect(decode(descriptor, self.name))

    def disconnect(self, session: PeerSession) -> None:
        if not self._closed:
            self._sender.disconnect(session)

    def submit(
        self,
        session: PeerSession,
        batches: Sequence[WriteBatch],
        lease: RemoteLease,
        notify: bytes | None = None,
    ) -> int:
        _check_open(self._closed)
        return self._sender.submit(session, batches, lease, notify)

    def cancel(self, handle: int) -> None:
        self._sender.cancel(handle)

    def grant(self, lease: RemoteLease) -> None:
        self._regions.grant(lease)

    def revoke(self, lease: LeaseId) -> bool:
        """Senders are asked to stop. Only they can tell when nothing of it lands any more."""
        self._regions.revoke(lease)
        if not self._closed:
            self._side.revoke(lease)
        return False

    def release(self, lease: LeaseId) -> None:
        self._regions.release(lease)
        if not self._closed:
            self._side.release(lease)

    def poll(self) -> list[TransportEvent]:
        events: list[TransportEvent] = []
        for told in self._side.drain():
            if isinstance(told, Completion):
                self._sender.ended(told)
                events.append(told)
            elif isinstance(told, PeerDied):
                self._sender.lost(told)
                events.append(attrs.evolve(told, fenced=self.caps.death_fences))
            elif isinstance(told, NoteCame) and self._regions.granted(told.lease) is not None:
                events.append(Notification(told.incarnation, told.payload))
        return events

    def fileno(self) -> int | None:
        return None if self._closed else self._side.inbox.fileno()

    def close(self, timeout_s: float = 5.0) -> list[str]:
        """Handles that end here are still polled. A thread that the vendor does not let go is
        named in the result; it keeps the engine, the memory and the side channel, whose end
        would tell peers that nothing of this life lands any more. Closing again ends them, if
        it has come back."""
        if self._closed and not self._is_stuck:
            return []
        self._closed = True
        deadline = time.monotonic() + timeout_s
        left, self._is_stuck = self._sender.close(deadline)
        if self._is_stuck:
            return left
        try:
            self._engine.close()
        except TransportError as error:
            left.append(str(error))
            kept_memory.append(list(self._regions.arrays.values()))
        if not self._side.close(max(_LEAST_S, deadline - time.monotonic())):
            left.append("the thread of the side channel")
        self._regions.clear()
        return left


def _publish(transport: OneSidedTransport) -> None:
    """Nobody comes before there is a descriptor, and an engine that nobody writes to need not
    be one that could be. Raises TransportError."""
    if transport._is_described:
        transport._side.publish(*transport._memory.welcome())


def _published(transport: OneSidedTransport, region: Region) -> Region:
    """All or nothing: a region that peers cannot be told of is none. Raises TransportError."""
    try:
        _publish(transport)
    except TransportError:
        _withdraw(transport, region)
        raise
    return region


def _withdraw(transport: OneSidedTransport, region: Region) -> None:
    """No region, nor of the engine, as long as there is one (a thread inside it keeps it after
    close, too). Raises TransportError."""
    base, size_bytes = transport._memory.remove(region)
    if transport._closed and not transport._is_stuck:
        return
    try:
        transport._engine.unregister(base, size_bytes)
    except TransportError:
        kept_memory.append([np.frombuffer(region.buffer, np.uint8)])
        raise


def _check_open(closed: bool) -> None:
    if closed:
        raise TransportError("this transport is closed")


#: For forked children, which must hold none of the sockets, or their parent's end would not
#: show as the end of its connections; and have none of the vendor's threads.
_living: weakref.WeakSet[OneSidedTransport] = weakref.WeakSet()
_kept_in_child: list[OneSidedTransport] = []


def _abandon_all() -> None:
    for transport in list(_living):
        _kept_in_child.append(transport)
        if not transport._closed or transport._is_stuck:
            transport._closed, transport._is_stuck = True, False
            transport._side.abandon()


def _close_all() -> None:
    """At the end of the interpreter: a daemon thread that comes back from a vendor's code into
    an interpreter that is gone would abort the process."""
    for transport in list(_living):
        transport.close(EXIT_TIMEOUT_S)


atexit.register(_close_all)
if sys.platform == "linux":
    os.register_at_fork(after_in_child=_abandon_all)
