"""The fabric under adversarial scheduling: G1 to G5 as a state machine, and its own parts."""

from __future__ import annotations

import os
import select

import attrs
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pdcore.errors import TransportError
from pdcore.testing.transport_harness import make_batch, make_lease
from pdcore.testing.transport_watch import Watched
from pdcore.transports import loopback_fabric
from pdcore.transports.base import HandleStatus, RemoteLease, Revocation
from pdcore.transports.loopback import LoopbackTransport
from pdcore.transports.loopback_fabric import Doorbell, LoopbackFabric
from pdcore.types import Incarnation

BLOCK, SLOT, SLOTS = 96, 128, 60


@attrs.define(eq=False)
class Sent:
    """What one handle may write: ``[start, start + BLOCK)`` of its own slot."""

    handle: int
    sender: int
    order: int
    start: int
    lease: RemoteLease
    #: Bytes when nothing may change any more.
    frozen: bytes | None = None


class Adversary(RuleBasedStateMachine):
    """Two senders, one receiver, any interleaving of chunks, cancels, failures and late
    writes. Every handle has its own slot of the target, so a wrong byte has a culprit."""

    @initialize(kind=st.sampled_from(list(Revocation)), late=st.booleans())
    def setup(self, kind: Revocation, late: bool) -> None:
        self.fabric = LoopbackFabric(stepped=True, chunk_bytes=32)
        made = [
            Watched(LoopbackTransport(Incarnation(os.urandom(16)), self.fabric, revocation=kind))
            for _ in range(3)
        ]
        self.senders, self.receiver = made[:2], made[2]
        self.kind = kind
        self.target = self.receiver.transport.allocate(SLOT * SLOTS)
        self.sources = [one.transport.allocate(SLOT * SLOTS) for one in self.senders]
        for i, source in enumerate(self.sources):
            source.buffer[:] = bytes(
                (17 * i + at // SLOT + at % 251) % 255 + 1 for at in range(SLOT * SLOTS)
            )
        descriptor = self.receiver.transport.descriptor()
        self.sessions = [one.transport.connect(descriptor) for one in self.senders]
        for one in self.senders:
            self.fabric.faults(one.transport.incarnation).late_landing |= late
        self.sent: list[Sent] = []
        self.notified: list[list[int]] = [[], []]

    @precondition(lambda self: len(self.sent) < SLOTS)
    @rule(sender=st.integers(0, 1), gap=st.integers(0, 2))
    def submit(self, sender: int, gap: int) -> None:
        order = len(self.sent)
        start = order * SLOT + 16
        region = self.target.region_id
        incarnation = self.receiver.transport.incarnation
        lease = make_lease(incarnation, order, {region: [(start, start + BLOCK)]})
        self.receiver.transport.grant(lease)
        half = BLOCK // 2
        pieces = [(start, start, half), (start + half, start + half, BLOCK - half - gap)]
        handle = self.senders[sender].transport.submit(
            self.sessions[sender],
            [make_batch(self.sources[sender], self.target, *pieces)],
            lease,
            b"%d" % order,
        )
        self.sent.append(Sent(handle, sender, order, start, lease))

    @precondition(lambda self: self.sent)
    @rule(data=st.data(), shift=st.integers(1, 64))
    def submit_outside(self, data: st.DataObject, shift: int) -> None:
        """G3: the lease of another slot is no right to this one."""
        sent = data.draw(st.sampled_from(self.sent))
        start = sent.start + shift
        before = bytes(self.target.buffer)
        batch = make_batch(self.sources[0], self.target, (0, 0, 0), (0, start, BLOCK))
        with pytest.raises(TransportError):
            self.senders[0].transport.submit(self.sessions[0], [batch], sent.lease, b"bad")
        assert bytes(self.target.buffer) == before

    @rule(choice=st.integers(0, 100), times=st.integers(1, 4))
    def step(self, choice: int, times: int) -> None:
        for _ in range(times):
            self.fabric.step(choice)
            self.read()

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        sent = data.draw(st.sampled_from(self.sent))
        self.senders[sent.sender].transport.cancel(sent.handle)
        self.read()

    @rule(sender=st.integers(0, 1), chunks=st.integers(0, 3))
    def fail_next(self, sender: int, chunks: int) -> None:
        incarnation = self.senders[sender].transport.incarnation
        self.fabric.faults(incarnation).fail_after_chunks = chunks

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def revoke(self, data: st.DataObject) -> None:
        sent = data.draw(st.sampled_from(self.sent))
        immediate = self.receiver.transport.revoke(sent.lease.lease)
        assert immediate == (self.kind is Revocation.RECEIVER_ENFORCED)
        if immediate and sent.frozen is None:
            sent.frozen = self.bytes_of(sent)

    @rule(sender=st.integers(0, 1))
    def reconnect(self, sender: int) -> None:
        transport = self.senders[sender].transport
        transport.disconnect(self.sessions[sender])
        self.read()
        mine = [s for s in self.sent if s.sender == sender]
        assert {s.handle for s in mine} == set(self.senders[sender].record.ended)
        self.sessions[sender] = transport.connect(self.receiver.transport.descriptor())
        self.notified[sender] = []

    @rule()
    def deregister_target(self) -> None:
        """G5: never while a lease, granted or revoked, refers to it."""
        if self.sent:
            with pytest.raises(TransportError):
                self.receiver.transport.deregister(self.target)

    def read(self) -> None:
        """Take all events; G1 and G2 on what they say."""
        for watched in self.senders:
            watched.poll()
        for sent in self.sent:
            if sent.frozen is None and sent.handle in self.senders[sent.sender].record.quiesced:
                sent.frozen = self.bytes_of(sent)
        seen = len(self.receiver.record.notes)
        self.receiver.poll()
        for note in self.receiver.record.notes[seen:]:
            sent = self.sent[int(note.payload)]
            origin = self.senders[sent.sender]
            assert note.incarnation == origin.transport.incarnation
            ended = origin.record.ended.get(sent.handle, HandleStatus.DONE)
            assert ended is HandleStatus.DONE, "notified after a failure (G1)"
            source = self.sources[sent.sender].buffer
            at = sent.start
            assert self.target.buffer[at : at + BLOCK - 2] == source[at : at + BLOCK - 2]
            assert sent.order not in self.notified[sent.sender], "notified twice (G1)"
            assert all(earlier < sent.order for earlier in self.notified[sent.sender]), "FIFO (G1)"
            self.notified[sent.sender].append(sent.order)

    def bytes_of(self, sent: Sent) -> bytes:
        return bytes(self.target.buffer[sent.start : sent.start + BLOCK])

    @invariant()
    def quiesced_means_quiesced(self) -> None:
        for sent in self.sent:
            if sent.frozen is not None:
                assert self.bytes_of(sent) == sent.frozen, f"{sent} changed after quiesced (G2)"

    @invariant()
    def nothing_outside_the_leases(self) -> None:
        for slot in range(SLOTS):
            at = slot * SLOT
            margins = bytes(self.target.buffer[at : at + 16])
            margins += bytes(self.target.buffer[at + 16 + BLOCK : at + SLOT])
            assert not any(margins), f"slot {slot} was written outside its lease (G4)"

    def teardown(self) -> None:
        if "sent" not in vars(self):
            return
        while self.fabric.step():
            self.read()
        self.read()
        self.quiesced_means_quiesced()
        self.nothing_outside_the_leases()
        for i, watched in enumerate(self.senders):
            handles = {s.handle for s in self.sent if s.sender == i}
            assert set(watched.record.ended) == handles, "a handle never ended (G2)"
            assert watched.record.quiesced == handles, "a handle was never quiesced (G2)"
            watched.transport.close()
        self.receiver.transport.close()


TestAdversary = Adversary.TestCase
TestAdversary.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


def run_fixed_schedule() -> None:
    """One interleaving of the machine above, enough to catch either mutant below."""
    machine = Adversary()
    machine.setup(Revocation.SENDER_ACK, late=True)
    machine.submit(0, 0)
    machine.step(0, 1)
    machine.senders[0].transport.cancel(machine.sent[0].handle)
    machine.read()
    for _ in range(20):
        machine.step(0, 1)
        machine.quiesced_means_quiesced()
    machine.submit(0, 0)
    for _ in range(20):
        machine.step(0, 1)
    machine.teardown()


def test_freeing_at_cancel_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Public report I24527: blocks reused before the writer finished. The mutant calls a
    handle quiesced when it ends although its bytes still land; the machine objects."""
    run_fixed_schedule()
    real = loopback_fabric.Completion

    def hasty(handle: int, status: HandleStatus, quiesced: bool, detail: str = "") -> object:
        return real(handle, status, True, detail)

    monkeypatch.setattr(loopback_fabric, "Completion", hasty)
    with pytest.raises(AssertionError):
        run_fixed_schedule()


def test_notifying_first_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """G1: the mutant puts the notification on the wire with the first chunk."""
    real = LoopbackFabric._move

    def early(self: LoopbackFabric, link: loopback_fabric.Link) -> None:
        job = link.jobs[0]
        if job.chunks == 0 and job.notify is not None:
            link.outbox.append((job.lease, job.notify))
            job.notify = None
            loopback_fabric._deliver(link)
        real(self, link)

    monkeypatch.setattr(LoopbackFabric, "_move", early)
    with pytest.raises(AssertionError):
        run_fixed_schedule()


def test_doorbell() -> None:
    bell = Doorbell()
    try:
        assert not select.select([bell], [], [], 0)[0]
        for _ in range(10_000):
            bell.ring()
        assert select.select([bell], [], [], 1)[0]
        bell.clear()
        assert not select.select([bell], [], [], 0)[0]
    finally:
        bell.close()


def test_unknown_incarnation() -> None:
    with pytest.raises(KeyError):
        LoopbackFabric().faults(Incarnation(b"x" * 16))
