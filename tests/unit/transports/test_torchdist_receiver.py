from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator

import attrs
import numpy as np
import pytest

pytest.importorskip("torch", reason="torchdist needs the extra `torch`")

from pdcore.errors import TransportError
from pdcore.testing.transport_harness import make_lease
from pdcore.testing.transport_watch import is_zero
from pdcore.transports import torchdist_receiver as module
from pdcore.transports import torchdist_sender
from pdcore.transports.base import Notification, PeerDied, RemoteLease
from pdcore.transports.check import CopyPlan
from pdcore.transports.descriptor import EndpointDescriptor
from pdcore.transports.regions import RegionTable
from pdcore.transports.torchdist_channel import Channel, End, LinkOver, dial
from pdcore.transports.torchdist_chunks import plan_chunk
from pdcore.transports.torchdist_group import GlooBackend
from pdcore.transports.torchdist_hub import Happening, Hub
from pdcore.transports.torchdist_receiver import Desk, Door, Incoming
from pdcore.transports.torchdist_sender import has_dropped, open_channel
from pdcore.transports.torchdist_wire import (
    Address,
    ChunkHead,
    Kind,
)
from pdcore.transports.torchdist_witness import NOBODY
from pdcore.types import Incarnation
from tests.unit.transports.torchdist_rig import (
    HOST,
    LIMITS,
    SOON_S,
    THEM,
    HandSender,
    rows,
    send_by_hand,
    warm_up,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="torchdist is Linux")
US = Incarnation(b"u" * 16)
SIZE = 1 << 16


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    warm_up()


@pytest.fixture(autouse=True)
def _unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Callers played here do not say that they are this process, which lives on."""
    monkeypatch.setattr(torchdist_sender, "stamp", lambda: NOBODY)


class Rig:
    """A door, and memory behind it, of which the test grants parts."""

    def __init__(self) -> None:
        self.hub = Hub()
        self.regions = RegionTable()
        self.backend = GlooBackend(HOST)
        self.backend.build_timeout_s = SOON_S
        self.desk = Desk(US, self.regions, self.hub, self.backend, HOST, 0, LIMITS)
        self.memory = bytearray(SIZE)
        self.region = self.regions.add(memoryview(self.memory), target=True).region_id
        self.door = Door(self.desk)
        self._granted = 0
        self._callers: list[HandSender] = []
        self.left: list[str] | None = None

    @property
    def descriptor(self) -> EndpointDescriptor:
        regions = self.regions.targets()
        return EndpointDescriptor("torchdist", US, regions, self.door.address.encode())

    def grant(self, *ranges: tuple[int, int]) -> RemoteLease:
        self._granted += 1
        lease = make_lease(US, self._granted, {self.region: list(ranges)})
        with self.hub.lock:
            self.regions.grant(lease)
        return lease

    def revoke(self, lease: RemoteLease) -> None:
        with self.hub.lock:
            self.regions.revoke(lease.lease)

    def caller(self, incarnation: Incarnation = THEM, number: int = 0) -> HandSender:
        made = send_by_hand(self.descriptor.encode(), self.backend, incarnation, number)
        self._callers.append(made)
        return made

    def call(self) -> Channel:
        """As far as WELCOME."""
        return open_channel(THEM, self.descriptor, self.door.address, SOON_S)[0]

    def happened(self) -> list[Happening]:
        """The next things, waited for."""
        return eventually(self.hub.drain)

    def close_door(self) -> list[str]:
        if self.left is None:
            self.left = self.door.close(time.monotonic() + SOON_S)
        return self.left

    def close(self) -> list[str]:
        left = self.close_door()
        while self._callers:
            self._callers.pop().close()
        self.backend.close()
        self.hub.close(keep_bell=False)
        return left


def eventually(look: Callable[[], list[Happening]]) -> list[Happening]:
    deadline = time.monotonic() + SOON_S
    while True:
        found = look()
        if found:
            return found
        assert time.monotonic() < deadline, "nothing happened"


def all_that_comes(caller: HandSender) -> None:
    """Raises LinkOver at the end."""
    while True:
        caller.hear()


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    assert made.close() == []


def test_a_chunk_is_put_where_it_was_announced(rig: Rig) -> None:
    """G1: and only then is anybody told."""
    lease = rig.grant((0, 1000))
    caller = rig.caller()
    table = rows((rig.region, 500, 4), (rig.region, 100, 2))
    assert caller.announce(lease.lease, 6, table, b"wake up") is Kind.READY
    assert rig.hub.drain() == []
    caller.deliver(b"abcdef")
    assert caller.hear() is Kind.PLACED
    assert rig.hub.drain() == [Notification(THEM, b"wake up")]
    assert rig.memory[500:504] == b"abcd"
    assert rig.memory[100:102] == b"ef"
    assert sum(map(bool, rig.memory)) == 6


#: (announced bytes, table) of chunks that leave the lease (0, 128) of region 1.
OUTSIDE = [(64, rows((1, 100, 64))), (64, rows((1, 4096, 64))), (1 << 17, rows((1, 0, 1 << 17)))]


def check_enforced(rig: Rig) -> None:
    """D58: a sender that ignores its lease writes nothing."""
    lease = rig.grant((0, 128))
    caller = rig.caller()
    for num_bytes, table in OUTSIDE:
        answer = caller.announce(lease.lease, num_bytes, table, b"never")
        assert answer is Kind.REJECTED, f"{table.tolist()} was accepted"
    assert is_zero(memoryview(rig.memory))
    assert rig.hub.drain() == []


def test_the_receiver_enforces_the_lease(rig: Rig) -> None:
    """D58: regions and bounds are checked on both sides; here by the one whose memory it is."""
    check_enforced(rig)
    lease = rig.grant((0, 128))
    caller = rig.caller(Incarnation(b"o" * 16))
    assert caller.announce(lease.lease, 0, rows()) is Kind.PLACED


def unchecked(
    head: ChunkHead, sizes: dict[int, int], lease: RemoteLease, chunk_bytes: int
) -> CopyPlan:
    """The seed's rule: what a peer asks for is what it gets."""
    whole = {region: np.array([[0, size]], np.int64) for region, size in sizes.items()}
    return plan_chunk(head, sizes, RemoteLease(lease.lease, whole), chunk_bytes)


def test_mutant_trusting_the_sender(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "plan_chunk", unchecked)
    with pytest.raises(AssertionError, match="was accepted"):
        check_enforced(rig)


def revoked_under_way(rig: Rig) -> None:
    """The receive is posted when the lease ends; the bytes come all the same."""
    lease = rig.grant((0, 128))
    caller = rig.caller()
    assert caller.announce(lease.lease, 64, rows((rig.region, 0, 64)), b"never") is Kind.READY
    rig.revoke(lease)
    caller.deliver(b"x" * 64)
    assert caller.hear() in (Kind.REJECTED, Kind.PLACED)
    assert is_zero(memoryview(rig.memory)), "bytes landed after revoke"
    assert rig.hub.drain() == []


def test_revoke_is_immediate(rig: Rig) -> None:
    """RECEIVER_ENFORCED: also for a chunk that is on its way."""
    revoked_under_way(rig)


def test_mutant_checking_only_before(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """One look at the lease, before the bytes come, is not enough."""

    def place(self: Incoming, head: ChunkHead, plan: CopyPlan, staging: module.Staging) -> None:
        module.scatter(plan, staging.host, self._desk.regions.arrays)

    monkeypatch.setattr(Incoming, "_place", place)
    with pytest.raises(AssertionError, match="landed after revoke"):
        revoked_under_way(rig)


def test_no_lease_no_bytes(rig: Rig) -> None:
    lease = rig.grant((0, 128))
    with rig.hub.lock:
        rig.regions.release(lease.lease)
    caller = rig.caller()
    assert caller.announce(lease.lease, 64, rows((rig.region, 0, 64))) is Kind.REJECTED
    assert caller.announce(lease.lease, 0, rows(), b"never") is Kind.REJECTED
    assert rig.hub.drain() == []


@pytest.mark.parametrize("part", ["target", "token"])
def test_who_was_not_given_the_descriptor_stays_outside(rig: Rig, part: str) -> None:
    """G6, rule 7: another life of ours is meant, or the port was guessed."""
    good = rig.door.address
    if part == "token":
        address, descriptor = Address("gloo", HOST, good.port, b"?" * 16), rig.descriptor
    else:
        address = good
        descriptor = EndpointDescriptor("torchdist", Incarnation(b"?" * 16), {}, b"")
    with pytest.raises(TransportError, match="stale descriptor"):
        open_channel(THEM, descriptor, address, SOON_S)
    assert rig.hub.drain() == []


def test_whoever_says_nothing_is_dropped(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HELLO_TIMEOUT_S", 0.01)
    with socket.create_connection((HOST, rig.door.address.port)) as caller:
        said = b""
        while part := caller.recv(4096):
            said += part
    assert b"expected HELLO" in said


def test_a_process_at_its_limits_goes_on_answering_later(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No thread for a caller: it is hung up on, and the door stays open."""

    def no_thread(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        with socket.create_connection((HOST, rig.door.address.port)) as caller:
            assert caller.recv(1) == b""
    other = rig.call()
    other.farewell(Kind.DISCONNECT)
    other.close()


def test_callers_are_bounded(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LINKS", 1)
    first = rig.call()
    with pytest.raises(TransportError):
        rig.call()
    first.farewell(Kind.DISCONNECT)
    first.close()


def test_a_caller_that_dies_is_dead(rig: Rig) -> None:
    """Also before it has built anything."""
    rig.call().close()
    assert rig.happened() == [PeerDied(THEM, True, "its process is gone")]


def test_a_caller_that_dies_with_a_receive_posted_is_dead(rig: Rig) -> None:
    """Nothing waits in the group for the sender: no bytes, no hang, and a fence."""
    lease = rig.grant((0, 128))
    caller = rig.caller()
    assert caller.announce(lease.lease, 64, rows((rig.region, 0, 64))) is Kind.READY
    caller.line.channel.close()
    (death,) = rig.happened()
    assert isinstance(death, PeerDied)
    assert death.fenced
    assert is_zero(memoryview(rig.memory))


def test_a_caller_that_dies_in_the_middle_of_a_chunk_is_dead(rig: Rig) -> None:
    """The group breaks first; what the connection says a moment later counts."""
    lease = rig.grant((0, 128))
    caller = rig.caller()
    assert caller.announce(lease.lease, 64, rows((rig.region, 0, 64)), b"never") is Kind.READY
    caller.line.send(Kind.SENT)
    caller.die()
    assert rig.happened() == [PeerDied(THEM, True, "its process is gone")]
    assert is_zero(memoryview(rig.memory))


def test_a_group_that_breaks_alone_is_no_death(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AFTERMATH_S", 0.05)
    lease = rig.grant((0, 128))
    caller = rig.caller()
    assert caller.announce(lease.lease, 64, rows((rig.region, 0, 64)), b"never") is Kind.READY
    caller.group = None
    caller.line.send(Kind.SENT)
    with pytest.raises(LinkOver) as over:
        caller.hear()
    assert over.value.end is End.DISCONNECTED
    assert rig.hub.drain() == []


def test_a_session_that_was_given_up_places_nothing(rig: Rig) -> None:
    """G2: its sender lost it and asks anew; once that is answered, no chunk of it lands."""
    lease = rig.grant((0, 256))
    given_up, good = rig.caller(number=7), rig.caller(number=8)
    assert given_up.announce(lease.lease, 64, rows((rig.region, 0, 64)), b"never") is Kind.READY
    assert has_dropped(THEM, rig.descriptor, rig.door.address, 7, SOON_S)
    # Its thread has not ended yet, or it has: either way.
    with contextlib.suppress(TransportError):
        given_up.deliver(b"x" * 64)
    with pytest.raises(LinkOver) as over:
        all_that_comes(given_up)
    assert over.value.end is End.DISCONNECTED
    assert is_zero(memoryview(rig.memory))
    assert good.announce(lease.lease, 64, rows((rig.region, 64, 128))) is Kind.REJECTED
    assert good.announce(lease.lease, 64, rows((rig.region, 64, 64))) is Kind.READY
    good.deliver(b"y" * 64)
    assert good.hear() is Kind.PLACED
    assert rig.hub.drain() == []
    assert len(rig.desk.links) == 1


def test_who_is_not_known_any_more_has_dropped_everything(rig: Rig) -> None:
    """Another life there, or nobody: nothing of ours can land. Silence proves nothing."""
    good = rig.door.address
    other = attrs.evolve(rig.descriptor, incarnation=Incarnation(b"?" * 16))
    assert has_dropped(THEM, other, good, 1, SOON_S)
    with socket.create_server((HOST, 0)) as silent:
        address = attrs.evolve(good, port=silent.getsockname()[1])
        assert not has_dropped(THEM, rig.descriptor, address, 1, 0.05)
    assert has_dropped(THEM, rig.descriptor, address, 1, SOON_S)


def test_a_disconnect_is_no_death(rig: Rig) -> None:
    caller = rig.call()
    caller.farewell(Kind.DISCONNECT)
    caller.close()
    other = rig.call()
    other.farewell(Kind.BYE)
    other.close()
    assert rig.happened() == [PeerDied(THEM, True, "closed its transport")]


def test_closing_does_not_wait_for_a_stopped_sender(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was promised a receive, and will not use it in time."""
    monkeypatch.setattr(module, "CLOSE_GRACE_S", 0.01)
    lease = rig.grant((0, 128))
    caller = rig.caller()
    assert caller.announce(lease.lease, 64, rows((rig.region, 0, 64))) is Kind.READY
    started = time.monotonic()
    assert rig.close_door() == []
    assert time.monotonic() - started < SOON_S / 2
    with pytest.raises(LinkOver) as over:
        caller.hear()
    assert over.value.end is End.CLOSED


def test_a_group_that_cannot_be_built_ends_the_session(rig: Rig) -> None:
    """The sender is told why."""
    rig.backend.build_timeout_s = 0.2
    caller = rig.call()
    caller.send(Kind.JOIN, timeout_s=SOON_S)
    caller.send(Kind.KEY, b"\xff", timeout_s=SOON_S)
    with pytest.raises(LinkOver, match="malformed KEY") as over:
        listen(caller)
    assert over.value.end is End.DISCONNECTED
    caller.close()


def listen(caller: Channel) -> None:
    """Raises LinkOver when the receiver gives up."""
    while caller.receive(None, time.monotonic() + SOON_S) is not None:
        pass


def test_a_frame_out_of_turn_ends_the_session(rig: Rig) -> None:
    caller = rig.call()
    caller.send(Kind.PLACED, timeout_s=SOON_S)
    with pytest.raises(LinkOver, match="expected JOIN"):
        caller.receive(None, time.monotonic() + SOON_S)
    caller.close()


def test_a_door_that_is_closed_answers_nobody(rig: Rig) -> None:
    address = rig.door.address
    assert rig.close_door() == []
    with pytest.raises(TransportError, match="nobody listens"):
        dial(address, SOON_S)


def test_an_address_of_others_cannot_be_listened_at(rig: Rig) -> None:
    desk = Desk(US, rig.regions, rig.hub, rig.backend, "192.0.2.1", 0, LIMITS)
    with pytest.raises(TransportError, match=r"192\.0\.2\.1"):
        Door(desk)
