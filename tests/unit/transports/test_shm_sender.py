from __future__ import annotations

import gc
import sys
from collections import Counter
from pathlib import Path

import pytest

from pdcore.errors import PeerGone, TransportError
from pdcore.testing.transport_harness import Pair, RegistryHarness
from pdcore.testing.transport_watch import pump, same
from pdcore.transports import shm_sender
from pdcore.transports.base import HandleStatus, RemoteLease
from pdcore.transports.descriptor import EndpointDescriptor, decode
from pdcore.transports.shm_links import MAX_OUTBOX
from pdcore.transports.shm_wire import MAX_PAYLOAD_BYTES, Address, decode_address
from tests.unit.transports.residency import resident_shared

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shm is Linux")
MIB = 1 << 20


@pytest.fixture
def harness() -> RegistryHarness:
    return RegistryHarness("shm")


def test_small_transfers_are_over_when_submit_returns(harness: RegistryHarness) -> None:
    with Pair(harness) as pair:
        pair.submit(pair.lease(), pair.batch((0, 0, 4096)))
        assert same(pair.target.buffer[:4096], pair.source.buffer[:4096])
        assert pair.sender.poll() == 1


def test_the_rest_of_a_long_transfer_is_the_movers(
    harness: RegistryHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``submit_blocks`` is False: with no time at all, one chunk is copied in submit."""
    monkeypatch.setattr(shm_sender, "INLINE_S", 0.0)
    with Pair(harness, 16 * MIB) as pair:
        handle = pair.submit(pair.lease(), pair.batch((0, 0, 16 * MIB)), notify=b"n")
        small = pair.submit(pair.lease(), pair.batch((0, 0, 1)), notify=b"m")
        record = pair.sender.record
        pump(pair.sender, pair.receiver, until=lambda: len(pair.receiver.record.notes) == 2)
        assert pair.receiver.record.payloads == [b"n", b"m"]
        assert record.quiesced == {handle, small}
        assert same(pair.target.buffer, pair.source.buffer)


def test_a_revoked_lease_stops_the_copy_and_refuses_the_next(
    harness: RegistryHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SENDER_ACK: the receiver can only ask; the sender's own completions are the answer."""
    monkeypatch.setattr(shm_sender, "INLINE_S", 0.0)
    with Pair(harness, 64 * MIB) as pair:
        lease = pair.lease()
        handles = {pair.submit(lease, pair.batch((0, 0, 64 * MIB))) for _ in range(8)}
        assert not pair.receiver.transport.revoke(lease.lease)
        record = pair.sender.record
        pump(pair.sender, until=lambda: record.quiesced == handles)
        assert HandleStatus.FAILED in record.ended.values()
        with pytest.raises(TransportError, match="revoked"):
            pair.submit(lease, pair.batch((0, 0, 1)))


def is_refused(pair: Pair, lease: RemoteLease, number: int) -> bool:
    try:
        pair.submit(lease, notify=b"%d" % number)
    except TransportError as error:
        return "has not read" in str(error)
    return False


def test_notifications_are_bounded(harness: RegistryHarness) -> None:
    """A peer that never reads is refused in the end, before byte 0; when it reads again
    everything that was accepted comes, in order."""
    with Pair(harness) as pair:
        lease = pair.lease()
        with pytest.raises(TransportError, match="at most"):
            pair.submit(lease, notify=b"x" * (MAX_PAYLOAD_BYTES + 1))
        accepted = 0
        while accepted < MAX_OUTBOX or not is_refused(pair, lease, accepted):
            if accepted < MAX_OUTBOX:
                pair.submit(lease, notify=b"%d" % accepted)
            accepted += 1
            assert accepted < 3 * MAX_OUTBOX
        pump(
            pair.sender,
            pair.receiver,
            until=lambda: len(pair.receiver.record.notes) == accepted,
        )
        assert pair.receiver.record.payloads == [b"%d" % i for i in range(accepted)]


def mapped() -> dict[str, int]:
    """Mappings of each segment, by inode: what other tests leave to the garbage collector
    goes away at any time, and a bare count would be off by it."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return Counter(line.split()[4] for line in lines if "memfd:pdcore-kv" in line)


def test_the_memory_of_a_gone_peer_is_unmapped(harness: RegistryHarness) -> None:
    """Public report vllm #58063: mappings of a peer that is gone keep its memory for ever,
    and its replacement finds none."""
    before = mapped()
    pair = Pair(harness, MIB)
    lease = pair.lease()
    handle = pair.submit(lease, pair.batch((0, 0, MIB)))
    pump(pair.sender, pair.receiver, until=lambda: handle in pair.sender.record.quiesced)
    ours = mapped().keys() - before.keys()
    assert sorted(mapped()[inode] for inode in ours) == [1, 2], "one is mapped by its peer too"
    pair.receiver.transport.close()
    pump(pair.sender, until=lambda: bool(pair.sender.record.deaths))
    gc.collect()
    left = [mapped()[inode] for inode in ours]
    assert left == [1, 1], "our view of the target should be all that is left"
    with pytest.raises(PeerGone):
        pair.submit(lease, pair.batch((0, 0, 1)))
    pair.sender.transport.close()


def test_copying_through_a_large_pool_keeps_the_sender_small() -> None:
    """The resident set of a prefill worker stays what it is: it does not take in the pool
    of each decode peer, neither on connecting nor after many transfers."""
    pool, limit = 64 * MIB, 8 * MIB
    with Pair(RegistryHarness("shm", peer_resident_bytes=limit), pool) as pair:
        lease = pair.lease()
        # Both pools are allocated, hence resident, in this process.
        before = resident_shared()
        pair.submit(lease, pair.batch((0, 0, pool)))
        for at in range(0, pool, 2 * MIB):
            pair.submit(lease, pair.batch((at, at, 2 * MIB)))
        record = pair.sender.record
        pump(pair.sender, until=lambda: len(record.quiesced) == 1 + pool // (2 * MIB))
        assert resident_shared() - before <= limit + 2 * MIB
        assert same(pair.target.buffer, pair.source.buffer)
    with Pair(RegistryHarness("shm"), pool) as pair:
        before = resident_shared()
        handle = pair.submit(pair.lease(), pair.batch((0, 0, pool)))
        pump(pair.sender, until=lambda: handle in pair.sender.record.quiesced)
        assert resident_shared() - before >= pool - 2 * MIB, "without a limit it would"


def test_another_host_is_refused(harness: RegistryHarness) -> None:
    with Pair(harness) as pair:
        found = decode(pair.receiver.transport.descriptor(), "shm")
        address = decode_address(found.blob)
        elsewhere = Address(bytes(16), address.process, address.name)
        moved = EndpointDescriptor("shm", found.incarnation, found.regions, elsewhere.encode())
        with pytest.raises(TransportError, match="another host"):
            pair.sender.transport.connect(moved.encode())
        nobody = Address(address.boot_id, address.process, b"\0pdcore-nobody")
        gone = EndpointDescriptor("shm", found.incarnation, found.regions, nobody.encode())
        with pytest.raises(PeerGone):
            pair.sender.transport.connect(gone.encode())


def test_new_regions_need_a_new_connection(harness: RegistryHarness) -> None:
    """What was allocated after the handshake is not mapped; the message says what to do."""
    with Pair(harness) as pair:
        pair.target = pair.receiver.transport.allocate(4096)
        with pytest.raises(TransportError, match="current descriptor"):
            pair.submit(pair.lease(), pair.batch((0, 0, 1)))
        pair.session = pair.sender.transport.connect(pair.receiver.transport.descriptor())
        pair.submit(pair.lease(), pair.batch((0, 0, 1)))
