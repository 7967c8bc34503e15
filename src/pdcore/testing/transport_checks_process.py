"""Conformance checks with a peer that dies, stops and comes back.

Whatever the far end does, this end gets a terminal answer, and memory is called fenced
only when nothing can land in it any more.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import attrs
import numpy as np

from pdcore.errors import PeerGone, TransportError
from pdcore.kv.plan import Int64Array, WriteBatch
from pdcore.testing.transport_checks_data import MIB
from pdcore.testing.transport_checks_growth import CALL_LIMIT_S
from pdcore.testing.transport_harness import (
    RemotePeer,
    TransportHarness,
    make_lease,
)
from pdcore.testing.transport_peer import pattern
from pdcore.testing.transport_watch import Watched, is_zero, pump, same, settle
from pdcore.transports.base import HandleStatus, PeerSession, Region, RemoteLease

SIZE = 16 * MIB


@contextlib.contextmanager
def running(harness: TransportHarness) -> Iterator[tuple[Watched, RemotePeer]]:
    """Our own transport and a peer, closed in the end whatever happened."""
    peer = harness.peer()
    mine = Watched(harness.create())
    try:
        yield mine, peer
    finally:
        mine.transport.close()
        with contextlib.suppress(KeyError):
            peer.close()


def one_piece(start: int, end: int) -> Int64Array:
    return np.array([[start, start, end - start, 1, 0, 0]], np.int64)


def whole_lease(owner: RemotePeer | Watched, region: int, counter: int = 1) -> RemoteLease:
    incarnation = owner.transport.incarnation if isinstance(owner, Watched) else owner.incarnation
    return make_lease(incarnation, counter, {region: [(MIB, SIZE)]})


def completions(peer: RemotePeer, mine: Watched, count: int) -> list[dict[str, object]]:
    """Quiesced completions the peer reports, while our own transport is driven too."""
    found: list[dict[str, object]] = []

    def enough() -> bool:
        found.extend(e for e in peer.events() if e["kind"] == "completion" and e["quiesced"])
        return len(found) >= count

    pump(mine, until=enough, what=f"{count} completions at the peer")
    return found


def writes_arrive(harness: TransportHarness) -> None:
    """The plain case between two process lives, both ways."""
    with running(harness) as (mine, peer):
        remote = peer.allocate(SIZE)
        local = mine.transport.allocate(SIZE)
        peer.fill(remote, 5)
        peer.connect(mine.transport.descriptor())
        lease = whole_lease(mine, local.region_id)
        mine.transport.grant(lease)
        peer.submit(remote, local.region_id, one_piece(MIB, SIZE), lease, b"theirs")
        pump(mine, until=lambda: peer_drives(peer) and mine.record.payloads == [b"theirs"])
        assert same(local.buffer[MIB:], pattern(SIZE, 5)[MIB:])
        assert is_zero(local.buffer[:MIB])
        session = mine.transport.connect(peer.descriptor())
        local.buffer[:] = pattern(SIZE, 6)
        peer.fill(remote, 6)
        wanted = peer.checksum(remote)
        peer.fill(remote, 7)
        batch = WriteBatch(local.region_id, remote, one_piece(0, SIZE))
        full = make_lease(peer.incarnation, 2, {remote: [(0, SIZE)]})
        peer.grant(full)
        handle = mine.transport.submit(session, [batch], full, b"ours")
        pump(mine, until=lambda: handle in mine.record.quiesced)
        assert peer.checksum(remote) == wanted


def peer_drives(peer: RemotePeer) -> bool:
    peer.events()
    return True


def sender_killed(harness: TransportHarness) -> None:
    """SIGKILL of a sender in mid-batch: PeerDied, fenced as declared; partial bytes inside
    the lease at most, no notification for the unfinished, and nothing lands afterwards."""
    with running(harness) as (mine, peer):
        local = mine.transport.allocate(SIZE)
        source = peer.allocate(SIZE)
        peer.fill(source, 5)
        peer.connect(mine.transport.descriptor())
        lease = whole_lease(mine, local.region_id)
        mine.transport.grant(lease)
        for _ in range(40):
            peer.submit(source, local.region_id, one_piece(MIB, SIZE), lease, b"n")
        peer.kill()
        pump(mine, until=lambda: bool(mine.record.deaths), timeout_s=CALL_LIMIT_S)
        (death,) = mine.record.deaths
        assert death.incarnation == peer.incarnation
        assert death.fenced == mine.transport.caps.death_fences
        assert is_zero(local.buffer[:MIB]), "bytes outside the lease changed"
        if death.fenced:
            local.buffer[:] = bytes(SIZE)
            settle(mine, quiet_s=harness.quiet_s)
            assert is_zero(local.buffer), "bytes landed after a fenced death"
        settle(mine, quiet_s=harness.quiet_s)
        # A submit that blocks for the copy had come to its end before the signal.
        assert len(mine.record.notes) < 40 or mine.transport.caps.submit_blocks
        assert len(mine.record.deaths) == 1
        mine.transport.revoke(lease.lease)
        mine.transport.release(lease.lease)
        mine.transport.deregister(local)


def receiver_killed(harness: TransportHarness) -> None:
    """SIGKILL of the receiver: every handle ends and is quiesced, PeerDied comes, later
    submits are refused, and the mapping left behind hurts nobody."""
    with running(harness) as (mine, peer):
        remote = peer.allocate(SIZE)
        local = mine.transport.allocate(SIZE)
        session = mine.transport.connect(peer.descriptor())
        lease = whole_lease(peer, remote)
        peer.grant(lease)
        batch = WriteBatch(local.region_id, remote, one_piece(MIB, SIZE))
        handles = {mine.transport.submit(session, [batch], lease, b"n") for _ in range(4)}
        peer.kill()
        pump(
            mine,
            until=lambda: bool(mine.record.deaths) and mine.record.quiesced >= handles,
            timeout_s=CALL_LIMIT_S,
        )
        assert [death.incarnation for death in mine.record.deaths] == [peer.incarnation]
        assert HandleStatus.CANCELLED not in mine.record.ended.values()
        try:
            mine.transport.submit(session, [batch], lease)
        except PeerGone:
            pass
        else:
            raise AssertionError("a submit to a dead peer was accepted")
        mine.transport.disconnect(session)
        mine.transport.deregister(local)


def receiver_stopped(harness: TransportHarness) -> None:
    """SIGSTOP of the receiver: no call hangs; after SIGCONT each notification comes
    once. Public report: a stalled peer must not look like success or hang (nixl #2047)."""
    with running(harness) as (mine, peer):
        remote = peer.allocate(SIZE)
        local = mine.transport.allocate(SIZE)
        descriptor = peer.descriptor()
        session = mine.transport.connect(descriptor)
        lease = whole_lease(peer, remote)
        peer.grant(lease)
        batch = WriteBatch(local.region_id, remote, one_piece(MIB, 2 * MIB))
        peer.stop()
        started = time.monotonic()
        try:
            second = mine.transport.connect(descriptor)
        except TransportError:
            pass
        else:
            mine.transport.disconnect(second)
        took = time.monotonic() - started
        assert took < CALL_LIMIT_S, f"connect to a stopped peer took {took:.1f} s"
        handles = {mine.transport.submit(session, [batch], lease, b"%d" % i) for i in range(20)}
        settle(mine, quiet_s=harness.quiet_s)
        assert not mine.record.deaths, "a stopped peer is not dead"
        peer.resume()
        seen: list[object] = []

        def all_there() -> bool:
            seen.extend(e["payload"] for e in peer.events() if e["kind"] == "notification")
            return len(seen) >= 20 and mine.record.quiesced >= handles

        pump(mine, until=all_there)
        assert seen == [(b"%d" % i).hex() for i in range(20)]
        assert set(mine.record.ended.values()) == {HandleStatus.DONE}


def sender_stopped(harness: TransportHarness) -> None:
    """SIGSTOP of the sender in mid-batch: not dead, no end invented for it; after SIGCONT
    it finishes and everything is in place."""
    with running(harness) as (mine, peer):
        local = mine.transport.allocate(SIZE)
        source = peer.allocate(SIZE)
        peer.fill(source, 5)
        peer.connect(mine.transport.descriptor())
        lease = whole_lease(mine, local.region_id)
        mine.transport.grant(lease)
        for _ in range(20):
            peer.submit(source, local.region_id, one_piece(MIB, SIZE), lease, b"n")
        peer.stop()
        settle(mine, quiet_s=harness.quiet_s)
        assert not mine.record.deaths
        assert len(mine.record.notes) <= 20
        peer.resume()
        found = completions(peer, mine, 20)
        assert {event["status"] for event in found} == {"done"}
        pump(mine, until=lambda: len(mine.record.notes) == 20)
        assert same(local.buffer[MIB:], pattern(SIZE, 5)[MIB:])
        settle(mine, quiet_s=harness.quiet_s)
        assert len(mine.record.notes) == 20


@contextlib.contextmanager
def two_receivers(harness: TransportHarness) -> Iterator[Fan]:
    """Our own sender with a session to a process, and one to a transport beside it."""
    with running(harness) as (mine, peer):
        near = Watched(harness.create())
        try:
            source = mine.transport.allocate(SIZE)
            source.buffer[:] = pattern(SIZE, 8)
            target, remote = near.transport.allocate(SIZE), peer.allocate(SIZE)
            leases = whole_lease(near, target.region_id), whole_lease(peer, remote)
            near.transport.grant(leases[0])
            peer.grant(leases[1])
            sessions = [
                mine.transport.connect(descriptor)
                for descriptor in (near.transport.descriptor(), peer.descriptor())
            ]
            yield Fan(mine, near, peer, source, target, remote, sessions, leases)
        finally:
            near.transport.close()


@attrs.frozen
class Fan:
    """A sender and its two receivers; 1 MiB of both targets is outside the leases."""

    mine: Watched
    near: Watched
    peer: RemotePeer
    source: Region
    target: Region
    remote: int
    sessions: list[PeerSession]
    leases: tuple[RemoteLease, RemoteLease]

    def to_near(self, start: int, end: int, note: bytes) -> int:
        batch = WriteBatch(self.source.region_id, self.target.region_id, one_piece(start, end))
        return self.mine.transport.submit(self.sessions[0], [batch], self.leases[0], note)

    def to_peer(self, start: int, end: int, note: bytes) -> int:
        batch = WriteBatch(self.source.region_id, self.remote, one_piece(start, end))
        return self.mine.transport.submit(self.sessions[1], [batch], self.leases[1], note)

    def expect_near(self, handles: set[int], notes: list[bytes]) -> None:
        """All of them succeed, with every byte in place and each notification, in order."""
        record = self.mine.record
        pump(self.mine, self.near, until=lambda: record.quiesced >= handles)
        assert {record.ended[handle] for handle in handles} == {HandleStatus.DONE}
        pump(self.mine, self.near, until=lambda: len(self.near.record.notes) >= len(notes))
        assert self.near.record.payloads == notes
        assert same(self.target.buffer[MIB:], self.source.buffer[MIB:])
        assert is_zero(self.target.buffer[:MIB])


def partial_failure(harness: TransportHarness) -> None:
    """G2, G4: of transfers in flight together each has its own end: one peer is killed, another
    gets every byte, and what is refused in between disturbs nobody."""
    with two_receivers(harness) as fan:
        lost, kept, notes = set(), set(), []
        for turn in range(1, SIZE // MIB):
            lost.add(fan.to_peer(MIB, SIZE, b"lost"))
            notes.append(b"kept %d" % turn)
            kept.add(fan.to_near(turn * MIB, (turn + 1) * MIB, notes[-1]))
            try:
                fan.to_near(MIB - 1, 2 * MIB, b"refused")
            except TransportError:
                continue
            raise AssertionError("a write outside the lease was accepted")
        fan.peer.kill()
        fan.expect_near(kept, notes)
        record = fan.mine.record
        pump(
            fan.mine,
            until=lambda: bool(record.deaths) and record.quiesced >= lost,
            timeout_s=CALL_LIMIT_S,
        )
        assert [death.incarnation for death in record.deaths] == [fan.peer.incarnation]
        assert {record.ended[h] for h in lost} <= {HandleStatus.DONE, HandleStatus.FAILED}
        assert set(record.ended) == lost | kept


def stopped_peer_is_alone(harness: TransportHarness) -> None:
    """D23: a receiver that is stopped, with much on its way to it, holds up no other; when it
    goes on, so does what is meant for it."""
    with two_receivers(harness) as fan:
        fan.peer.stop()
        late = {fan.to_peer(MIB, SIZE, b"late") for _ in range(10)}
        notes = [b"%d" % turn for turn in range(1, SIZE // MIB)]
        handles = {
            fan.to_near(turn * MIB, (turn + 1) * MIB, note) for turn, note in enumerate(notes, 1)
        }
        fan.expect_near(handles, notes)
        assert not fan.mine.record.deaths, "a stopped peer is not dead"
        fan.peer.resume()
        record = fan.mine.record
        pump(fan.mine, until=lambda: peer_drives(fan.peer) and record.quiesced >= late)
        assert {record.ended[handle] for handle in late} == {HandleStatus.DONE}


def restarted_peer(harness: TransportHarness) -> None:
    """Rule 7 and public reports I6215, nixl I795: a session belongs to one incarnation; after a
    restart, at the same address where there is one, the old descriptor is refused and the new
    one works at once."""
    with running(harness) as (mine, peer):
        local = mine.transport.allocate(SIZE)
        old = peer.allocate(SIZE)
        old_descriptor = peer.descriptor()
        session = mine.transport.connect(old_descriptor)
        old_lease = whole_lease(peer, old)
        peer.grant(old_lease)
        peer.kill()
        pump(mine, until=lambda: bool(mine.record.deaths), timeout_s=CALL_LIMIT_S)
        reborn = harness.successor(peer)
        try:
            assert reborn.incarnation != peer.incarnation
            remote = reborn.allocate(SIZE)
            for call in (
                lambda: mine.transport.connect(old_descriptor),
                lambda: mine.transport.submit(session, [], old_lease, b"old"),
            ):
                try:
                    call()
                except TransportError:
                    continue
                raise AssertionError("something of the old incarnation was accepted")
            fresh = mine.transport.connect(reborn.descriptor())
            lease = whole_lease(reborn, remote)
            reborn.grant(lease)
            batch = WriteBatch(local.region_id, remote, one_piece(MIB, SIZE))
            handle = mine.transport.submit(fresh, [batch], lease)
            pump(mine, until=lambda: handle in mine.record.quiesced)
            assert mine.record.ended[handle] is HandleStatus.DONE
        finally:
            reborn.close()
