from __future__ import annotations

import os
import select

import pytest

from pdcore.errors import PeerGone, TransportError
from pdcore.testing.transport_harness import make_batch, make_lease
from pdcore.transports.base import (
    Completion,
    HandleStatus,
    Notification,
    PeerDied,
    Region,
    RemoteLease,
    Revocation,
)
from pdcore.transports.loopback import LoopbackTransport, loopback_caps
from pdcore.transports.loopback_fabric import LoopbackFabric
from pdcore.types import Incarnation

ALL = bytes(range(256))


class World:
    """A stepped fabric with one sender and one receiver of four 64-byte chunks."""

    def __init__(self, revocation: Revocation = Revocation.SENDER_ACK) -> None:
        self.fabric = LoopbackFabric(stepped=True, chunk_bytes=64)
        self.sender = self.transport(revocation)
        self.receiver = self.transport(revocation, "decode:0")
        self.source = self.sender.allocate(256)
        self.source.buffer[:] = ALL
        self.target = self.receiver.allocate(256)
        self.session = self.sender.connect(self.receiver.descriptor())
        self.faults = self.fabric.faults(self.sender.incarnation)
        self.leases = 0

    def transport(self, revocation: Revocation, address: str = "") -> LoopbackTransport:
        incarnation = Incarnation(os.urandom(16))
        return LoopbackTransport(incarnation, self.fabric, revocation=revocation, address=address)

    def lease(self) -> RemoteLease:
        self.leases += 1
        region = self.target.region_id
        lease = make_lease(self.receiver.incarnation, self.leases, {region: [(0, 256)]})
        self.receiver.grant(lease)
        return lease

    def submit(self, lease: RemoteLease | None = None, notify: bytes | None = b"n") -> int:
        batch = make_batch(self.source, self.target, (0, 0, 256))
        return self.sender.submit(self.session, [batch], lease or self.lease(), notify)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.fabric.step()

    def drain(self) -> None:
        while self.fabric.step():
            pass


def chunks(target: Region) -> int:
    """How many of the four chunks are in place."""
    return sum(bytes(target.buffer[i : i + 64]) == ALL[i : i + 64] for i in range(0, 256, 64))


def test_a_step_moves_one_chunk() -> None:
    world = World()
    handle = world.submit()
    assert chunks(world.target) == 0
    for done in (1, 2, 3, 4):
        action = world.fabric.step()
        assert action is not None
        assert (action.kind, action.handle) == ("move", handle)
        assert chunks(world.target) == done
        assert world.sender.poll() == []
    world.steps(1)
    assert world.sender.poll() == [Completion(handle, HandleStatus.DONE, True)]
    assert world.receiver.poll() == []
    world.steps(1)
    assert world.receiver.poll() == [Notification(world.sender.incarnation, b"n")]
    assert world.fabric.step() is None


def test_poll_moves_everything_unless_stepped() -> None:
    world = World()
    world.fabric.stepped = False
    handle = world.submit()
    assert world.receiver.poll() == [Notification(world.sender.incarnation, b"n")]
    assert world.sender.poll() == [Completion(handle, HandleStatus.DONE, True)]


def test_delay_counts_steps_or_polls() -> None:
    world = World()
    world.faults.delay = 3
    world.submit()
    world.steps(3)
    assert chunks(world.target) == 0
    world.steps(1)
    assert chunks(world.target) == 1
    world.fabric.stepped = False
    world.faults.delay = 2
    world.sender.poll()
    world.sender.poll()
    assert chunks(world.target) == 1
    assert [event.status for event in world.sender.poll() if isinstance(event, Completion)]


def test_injected_failure_after_some_chunks() -> None:
    """G4: what landed before stays; the next transfer is not affected."""
    world = World()
    world.faults.fail_after_chunks = 2
    handle = world.submit()
    world.drain()
    (event,) = world.sender.poll()
    assert event == Completion(handle, HandleStatus.FAILED, True, "injected failure")
    assert chunks(world.target) == 2
    assert world.receiver.poll() == []
    again = world.submit()
    world.drain()
    assert world.sender.poll() == [Completion(again, HandleStatus.DONE, True)]


def test_a_dropped_notification_is_only_that() -> None:
    """Public report (TRT-LLM #17665): one lost completion notice; the completion at the
    sender still comes, so STATUS Done can still be sent."""
    world = World()
    world.faults.drop_notifications = 1
    world.submit(notify=b"lost")
    world.submit(notify=b"seen")
    world.drain()
    assert len(world.sender.poll()) == 2
    assert world.receiver.poll() == [Notification(world.sender.incarnation, b"seen")]


def test_corruption_flips_one_byte() -> None:
    world = World()
    world.faults.corrupt_next = True
    world.submit()
    world.drain()
    assert bytes(world.target.buffer) == ALL[:255] + bytes([0])
    world.faults.corrupt_next, world.faults.corrupt_byte = True, 3
    world.submit()
    world.drain()
    assert bytes(world.target.buffer) == ALL[:3] + bytes([ALL[3] ^ 0xFF]) + ALL[4:]


def test_late_landing_outlives_cancel() -> None:
    """G2 with a transport whose cancel is no fence (nixl #2067): the handle ends first,
    the quiesced mark comes after the last byte."""
    world = World()
    world.faults.late_landing = True
    handle = world.submit()
    world.steps(1)
    world.sender.cancel(handle)
    assert world.sender.poll() == [Completion(handle, HandleStatus.CANCELLED, False, "cancelled")]
    with pytest.raises(TransportError):
        world.sender.deregister(world.source)
    world.drain()
    assert chunks(world.target) == 4
    assert world.sender.poll() == [Completion(handle, HandleStatus.CANCELLED, True, "cancelled")]
    assert world.receiver.poll() == []
    world.sender.deregister(world.source)


def test_death_is_a_fence_and_frees_the_address() -> None:
    world = World()
    world.submit()
    world.steps(1)
    gone = world.sender.incarnation
    world.fabric.die(gone)
    assert world.receiver.poll() == [PeerDied(gone, True, "killed")]
    world.drain()
    assert chunks(world.target) == 1
    assert world.sender.poll() == []
    with pytest.raises(TransportError, match="closed"):
        world.submit()


def test_writes_may_outlive_their_process() -> None:
    """Rule 7, restarts whose writes outlive them: death without a fence first, the fence
    when the last byte has landed."""
    world = World()
    world.submit()
    world.steps(1)
    gone = world.sender.incarnation
    world.fabric.die(gone, late=True)
    assert world.receiver.poll() == [PeerDied(gone, False, "killed")]
    world.drain()
    assert chunks(world.target) == 4
    assert world.receiver.poll() == [PeerDied(gone, True, "last write landed")]


def test_a_death_may_be_heard_behind_its_last_byte() -> None:
    """Rule 7: as from a stream whose end comes behind its bytes; nobody is told before."""
    world = World()
    world.submit()
    world.steps(1)
    gone = world.sender.incarnation
    world.fabric.die(gone, late=True, behind_writes=True)
    assert world.receiver.poll() == []
    world.drain()
    assert chunks(world.target) == 4
    assert world.receiver.poll() == [PeerDied(gone, True, "last write landed")]


@pytest.mark.parametrize(
    ("revocation", "is_writing", "fenced"),
    [(Revocation.QUARANTINE, True, False), (Revocation.SENDER_ACK, False, True)],
)
def test_a_death_that_nothing_follows_is_heard_at_once(
    revocation: Revocation, is_writing: bool, fenced: bool
) -> None:
    """Nothing is on its way, or no fence will ever follow: there is nothing to wait for."""
    world = World(revocation)
    if is_writing:
        world.submit()
        world.steps(1)
    gone = world.sender.incarnation
    world.fabric.die(gone, late=True, behind_writes=True)
    assert world.receiver.poll() == [PeerDied(gone, fenced, "killed")]


def test_quarantine_never_fences() -> None:
    world = World(Revocation.QUARANTINE)
    assert world.sender.caps.quarantine_s > 0
    world.submit()
    world.steps(1)
    world.fabric.die(world.sender.incarnation, late=True)
    world.drain()
    assert [e.fenced for e in world.receiver.poll() if isinstance(e, PeerDied)] == [False]


def test_receiver_enforced_revoke_is_immediate() -> None:
    world = World(Revocation.RECEIVER_ENFORCED)
    lease = world.lease()
    handle = world.submit(lease)
    world.steps(2)
    assert world.receiver.revoke(lease.lease)
    world.drain()
    assert chunks(world.target) == 2
    (event,) = world.sender.poll()
    assert isinstance(event, Completion)
    assert (event.handle, event.status) == (handle, HandleStatus.FAILED)
    assert not World().receiver.revoke(lease.lease)


def test_the_receiver_trusts_its_own_table_only() -> None:
    """RECEIVER_ENFORCED: a sender that claims a wider lease than it was granted."""
    world = World(Revocation.RECEIVER_ENFORCED)
    lease = world.lease()
    region = world.target.region_id
    lease.ranges[region] = make_lease(world.receiver.incarnation, 9, {region: [(0, 64)]}).ranges[
        region
    ]
    wide = make_lease(lease.lease.incarnation, lease.lease.counter, {region: [(0, 256)]})
    world.submit(wide)
    world.drain()
    assert chunks(world.target) == 0
    assert [e.status for e in world.sender.poll() if isinstance(e, Completion)] == [
        HandleStatus.FAILED
    ]


def test_a_restart_at_the_same_address_is_another_incarnation() -> None:
    """Public reports I6215, nixl #795: never reconnect by address alone."""
    world = World()
    old = world.receiver.descriptor()
    with pytest.raises(TransportError, match="in use"):
        world.transport(Revocation.SENDER_ACK, "decode:0")
    world.fabric.die(world.receiver.incarnation)
    with pytest.raises(PeerGone):
        world.sender.connect(old)
    reborn = world.transport(Revocation.SENDER_ACK, "decode:0")
    with pytest.raises(TransportError, match="stale"):
        world.sender.connect(old)
    assert world.sender.connect(reborn.descriptor()).incarnation == reborn.incarnation


def test_close_reports_late_writes() -> None:
    world = World()
    world.faults.late_landing = True
    handle = world.submit()
    world.steps(1)
    assert world.sender.close() == [f"handle {handle}: late"]
    assert world.receiver.poll() == [PeerDied(world.sender.incarnation, False, "closed")]
    world.drain()
    assert chunks(world.target) == 4


def test_the_bell_is_made_on_demand() -> None:
    world = World()
    world.fabric.stepped = False
    bell = world.receiver.fileno()
    assert bell is not None
    world.receiver.poll()
    assert not select.select([bell], [], [], 0)[0]
    world.submit()
    world.sender.poll()
    assert select.select([bell], [], [], 1)[0]
    assert world.receiver.poll()
    assert not select.select([bell], [], [], 0)[0]
    world.receiver.close()
    assert world.receiver.fileno() is None


@pytest.mark.parametrize("kind", list(Revocation))
def test_capabilities_follow_the_revocation(kind: Revocation) -> None:
    caps = loopback_caps(kind)
    assert caps.revocation is kind
    assert caps.one_sided == (kind is not Revocation.RECEIVER_ENFORCED)
    assert caps.death_fences == (kind is not Revocation.QUARANTINE)


def check_death_is_fenced_per_peer(world: World) -> None:
    other = world.transport(Revocation.SENDER_ACK, "decode:1")
    other.allocate(256)
    world.sender.connect(other.descriptor())
    world.submit()
    world.steps(1)
    gone = world.sender.incarnation
    world.fabric.die(gone, late=True)
    assert other.poll() == [PeerDied(gone, True, "killed")]
    assert world.receiver.poll() == [PeerDied(gone, False, "killed")]
    world.drain()
    assert world.receiver.poll() == [PeerDied(gone, True, "last write landed")]
    assert other.poll() == []


def test_late_writes_to_one_peer_are_no_wait_for_another() -> None:
    """A peer to whom nothing is on its way has its proof with the death; it would wait for
    ever for that of a last byte that goes elsewhere, with all that the dead one could write."""
    check_death_is_fenced_per_peer(World())
