"""The side channel: what is said beside the bytes, over the socket transport's parts."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Iterator

import attrs
import numpy as np
import pytest

from pdcore.errors import PeerGone, TransportError
from pdcore.transports.base import PeerDied, RemoteLease
from pdcore.transports.descriptor import EndpointDescriptor
from pdcore.transports.onesided_side import SideChannel, SideOptions, check_notify
from pdcore.transports.regions import RegionTable
from pdcore.transports.socket_address import Home, decode_home, dial, encode_home, this_origin
from pdcore.transports.socket_greeting import Identity, greet
from pdcore.transports.socket_incoming import Incoming
from pdcore.transports.socket_links import NoteCame, Told
from pdcore.transports.socket_outgoing import Outgoing
from pdcore.transports.socket_poller import Barrier
from pdcore.transports.socket_reader import FrameReader
from pdcore.transports.socket_wire import (
    FROM_RECEIVER,
    MAX_PAYLOAD_BYTES,
    Kind,
    pack_end,
    pack_revoke,
    unpack_revoke,
)
from pdcore.transports.socket_wire import End as ProtocolEnd
from pdcore.types import Incarnation, LeaseId

PLAIN = SideOptions()
SECRET = "a secret of enough bytes"


class End:
    """One side channel and what it was told."""

    def __init__(self, options: SideOptions = PLAIN) -> None:
        self.incarnation = Incarnation(os.urandom(16))
        self.regions = RegionTable()
        self.side = SideChannel(self.incarnation, self.regions, options)
        self.told: list[Told] = []

    def descriptor(self) -> EndpointDescriptor:
        return EndpointDescriptor("socket", self.incarnation, {}, self.side.listen())

    def wait(self, until: Callable[[], bool]) -> None:
        for _ in range(200):
            self.told += self.side.drain()
            if until():
                return
            select.select([self.side.inbox.fileno()], [], [], 0.1)
        raise AssertionError(f"it did not come: {self.told}")


@pytest.fixture(params=[None, SECRET])
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[End, End]]:
    options = SideOptions(secret=request.param)
    one, two = End(options), End(options)
    yield one, two
    assert one.side.close(5.0)
    assert two.side.close(5.0)


def test_a_sender_is_told_what_was_published(ends: tuple[End, End]) -> None:
    one, two = ends
    two.side.publish({1: 4096}, b"first")
    two.side.publish({1: 4096, 2: 8192}, b"second")
    _, link = one.side.connect(two.descriptor())
    assert (link.welcome.regions, link.welcome.extra) == ({1: 4096, 2: 8192}, b"second")
    two.side.publish({2: 8192}, b"third")
    _, link = one.side.connect(two.descriptor())
    assert (link.welcome.regions, link.welcome.extra) == ({2: 8192}, b"third")


def test_a_region_that_is_taken_back_meanwhile_lies_somewhere(
    ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner takes a region back right after the side channel's thread has read which ones
    there are: whoever is told of a region is told where it lies. Else connect is refused, and
    not tried again for seconds."""
    one, two = ends
    two.side.publish({1: 4096, 2: 8192}, b"places of 1 and 2")
    service = two.side._loop._service
    read, seen = service._published, []

    def then_fewer() -> object:
        seen.append(read())
        two.side.publish({1: 4096}, b"place of 1")
        return seen[-1]

    monkeypatch.setattr(service, "_published", then_fewer)
    _, link = one.side.connect(two.descriptor())
    told = link.welcome.regions, link.welcome.extra
    assert told == ({1: 4096, 2: 8192}, b"places of 1 and 2"), "a region lies nowhere"
    assert len(seen) == 1, "read twice, with the owner in between"


def test_notifications_come_in_order_while_the_lease_stands(ends: tuple[End, End]) -> None:
    one, two = ends
    region = two.regions.add(memoryview(bytearray(64)), target=True)
    lease = LeaseId(two.incarnation, 1)
    two.regions.grant(RemoteLease(lease, {region.region_id: np.array([[0, 64]], np.int64)}))
    session, link = one.side.connect(two.descriptor())
    for i in range(100):
        one.side.notify(link, lease, b"%d" % i)
    one.side.notify(link, LeaseId(two.incarnation, 2), b"no such lease")
    two.wait(lambda: len(two.told) == 100)
    one.side.disconnect(session)
    notes = [note for note in two.told if isinstance(note, NoteCame)]
    assert [note.payload for note in notes] == [b"%d" % i for i in range(100)]
    assert {note.incarnation for note in notes} == {one.incarnation}


def test_what_was_said_before_hanging_up_arrives(ends: tuple[End, End]) -> None:
    one, two = ends
    region = two.regions.add(memoryview(bytearray(64)), target=True)
    lease = LeaseId(two.incarnation, 1)
    two.regions.grant(RemoteLease(lease, {region.region_id: np.array([[0, 64]], np.int64)}))
    _, link = one.side.connect(two.descriptor())
    one.side.notify(link, lease, b"last")
    one.side.hang_up(link)
    one.side.hang_up(link)
    two.wait(lambda: bool(two.told))
    assert two.told == [NoteCame(one.incarnation, lease, b"last")]


def test_senders_hear_of_a_revoked_lease(ends: tuple[End, End]) -> None:
    one, two = ends
    lease = LeaseId(two.incarnation, 7)
    two.side.revoke(lease)
    two.side.listen()
    _, link = one.side.connect(two.descriptor())
    two.side.revoke(lease)
    half = link.half
    assert isinstance(half, Outgoing)
    deadline = time.monotonic() + 20
    while lease not in half.revoked:
        assert time.monotonic() < deadline
        select.select([], [], [], 0.001)
    assert two.told == []


class Stopped:
    """A sender that is welcomed and reads nothing any more, as a stopped process does."""

    def __init__(self, end: End) -> None:
        descriptor = end.descriptor()
        home = decode_home(end.incarnation, descriptor.blob)
        self.sock = dial(home.addresses[0], time.monotonic() + 5)
        self.incarnation = Incarnation(os.urandom(16))
        me = Identity(self.incarnation, encode_home(self.incarnation, Home(this_origin())))
        greet(self.sock, me, end.incarnation, (1, 1), time.monotonic() + 5)
        self.sock.settimeout(10)

    def __enter__(self) -> Stopped:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def read_on(self, until: LeaseId) -> set[LeaseId]:
        """What it is asked to stop, until this is."""
        asked, reader = set[LeaseId](), FrameReader(FROM_RECEIVER)
        while until not in asked:
            frame = reader.receive(self.sock)
            if frame is not None and frame[0] is Kind.REVOKE:
                asked.add(unpack_revoke(frame[1]))
        return asked


def passed(end: End) -> None:
    """What was asked of the side channel's thread before is done."""
    thread = end.side._loop._thread
    assert thread is not None
    barrier = Barrier(thread)
    assert end.side._loop._poller.call(barrier.reach)
    barrier.wait()


def revoke_for_a_stopped_sender(end: End) -> None:
    """Far more leases than its socket takes: little is kept, what it says is read all the same,
    and once it reads again it is asked to stop all that still counts."""
    region = end.regions.add(memoryview(bytearray(64)), target=True)
    stands = LeaseId(end.incarnation, 1)
    end.regions.grant(RemoteLease(stands, {region.region_id: np.array([[0, 64]], np.int64)}))
    with Stopped(end) as sender:
        revoke_many(end, sender, stands)


def revoke_many(end: End, sender: Stopped, stands: LeaseId) -> None:
    for counter in range(2, 20_000):
        end.side.revoke(LeaseId(end.incarnation, counter))
        if counter > 1000:
            end.side.release(LeaseId(end.incarnation, counter))
        if counter % 1000 == 0:
            passed(end)
    passed(end)
    (link,) = end.side._loop._book.links
    assert isinstance(link.half, Incoming)
    assert len(link.out) + len(link.half.replies) < 16, "they pile up"
    sender.sock.sendall(pack_end(ProtocolEnd(1, stands, True, b"note")))
    end.wait(lambda: bool(end.told))
    assert end.told == [NoteCame(sender.incarnation, stands, b"note")]
    last = LeaseId(end.incarnation, 1_000_000)
    end.side.revoke(last)
    asked = sender.read_on(last)
    assert {lease.counter for lease in asked} >= {*range(2, 1001), last.counter}
    assert stands not in asked


def test_a_sender_that_reads_nothing_is_asked_again_later() -> None:
    """D23: what is kept for it is bounded, and nothing of it is held up."""
    end = End()
    try:
        revoke_for_a_stopped_sender(end)
    finally:
        assert end.side.close(5.0)


def test_a_frame_for_each_lease_piles_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """D23: the check fails on the former rule."""

    def always(half: Incoming, lease: LeaseId, *, has_backlog: bool) -> None:
        half.replies.append(pack_revoke(lease))

    monkeypatch.setattr(Incoming, "recall", always)
    end = End()
    try:
        with pytest.raises(AssertionError, match="pile up"):
            revoke_for_a_stopped_sender(end)
    finally:
        assert end.side.close(5.0)


def test_a_new_session_hears_of_what_was_revoked_before() -> None:
    """A session that broke may have taken the word along; its successor has the same leases."""
    end = End()
    try:
        wanted, over = (LeaseId(end.incarnation, counter) for counter in (1, 2))
        for lease in (wanted, over):
            end.side.revoke(lease)
        end.side.release(over)
        with Stopped(end) as sender:
            assert sender.read_on(wanted) == {wanted}
    finally:
        assert end.side.close(5.0)


def test_closing_says_that_nothing_of_this_life_lands_any_more() -> None:
    one, two = End(), End()
    try:
        stale = two.descriptor()
        one.side.connect(stale)
        assert two.side.close(5.0)
        one.wait(lambda: bool(one.told))
        (death,) = one.told
        assert isinstance(death, PeerDied)
        assert death.incarnation == two.incarnation
        with pytest.raises(PeerGone):
            one.side.connect(stale)
    finally:
        one.side.close(5.0)


def test_other_secrets_and_other_lives_are_refused() -> None:
    one, two = End(SideOptions(secret=SECRET)), End(SideOptions(secret=SECRET + "!"))
    try:
        with pytest.raises(TransportError, match="authentication failed"):
            one.side.connect(two.descriptor())
        stranger = attrs.evolve(two.descriptor(), incarnation=Incarnation(b"x" * 16))
        with pytest.raises(TransportError):
            one.side.connect(stranger)
    finally:
        one.side.close(5.0)
        two.side.close(5.0)


def test_options_that_cannot_be() -> None:
    for options, why in (
        (SideOptions(secret="short"), "at least 16"),
        (SideOptions(families=["radio"]), "families must be"),
    ):
        with pytest.raises(TransportError, match=why):
            SideChannel(Incarnation(b"x" * 16), RegionTable(), options)
    assert "secret" not in repr(SideOptions(secret=SECRET)).replace("secret=None", "")


def test_a_notification_has_a_bound() -> None:
    check_notify(None)
    check_notify(bytes(MAX_PAYLOAD_BYTES))
    with pytest.raises(TransportError, match="at most"):
        check_notify(bytes(MAX_PAYLOAD_BYTES + 1))
