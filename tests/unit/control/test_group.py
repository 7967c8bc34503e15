"""Links of a group over ZeroMQ: the ranks of one life, and nobody else."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest
import zmq

from pdcore.control.group import ZmqGroupPort
from pdcore.control.link import WorkerId
from pdcore.control.zmq import Poller
from pdcore.errors import ConfigError, GroupBroken, OwnershipError
from pdcore.types import Incarnation

BOUND_S = 20.0


def fresh_link() -> str:
    return f"ipc://@pdcore-test-{secrets.token_hex(8)}#{secrets.token_hex(16)}"


def member(rank: int) -> WorkerId:
    return WorkerId(rank, Incarnation(bytes([rank + 1]) * 16))


@contextmanager
def group(size: int, pools: list[int] | None = None) -> Iterator[list[ZmqGroupPort]]:
    """Ranks that have met; each agreed to the smallest pool."""
    link = fresh_link()
    # A follower may come first: the hub need not listen yet.
    ports = [ZmqGroupPort(link, member(rank), size) for rank in reversed(range(size))][::-1]
    pools = pools or [100] * size
    agreed: dict[int, int] = {}

    def meet(rank: int) -> None:
        agreed[rank] = ports[rank].meet(pools[rank], BOUND_S)

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(BOUND_S)
    assert agreed == dict.fromkeys(range(size), min(pools))
    try:
        yield ports
    finally:
        for port in ports:
            port.close()


def heard(port: ZmqGroupPort, count: int) -> list[tuple[int, bytes]]:
    found: list[tuple[int, bytes]] = []
    while len(found) < count:
        assert Poller([port]).wait(BOUND_S), f"only {found}"
        found += port.receive()
    return found


def test_ranks_meet_and_agree_on_the_smallest_pool() -> None:
    """Ranks that decide alike need pools of one size; memory is measured by each process."""
    with group(3, [70, 90, 50]):
        pass


def test_what_is_said_arrives_in_order_at_who_was_meant() -> None:
    with group(3) as (hub, one, two):
        for number in range(100):
            hub.send(1, b"%d" % number)
        hub.send(2, b"two")
        one.send(0, b"from one")
        two.send(0, b"from two")
        assert heard(one, 100) == [(0, b"%d" % n) for n in range(100)]
        assert heard(two, 1) == [(0, b"two")]
        assert sorted(heard(hub, 2)) == [(1, b"from one"), (2, b"from two")]


def test_a_stranger_is_not_heard() -> None:
    """D40: any process of the host may connect to an abstract socket."""
    link = fresh_link()
    hub = ZmqGroupPort(link, member(0), 2)
    where, _, _ = link.partition("#")
    stranger = ZmqGroupPort(f"{where}#{secrets.token_hex(16)}", member(1), 2)
    nobody: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    nobody.connect(where)
    stranger.send(0, b"me too")
    nobody.send(b"and me")
    friend = ZmqGroupPort(link, member(1), 2)
    friend.send(0, b"it is me")
    assert heard(hub, 1) == [(1, b"it is me")]
    nobody.close(linger=0)
    for port in (hub, stranger, friend):
        port.close()


def test_a_hub_that_begins_at_once_loses_nothing() -> None:
    """Its first word may be there together with the answer to the introduction."""
    link = fresh_link()
    hub, one = ZmqGroupPort(link, member(0), 2), ZmqGroupPort(link, member(1), 2)
    one.send(0, msgspec.msgpack.encode([80]))
    assert hub.meet(100, BOUND_S) == 80
    hub.send(1, b"begin")
    # Both messages are on their way before it looks for the first.
    assert Poller([one]).wait(BOUND_S)
    assert one.meet(80, BOUND_S) == 80
    assert heard(one, 1) == [(0, b"begin")]
    for port in (hub, one):
        port.close()


def test_a_rank_that_does_not_come_is_counted_out() -> None:
    hub = ZmqGroupPort(fresh_link(), member(0), 3)
    with pytest.raises(GroupBroken, match="met 0 of 2 ranks"):
        hub.meet(10, 0.05)
    hub.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_who_is_told_to_stop_waits_for_nobody(rank: int) -> None:
    """D59: Ctrl-C while another rank still loads; its time to get ready may be ten minutes."""
    port = ZmqGroupPort(fresh_link(), member(rank), 2)
    answers = iter([False, False, True])
    with pytest.raises(GroupBroken, match=f"rank {rank} was told to stop before"):
        port.meet(10, 600.0, lambda: next(answers))
    port.close()


def test_a_rank_that_is_gone_breaks_the_group() -> None:
    with group(2) as (hub, one):
        one.close()

        def speak_on() -> None:
            for _ in range(100_000):
                hub.send(1, b"x")

        with pytest.raises(GroupBroken, match="rank 1 of the group cannot be reached"):
            speak_on()


@pytest.mark.parametrize(
    "link",
    ["", "tcp://127.0.0.1:1#" + "0" * 32, "ipc://@x", "ipc://@x#zz", "ipc:///tmp/x#" + "0" * 32],
)
def test_a_malformed_link_is_a_mistake_of_the_configuration(link: str) -> None:
    with pytest.raises(ConfigError, match=r"must be ipc://@name#secret"):
        ZmqGroupPort(link, member(0), 2)


def test_a_link_that_is_taken_is_a_mistake_too() -> None:
    link = fresh_link()
    first = ZmqGroupPort(link, member(0), 2)
    with pytest.raises(ConfigError, match="cannot be opened"):
        ZmqGroupPort(link, member(0), 2)
    first.close()


def test_a_port_belongs_to_its_thread() -> None:
    """D24."""
    thread = [1]
    port = ZmqGroupPort(fresh_link(), member(0), 2, thread_id=lambda: thread[0])
    thread[0] = 2
    with pytest.raises(OwnershipError):
        port.receive()
    port.close()
