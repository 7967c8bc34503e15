"""Conformance checks: identity and closing (G6, G7)."""

from __future__ import annotations

import os
import time

from pdcore.errors import PeerGone, TransportError
from pdcore.testing.transport_checks_data import MIB, finish
from pdcore.testing.transport_checks_growth import CALL_LIMIT_S, refused
from pdcore.testing.transport_harness import Pair, TransportHarness
from pdcore.testing.transport_watch import is_zero, pump
from pdcore.transports.descriptor import EndpointDescriptor, decode
from pdcore.types import Incarnation


def foreign_descriptors(harness: TransportHarness) -> None:
    """G6: another transport's, another version's, another incarnation's descriptor, and
    one of a transport that is closed, are refused within a bounded time."""
    with Pair(harness) as pair:
        good = pair.receiver.transport.descriptor()
        mine = decode(good, pair.receiver.transport.name)
        stranger = Incarnation(os.urandom(16))
        other = EndpointDescriptor("other", mine.incarnation, mine.regions, mine.blob)
        moved = EndpointDescriptor(mine.transport, stranger, mine.regions, mine.blob)
        larger = {region: size + 1 for region, size in mine.regions.items()}
        grown = EndpointDescriptor(mine.transport, mine.incarnation, larger, mine.blob)
        extra = EndpointDescriptor(
            mine.transport, mine.incarnation, {**mine.regions, 4000: 64}, mine.blob
        )
        newer = bytearray(good)
        newer[4] += 1
        refused(pair.sender, other.encode(), "another transport")
        refused(pair.sender, moved.encode(), "another incarnation")
        refused(pair.sender, grown.encode(), "a region of another size")
        refused(pair.sender, extra.encode(), "a region that does not exist")
        refused(pair.sender, bytes(newer), "another version")
        gone = harness.create()
        gone.allocate(4096)
        stale = gone.descriptor()
        gone.close()
        refused(pair.sender, stale, "a closed transport")
        finish(pair, pair.submit(pair.lease(), pair.batch((0, 0, 64))))


def close_is_idempotent(harness: TransportHarness) -> None:
    """G7: closing with transfers in flight is bounded; closing again does nothing; every
    later call is refused or harmless; the peer learns of it."""
    pair = Pair(harness, 16 * MIB)
    try:
        lease = pair.lease()
        handles = [pair.submit(lease, pair.batch((0, 0, 16 * MIB))) for _ in range(8)]
        started = time.monotonic()
        left = pair.sender.transport.close()
        took = time.monotonic() - started
        assert took < CALL_LIMIT_S, f"close took {took:.1f} s"
        assert not left, f"close left {left}"
        assert pair.sender.transport.close() == []
        pair.sender.poll()
        assert pair.sender.record.quiesced == set(handles)
        pair.sender.transport.cancel(handles[0])
        pair.sender.transport.disconnect(pair.session)
        pair.sender.transport.release(lease.lease)
        assert not pair.sender.poll()
        for refusal in (
            lambda: pair.submit(lease, pair.batch((0, 0, 1))),
            lambda: pair.sender.transport.allocate(64),
            lambda: pair.sender.transport.connect(pair.receiver.transport.descriptor()),
        ):
            try:
                refusal()
            except TransportError:
                continue
            raise AssertionError("a closed transport accepted a call")
        gone = pair.sender.transport.incarnation
        pump(
            pair.receiver,
            until=lambda: [death.incarnation for death in pair.receiver.record.deaths] == [gone],
            what="news that the sender closed",
        )
    finally:
        pair.sender.transport.close()
        pair.receiver.transport.close()


def receiver_closes(harness: TransportHarness) -> None:
    """The sender of a receiver that closed ends its handles and gets PeerGone."""
    with Pair(harness, 4 * MIB) as pair:
        lease = pair.lease()
        handles = [pair.submit(lease, pair.batch((0, 0, 4 * MIB))) for _ in range(4)]
        pair.receiver.transport.close()
        record = pair.sender.record
        pump(pair.sender, until=lambda: bool(record.deaths) and record.quiesced >= set(handles))
        try:
            pair.submit(lease, pair.batch((0, 0, 64)))
        except PeerGone:
            return
        raise AssertionError("a submit to a closed receiver was accepted")


def buffers_outlive_close(harness: TransportHarness) -> None:
    """Closing under live views is safe: whoever still holds a buffer may use it."""
    pair = Pair(harness)
    lease = pair.lease()
    finish(pair, pair.submit(lease, pair.batch((0, 0, 4096))))
    source, target = pair.source.buffer, pair.target.buffer
    pair.receiver.transport.close()
    pair.sender.transport.close()
    assert target[:4096] == source[:4096]
    source[:] = bytes(len(source))
    target[:] = bytes(len(target))
    assert is_zero(source)
    assert is_zero(target)


def too_much_memory(harness: TransportHarness) -> None:
    """``allocate`` of more than there is raises TransportError; it neither waits for the
    first touch (SIGBUS) nor takes the machine down."""
    transport = harness.create()
    try:
        for size in (0, -1, 1 << 50, 1 << 70):
            try:
                transport.allocate(size)
            except TransportError:
                continue
            raise AssertionError(f"allocate({size}) was accepted")
        transport.allocate(4096)
    finally:
        transport.close()
