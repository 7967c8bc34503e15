"""The in-memory network: the contract of a channel, and faults that replay from a seed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcore.clock import ManualClock
from pdcore.control.base import ControlChannel
from pdcore.control.memory import FaultPlan, MemoryNetwork
from pdcore.errors import ConfigError

PLAN = FaultPlan(drop=0.2, duplicate=0.2, reorder=0.5, min_delay_s=0.01, max_delay_s=0.5)


def run_to_the_end(network: MemoryNetwork, clock: ManualClock) -> None:
    """Advance from arrival to arrival until nothing is on its way."""
    while (due_s := network.next_due_s()) is not None:
        clock.advance(max(0.0, due_s - clock.monotonic()))
        network.deliver_due()


def world(plan: FaultPlan | None = None, **options: int) -> tuple[ManualClock, MemoryNetwork]:
    clock = ManualClock()
    return clock, MemoryNetwork(clock, plan, **options)


def test_a_perfect_network_delivers_in_order_at_once() -> None:
    _, network = world()
    a, b = network.channel("a"), network.channel("b")
    conforming: ControlChannel = a
    assert conforming.address == "mem://a"
    assert conforming.fileno() is None
    for i in range(5):
        assert a.send(b.address, b"%d" % i)
    assert b.receive(limit=2) == [b"0", b"1"]
    assert b.receive() == [b"2", b"3", b"4"]
    assert b.receive() == []
    assert b.send(a.address, b"back")
    assert a.receive() == [b"back"]


def test_delays_follow_the_clock() -> None:
    clock, network = world(FaultPlan(min_delay_s=1.0, max_delay_s=1.0))
    a, b = network.channel("a"), network.channel("b")
    a.send(b.address, b"x")
    assert b.receive() == []
    assert network.next_due_s() == 1.0
    clock.advance(1.0)
    assert b.receive() == [b"x"]
    assert network.next_due_s() is None


def test_without_reorder_each_pair_is_first_in_first_out() -> None:
    clock, network = world(FaultPlan(max_delay_s=1.0), seed=1)
    a, b = network.channel("a"), network.channel("b")
    for i in range(50):
        a.send(b.address, b"%02d" % i)
    run_to_the_end(network, clock)
    received = b.receive()
    assert received == sorted(received)
    assert len(received) == 50


def story(seed: int) -> tuple[list[bytes], str]:
    clock, network = world(PLAN, seed=seed)
    a, b = network.channel("a"), network.channel("b")
    for i in range(200):
        a.send(b.address, b"%03d" % i)
        clock.advance(0.001)
    run_to_the_end(network, clock)
    return b.receive(1_000), repr(network.counters)


@given(st.integers(0, 2**32))
def test_a_seed_replays_exactly(seed: int) -> None:
    assert story(seed) == story(seed)


def test_faults_happen() -> None:
    received, counters = story(7)
    assert story(8)[0] != received
    sent = {b"%03d" % i for i in range(200)}
    assert len(set(received)) < 200, "some are lost"
    assert len(received) > len(set(received)), "some come twice"
    assert received != sorted(received), "some overtake"
    assert set(received) <= sent, "none is invented"
    assert "num_sent=200" in counters


def test_manual_delivery_is_the_tests_choice() -> None:
    _, network = world(manual=True)
    a, b = network.channel("a"), network.channel("b")
    for text in (b"1", b"2", b"3"):
        a.send(b.address, text)
    assert b.receive() == []
    first, second, third = network.pending()
    assert (first.sender, first.to, first.frame) == ("mem://a", "mem://b", b"1")
    copy = network.duplicate(third.sequence)
    network.drop(second.sequence)
    for sequence in (third.sequence, first.sequence, copy):
        assert network.deliver(sequence)
    assert b.receive() == [b"3", b"1", b"3"]
    with pytest.raises(KeyError):
        network.deliver(second.sequence)


def test_queues_are_bounded_and_a_full_one_refuses() -> None:
    """D24: as the real channel, whoever is slow or dead."""
    _, network = world(high_water_mark=10)
    a, b = network.channel("a"), network.channel("b")
    for to in (b.address, "mem://nobody"):
        assert [a.send(to, b"x") for _ in range(12)] == [True] * 10 + [False] * 2
    assert network.counters.num_refused == 4
    assert len(b.receive()) == 10
    assert a.send(b.address, b"x"), "there is room again"
    assert not a.send("tcp://127.0.0.1:5", b"x")


def test_frames_wait_for_an_address_that_comes_late() -> None:
    clock, network = world()
    a = network.channel("a")
    a.send("mem://late", b"x")
    run_to_the_end(network, clock)
    late = network.channel("late")
    assert late.receive() == [b"x"]


def test_a_partition_loses_frames_until_it_heals() -> None:
    _, network = world()
    a, b, c = (network.channel(name) for name in "abc")
    network.partition(a.address, b.address)
    for sender, to in ((a, b), (b, a), (a, c)):
        sender.send(to.address, b"lost?")
    assert (a.receive(), b.receive(), c.receive()) == ([], [], [b"lost?"])
    network.heal()
    a.send(b.address, b"x")
    assert b.receive() == [b"x"]
    assert network.counters.num_dropped == 2


def test_forget_drops_what_was_on_its_way_to_one_peer() -> None:
    _, network = world(manual=True)
    a, b, c = (network.channel(name) for name in "abc")
    a.send(b.address, b"1")
    a.send(c.address, b"2")
    a.forget(b.address)
    assert [flight.to for flight in network.pending()] == [c.address]


def test_close_and_restart_at_the_same_address() -> None:
    _, network = world()
    a, b = network.channel("a"), network.channel("b")
    a.send(b.address, b"last words")
    a.close()
    assert b.receive() == [b"last words"], "what a dead process sent may still arrive"
    a.close()
    assert not a.send(b.address, b"x")
    assert a.receive() == []
    b.send("mem://a", b"for whoever is there")
    again = network.channel("a")
    a.close()  # the former's close must not take the successor's place
    assert again.receive() == [b"for whoever is there"]
    with pytest.raises(ConfigError, match="mem://a is taken"):
        network.channel("a")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"drop": 1.5}, "drop is a chance between 0 and 1, got 1.5"),
        ({"reorder": -0.1}, "reorder is a chance"),
        ({"min_delay_s": 2.0}, "need 0 <= min_delay_s <= max_delay_s, got 2.0, 0.0"),
    ],
)
def test_a_plan_must_make_sense(options: dict[str, float], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        FaultPlan(**options)
    assert text in str(caught.value)


def test_many_frames_stay_cheap() -> None:
    """Delivery is by heap: 20,000 frames on their way are no quadratic walk."""
    clock, network = world(FaultPlan(max_delay_s=1.0, reorder=1.0), high_water_mark=100_000)
    a, b = network.channel("a"), network.channel("b")
    for i in range(20_000):
        a.send(b.address, b"%d" % i)
    run_to_the_end(network, clock)
    assert len(b.receive(100_000)) == 20_000
    assert repr(network) == "MemoryNetwork(2 channels, 0 on their way)"


def test_a_partition_may_be_of_one_direction_and_end_in_one() -> None:
    network = MemoryNetwork(ManualClock())
    one, other = network.channel("one"), network.channel("other")
    network.partition(one.address, other.address, one_way=True)
    one.send(other.address, b"lost")
    other.send(one.address, b"heard")
    assert other.receive() == []
    assert one.receive() == [b"heard"]
    network.partition(one.address, other.address)
    network.heal(other.address, one.address)
    one.send(other.address, b"lost")
    other.send(one.address, b"again")
    assert other.receive() == []
    assert one.receive() == [b"again"]
    network.heal()
    one.send(other.address, b"heard")
    assert other.receive() == [b"heard"]
