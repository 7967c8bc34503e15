from __future__ import annotations

import os
import select
import sys
from collections.abc import Iterator

import pytest

from pdcore.transports.base import HandleStatus, Notification, PeerDied
from pdcore.transports.torchdist_channel import End
from pdcore.transports.torchdist_hub import Ended, Hub
from pdcore.types import Incarnation

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="torchdist is Linux")
PEER = Incarnation(b"p" * 16)
OTHER = Incarnation(b"o" * 16)


@pytest.fixture
def hub() -> Iterator[Hub]:
    made = Hub()
    yield made
    made.close(keep_bell=False)


def rings(hub: Hub) -> bool:
    return bool(select.select([hub.fileno()], [], [], 0)[0])


def test_what_happened_comes_once_and_in_order(hub: Hub) -> None:
    items = [
        Notification(PEER, b"1"),
        Ended(7, HandleStatus.DONE, True, ""),
        Notification(PEER, b"2"),
    ]
    assert not rings(hub)
    for item in items:
        hub.put(item)
    assert rings(hub)
    assert hub.drain() == items
    assert not rings(hub)
    assert hub.drain() == []


def test_a_death_is_told_with_the_last_link_of_its_incarnation(hub: Hub) -> None:
    """PeerDied says that nothing of it lands any more: not while another thread may still
    place a chunk of it."""
    for incarnation in (PEER, PEER, OTHER):
        assert hub.opened(incarnation)
    hub.ended(PEER, End.DIED, "gone")
    assert hub.drain() == []
    hub.ended(PEER, End.LOST, "unreachable")
    assert hub.drain() == [PeerDied(PEER, True, "gone")]


def test_a_death_is_told_once(hub: Hub) -> None:
    """Nobody of a dead incarnation comes in again."""
    assert hub.opened(PEER)
    assert hub.opened(PEER)
    hub.ended(PEER, End.CLOSED, "closed")
    assert not hub.opened(PEER)
    hub.ended(PEER, End.DIED, "gone")
    assert len(hub.drain()) == 1
    assert not hub.opened(PEER)


@pytest.mark.parametrize("end", [End.DISCONNECTED, End.LOST])
def test_no_other_end_proves_a_death(hub: Hub, end: End) -> None:
    assert hub.opened(PEER)
    hub.ended(PEER, end, "")
    assert hub.drain() == []
    assert hub.opened(PEER)


def test_a_thread_that_is_left_over_may_still_ring() -> None:
    hub = Hub()
    bell = hub.fileno()
    hub.close(keep_bell=True)
    hub.put(Notification(PEER, b"late"))
    assert hub.drain() == [Notification(PEER, b"late")]
    hub.close(keep_bell=False)
    with pytest.raises(OSError, match="descriptor"):
        os.fstat(bell)
