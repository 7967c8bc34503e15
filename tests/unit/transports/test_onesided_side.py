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
from pdcore.transports.socket_links import NoteCame, Told
from pdcore.transports.socket_outgoing import Outgoing
from pdcore.transports.socket_wire import MAX_PAYLOAD_BYTES
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
