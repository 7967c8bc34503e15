"""Conformance checks: nothing is written that may not be, and rights end (G3, G4, G5)."""

from __future__ import annotations

import zlib

import numpy as np

from pdcore.errors import PeerGone, TransportError
from pdcore.kv.plan import WriteBatch
from pdcore.testing.transport_checks_data import MIB, expect, finish
from pdcore.testing.transport_harness import Pair, TransportHarness, make_batch, make_lease
from pdcore.testing.transport_watch import is_zero, pump, same, settle
from pdcore.transports.base import HandleStatus, PeerSession, RemoteLease, Revocation
from pdcore.types import LeaseId

BIG = (1 << 63) - 1


def refuse(pair: Pair, lease: RemoteLease, *batches: WriteBatch, why: str) -> None:
    """The submit is refused and wrote nothing."""
    before = zlib.crc32(pair.target.buffer)
    try:
        pair.submit(lease, *batches, notify=b"never")
    except PeerGone as error:
        raise AssertionError(f"{why}: the peer is not gone, it refused: {error}") from error
    except TransportError:
        pass
    else:
        raise AssertionError(f"{why} was accepted")
    settle(pair.sender, pair.receiver, quiet_s=0.0)
    assert zlib.crc32(pair.target.buffer) == before, f"{why} wrote something"
    assert not pair.receiver.record.notes
    assert not pair.sender.record.ended


def bounds_before_byte_0(harness: TransportHarness) -> None:
    """G3, D58: every descriptor that leaves a region is refused, 64-bit overflow included,
    and so is the good one beside it."""
    size = 1 << 16
    bad: list[tuple[int, ...]] = [
        (0, size - 8, 16),
        (size - 8, 0, 16),
        (size, 0, 1),
        (0, size, 1),
        (-1, 0, 16),
        (0, -1, 16),
        (0, 0, -16),
        (0, 0, size + 1),
        (0, 0, BIG),
        (BIG, 0, 1),
        (0, BIG, BIG),
        (8, 16, BIG),
        (0, 0, 16, -1, 16, 16),
        (0, 0, 16, 2, 8, 16),
        (0, 0, 16, 2, 16, 8),
        (0, 0, 16, 2, 16, -64),
        (0, 0, 16, 2, 16, size),
        (0, 0, 16, 3, size // 2, 16),
        (0, 0, 16, BIG, 16, 16),
        (0, 0, 16, (BIG >> 4) + 2, 16, 16),
        (0, 0, 2, 3, BIG, BIG),
        (0, 0, BIG, BIG, BIG, BIG),
    ]
    with Pair(harness, size) as pair:
        lease = pair.lease()
        for piece in bad:
            refuse(pair, lease, pair.batch((0, 0, 64), piece), why=f"descriptor {piece}")
        expect(pair.target, {})
        finish(pair, pair.submit(lease, pair.batch((0, 0, 64))))


def regions_must_be_known(harness: TransportHarness) -> None:
    """G3: a region id that was never published, or a foreign local one, is refused."""
    with Pair(harness) as pair:
        lease = pair.lease()
        rows = np.array([[0, 0, 16, 1, 0, 0]], np.int64)
        for local, remote in ((99, pair.target.region_id), (pair.source.region_id, 99)):
            batch = WriteBatch(local, remote, rows)
            refuse(pair, lease, batch, why=f"regions {local} -> {remote}")
        narrow = WriteBatch(pair.source.region_id, pair.target.region_id, rows[:, :3])
        refuse(pair, lease, narrow, why="descriptors of three columns")


def overlap_is_refused(harness: TransportHarness) -> None:
    """G3: no byte may be written twice by one submit; interleaved rows are no overlap."""
    with Pair(harness) as pair:
        lease = pair.lease()
        overlapping: list[list[tuple[int, ...]]] = [
            [(0, 0, 64), (64, 63, 64)],
            [(0, 100, 50), (200, 0, 101)],
            [(0, 0, 16), (512, 0, 16)],
            [(0, 0, 16, 8, 16, 64), (512, 40, 16, 8, 16, 24)],
            [(0, 0, 16, 8, 16, 64), (512, 64, 8)],
        ]
        for pieces in overlapping:
            refuse(pair, lease, pair.batch(*pieces), why=f"overlap of {pieces}")
        one, other = pair.batch((0, 0, 64)), pair.batch((128, 32, 64))
        refuse(pair, lease, one, other, why="overlap between two batches")


def lease_before_byte_0(harness: TransportHarness) -> None:
    """G3: a write outside the lease is refused whole; touching ranges count as one."""
    with Pair(harness) as pair:
        lease = pair.lease((64, 128), (128, 256), (512, 640))
        outside: list[tuple[int, ...]] = [
            (0, 0, 64),
            (0, 63, 2),
            (0, 255, 2),
            (0, 256, 256),
            (0, 64, 576),
            (0, 1024, 1),
            (0, 64, 16, 13, 16, 16),
            (0, 64, 16, 3, 16, 224),
        ]
        for piece in outside:
            refuse(pair, lease, pair.batch((0, 512, 8), piece), why=f"{piece} outside the lease")
        rows = (4096, 520, 8, 4, 8, 32)
        spanning = (0, 64, 192)
        finish(pair, pair.submit(lease, pair.batch(spanning, rows)))
        source = pair.source.buffer
        wanted = {(64, 256): bytes(source[:192])}
        for row in range(4):
            at, from_ = 520 + row * 32, 4096 + row * 8
            wanted[at, at + 8] = bytes(source[from_ : from_ + 8])
        expect(pair.target, wanted)


def malformed_leases(harness: TransportHarness) -> None:
    """A lease whose ranges are unsorted, overlapping, empty, or outside the region is
    refused by the sender, and cannot be granted."""
    ranges = [[(10, 5)], [(0, 16), (8, 24)], [(64, 80), (0, 16)], [(-4, 4)], [(0, 1 << 40)]]
    with Pair(harness) as pair:
        receiver = pair.receiver.transport
        for i, bad in enumerate(ranges):
            region = pair.target.region_id
            lease = make_lease(receiver.incarnation, 1000 + i, {region: bad})
            refuse(pair, lease, pair.batch((0, 0, 4)), why=f"lease {bad}")
            try:
                receiver.grant(lease)
            except TransportError:
                continue
            raise AssertionError(f"lease {bad} was granted")


def cancel_quiesces(harness: TransportHarness) -> None:
    """G2, G4: after the quiesced mark of a cancelled handle no byte lands, it is never
    notified, and nothing outside its lease changed."""
    size = 32 * MIB
    with Pair(harness, size) as pair:
        lease = pair.lease((MIB, size - MIB))
        piece = (MIB, MIB, size - 2 * MIB)
        handles = [pair.submit(lease, pair.batch(piece), notify=b"cancelled?") for _ in range(4)]
        for handle in handles:
            pair.sender.transport.cancel(handle)
        record = pair.sender.record
        pump(pair.sender, pair.receiver, until=lambda: record.quiesced >= set(handles))
        settle(pair.sender, pair.receiver, quiet_s=harness.quiet_s)
        after = zlib.crc32(pair.target.buffer)
        pair.source.buffer[:] = bytes(size)
        settle(pair.sender, pair.receiver, quiet_s=harness.quiet_s)
        assert zlib.crc32(pair.target.buffer) == after, "bytes landed after quiesced"
        cancelled = [h for h in handles if record.ended[h] is HandleStatus.CANCELLED]
        blocks = pair.sender.transport.caps.submit_blocks
        assert cancelled or blocks, "four transfers of 30 MiB ended before they were cancelled"
        notified = len(pair.receiver.record.notes)
        assert notified == len(handles) - len(cancelled), "a cancelled handle was notified"
        assert is_zero(pair.target.buffer[:MIB])
        assert is_zero(pair.target.buffer[size - MIB :])


def revoke_ends_writes(harness: TransportHarness) -> None:
    """Rule 1 and section 3 of the transports notes: RECEIVER_ENFORCED revokes at once;
    elsewhere ``revoke`` says that only the sender can tell."""
    size = 16 * MIB
    with Pair(harness, size) as pair:
        lease = pair.lease()
        handles = [pair.submit(lease, pair.batch((0, 0, size)), notify=b"n") for _ in range(3)]
        immediate = pair.receiver.transport.revoke(lease.lease)
        kind = pair.sender.transport.caps.revocation
        assert immediate == (kind is Revocation.RECEIVER_ENFORCED)
        at_revoke = zlib.crc32(pair.target.buffer)
        pump(pair.sender, pair.receiver, until=lambda: pair.sender.record.quiesced >= set(handles))
        if immediate:
            assert zlib.crc32(pair.target.buffer) == at_revoke, "bytes landed after revoke"
        if HandleStatus.DONE in pair.sender.record.ended.values():
            done = same(pair.target.buffer, pair.source.buffer)
            assert done, "a transfer was called DONE of which bytes are missing"
        settle(pair.sender, pair.receiver, quiet_s=harness.quiet_s)
        notes = len(pair.receiver.record.notes)
        settle(pair.sender, pair.receiver, quiet_s=harness.quiet_s)
        assert len(pair.receiver.record.notes) == notes
        assert pair.receiver.transport.revoke(lease.lease) == immediate
        pair.receiver.transport.release(lease.lease)


def release_ends_notifications(harness: TransportHarness) -> None:
    """A lease that was released, or never granted, wakes nobody up; where the receiver
    enforces leases it does not land either."""
    with Pair(harness) as pair:
        lease = pair.lease()
        pair.receiver.transport.release(lease.lease)
        pair.receiver.transport.release(lease.lease)
        unknown = RemoteLease(LeaseId(pair.receiver.transport.incarnation, 77), lease.ranges)
        handles = set()
        for late in (lease, unknown):
            try:
                handle = pair.submit(late, pair.batch((0, 0, 4096)), notify=b"late")
            except TransportError:
                continue
            handles.add(handle)
        record = pair.sender.record
        pump(pair.sender, pair.receiver, until=lambda: record.quiesced >= handles)
        settle(pair.sender, pair.receiver, quiet_s=harness.quiet_s)
        assert not pair.receiver.record.notes
        if pair.sender.transport.caps.revocation is Revocation.RECEIVER_ENFORCED:
            expect(pair.target, {})


def deregister_in_flight(harness: TransportHarness) -> None:
    """G5: a region under a lease or in a handle stays; afterwards it goes, once."""
    with Pair(harness, 16 * MIB) as pair:
        lease = pair.lease()
        handle = pair.submit(lease, pair.batch((0, 0, 16 * MIB)))
        sender, receiver = pair.sender.transport, pair.receiver.transport
        for transport, region in ((receiver, pair.target), (sender, pair.source)):
            if transport is sender and handle in pair.sender.record.quiesced:
                continue
            try:
                transport.deregister(region)
            except TransportError:
                continue
            raise AssertionError("deregister gave a region away that is in use")
        finish(pair, handle)
        receiver.release(lease.lease)
        receiver.deregister(pair.target)
        sender.deregister(pair.source)
        for transport, region in ((receiver, pair.target), (sender, pair.source)):
            try:
                transport.deregister(region)
            except TransportError:
                continue
            raise AssertionError("deregister accepted a region twice")


def disconnect_ends_handles(harness: TransportHarness) -> None:
    """G4 and rule 7: live handles fail and quiesce, later submits are refused with
    PeerGone, and disconnecting again is harmless."""
    size = 16 * MIB
    with Pair(harness, size) as pair:
        lease = pair.lease((0, size // 2))
        handles = [pair.submit(lease, pair.batch((0, 0, size // 2)), notify=b"n") for _ in range(4)]
        pair.sender.transport.disconnect(pair.session)
        pair.sender.transport.disconnect(pair.session)
        record = pair.sender.record
        pump(pair.sender, pair.receiver, until=lambda: record.quiesced >= set(handles))
        assert HandleStatus.CANCELLED not in record.ended.values()
        assert is_zero(pair.target.buffer[size // 2 :])
        unknown = PeerSession(10**6, pair.session.incarnation)
        for session in (pair.session, unknown):
            try:
                pair.sender.transport.submit(session, [pair.batch((0, 0, 1))], lease)
            except PeerGone:
                continue
            raise AssertionError("a closed session accepted a submit")
        pair.session = pair.sender.transport.connect(pair.receiver.transport.descriptor())
        finish(pair, pair.submit(lease, pair.batch((0, 0, 4096))))


def transfers_survive_changed_descriptors(harness: TransportHarness) -> None:
    """G3: what was checked is what is copied, though the caller reuses its array."""
    with Pair(harness) as pair:
        batch = make_batch(pair.source, pair.target, (0, 0, 4096))
        handle = pair.submit(pair.lease((0, 4096)), batch)
        batch.descriptors[:] = BIG
        finish(pair, handle)
        expect(pair.target, {(0, 4096): bytes(pair.source.buffer[:4096])})
