"""The ZMQ channel: never blocks, never grows, and no wake-up is lost. Real sockets only."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import pytest
import zmq

from pdcore.control.base import ControlChannel
from pdcore.control.zmq import (
    ChannelOptions,
    Poller,
    ZmqChannel,
    bracketed,
    configure,
    is_numeric_address,
    is_tcp_address,
    new_context,
)
from pdcore.errors import ConfigError, OwnershipError

WAIT_S = 10.0


@contextlib.contextmanager
def channels(count: int, options: ChannelOptions | None = None) -> Iterator[list[ZmqChannel]]:
    made = [ZmqChannel(options=options) for _ in range(count)]
    try:
        yield made
    finally:
        for channel in made:
            channel.close()


@contextlib.contextmanager
def must_not_block(limit_s: float) -> Iterator[None]:
    """AssertionError out of whatever call is still running after ``limit_s``."""

    def ring(signum: int, at: FrameType | None) -> None:
        raise AssertionError(f"a call blocked for {limit_s} s")

    former = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)


def collect(channel: ZmqChannel, count: int, limit: int = 256) -> list[bytes]:
    poller = Poller([channel])
    frames: list[bytes] = []
    while len(frames) < count:
        assert poller.wait(WAIT_S), f"only {len(frames)} of {count} frames came"
        frames += channel.receive(limit)
    return frames


def dead_address() -> str:
    """A port that was free a moment ago and that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def num_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_frames_go_both_ways_in_order() -> None:
    with channels(2) as (one, other):
        conforming: ControlChannel = one
        assert conforming.address.startswith("tcp://127.0.0.1:")
        for i in range(300):
            assert one.send(other.address, b"%d" % i)
        assert collect(other, 300) == [b"%d" % i for i in range(300)]
        assert other.send(one.address, b"back")
        assert collect(one, 1) == [b"back"]
        assert one.counters.num_sent == 300
        assert other.counters.num_received == 300


def test_receive_takes_at_most_limit_and_never_blocks() -> None:
    with channels(2) as (one, other), must_not_block(WAIT_S):
        assert other.receive() == []
        for _ in range(5):
            one.send(other.address, b"x")
        assert Poller([other]).wait(WAIT_S)
        assert len(other.receive(limit=1)) == 1
        assert len(collect(other, 4, limit=2)) == 4


def check_sends_never_block(send: Callable[[bytes], object], limit_s: float) -> None:
    with must_not_block(limit_s):
        for _ in range(10_000):
            send(b"frame")


def test_d24_ten_thousand_sends_to_a_dead_peer_never_block() -> None:
    """D24: a PUSH socket with its defaults blocks the scheduling thread after 1,000."""
    with channels(1) as (channel,):
        to = dead_address()
        check_sends_never_block(lambda frame: channel.send(to, frame), WAIT_S)
        mark = ChannelOptions().send_high_water_mark
        assert channel.counters.num_sent <= mark
        assert channel.counters.num_refused == 10_000 - channel.counters.num_sent
        assert not channel.send(to, b"one more"), "a full queue is a refusal, not a wait"

    context = new_context()
    seed = context.socket(zmq.PUSH)  # the seed's rule: defaults, blocking send
    seed.connect(dead_address())
    with pytest.raises(AssertionError, match="blocked"):
        check_sends_never_block(seed.send, 0.3)
    seed.close(linger=0)
    context.term()


def check_descriptors_stay_bounded(send: Callable[[str], object], num_peers: int) -> None:
    before = num_fds()
    for i in range(num_peers):
        send(f"tcp://127.{i // 62_500 + 1}.{i // 250 % 250}.{i % 250 + 1}:9")
        grown = num_fds() - before if i % 250 == 0 else 0
        assert grown < 300, f"{grown} descriptors after {i + 1} peers"


def test_d24_peers_that_come_and_go_do_not_use_up_descriptors() -> None:
    """SGLang I31766, PR31922, 34450: one cached socket per ephemeral peer, never closed."""
    with channels(1, ChannelOptions(max_peers=16)) as (channel,):
        check_descriptors_stay_bounded(lambda to: channel.send(to, b"x"), 5_000)
        assert channel.num_peers == 16
        # Closed sockets are reaped by another thread; a send in between may be refused.
        assert channel.counters.num_evicted > 1_000

    context = new_context()
    cache: dict[str, zmq.Socket[bytes]] = {}  # the seed's rule

    def send_seed(to: str) -> None:
        cache[to] = cache.get(to) or context.socket(zmq.PUSH)
        cache[to].connect(to)

    with pytest.raises(AssertionError, match="descriptors after"):
        check_descriptors_stay_bounded(send_seed, 600)
    context.destroy(linger=0)


def test_inbound_peers_that_leave_give_their_descriptors_back() -> None:
    with channels(1) as (channel,):
        before = num_fds()
        for _ in range(50):
            with channels(1) as (peer,):
                assert peer.send(channel.address, b"hello")
                collect(channel, 1)
        # The I/O thread closes a lost connection when it next looks; the last ones may be open.
        assert num_fds() - before < 20


def test_eviction_takes_the_least_recently_used() -> None:
    with channels(4, ChannelOptions(max_peers=2)) as (sender, a, b, c):
        sender.send(a.address, b"1")
        sender.send(b.address, b"2")
        assert collect(a, 1) + collect(b, 1) == [b"1", b"2"]
        sender.send(a.address, b"3")
        sender.send(c.address, b"4")  # b goes
        assert collect(a, 1) + collect(c, 1) == [b"3", b"4"]
        assert sender.counters.num_evicted == 1
        sender.send(a.address, b"5")
        assert sender.counters.num_evicted == 1, "a was kept"
        assert collect(a, 1) == [b"5"]


def test_forget_drops_what_a_dead_peer_never_read() -> None:
    """D24: sockets of evicted peers are dropped."""
    with channels(1) as (channel,):
        to = dead_address()
        while channel.send(to, b"x"):
            pass
        channel.forget(to)
        assert channel.num_peers == 0
        assert channel.send(to, b"x"), "a new socket has an empty queue"
        channel.forget("tcp://10.1.1.1:1")  # never known: nothing happens


def test_a_restarted_peer_at_the_same_address_is_reached_again() -> None:
    with channels(1) as (channel,):
        first = ZmqChannel()
        port = int(first.address.rpartition(":")[2])
        channel.send(first.address, b"1")
        assert collect(first, 1) == [b"1"]
        first.close()
        second = ZmqChannel(port=port)
        try:
            channel.send(second.address, b"2")
            assert collect(second, 1) == [b"2"]
        finally:
            second.close()


@pytest.mark.parametrize(
    ("address", "is_valid"),
    [
        ("tcp://127.0.0.1:1", True),
        ("tcp://node-7.cluster:65535", True),
        ("tcp://[::1]:40000", True),
        ("tcp://[fe80::1%eth0]:40000", True),
        ("tcp://127.0.0.1:0", False),
        ("tcp://127.0.0.1:65536", False),
        ("tcp://127.0.0.1:*", False),
        ("tcp://*:5555", False),
        ("tcp://::1:40000", False),
        ("tcp://[127.0.0.1]:40000", False),
        ("tcp://127.0.0.1", False),
        ("tcp://127.0.0.1:1;tcp://127.0.0.1:2", False),
        ("ipc:///tmp/x", False),
        ("inproc://x", False),
        ("tcp://127.0.0.1:１", False),
        ("", False),
    ],
)
def test_only_plain_tcp_addresses_are_connected_to(address: str, is_valid: bool) -> None:
    """D41: ``reply_to`` is a peer's word; it opens no file and no other transport."""
    assert is_tcp_address(address) is is_valid
    if not is_valid:
        with channels(1) as (channel,):
            assert not channel.send(address, b"x")
            assert channel.num_peers == 0


def test_ipv6_works() -> None:
    try:
        one = ZmqChannel("::1")
    except ConfigError as error:
        pytest.skip(f"no IPv6 here: {error}")
    with channels(1) as (other,):
        try:
            assert one.address.startswith("tcp://[::1]:")
            assert other.send(one.address, b"x")
            assert collect(one, 1) == [b"x"]
        finally:
            one.close()
    assert bracketed("::1") == "[::1]"
    assert bracketed("[::1]") == "[::1]"
    assert bracketed("127.0.0.1") == "127.0.0.1"


def test_localhost_is_resolved_once_so_that_both_ends_mean_the_same() -> None:
    channel = ZmqChannel("localhost")
    assert channel.address.rpartition(":")[0] in ("tcp://127.0.0.1", "tcp://[::1]")
    channel.close()


def test_a_wildcard_needs_an_address_to_tell_others() -> None:
    """R15: never auto-detected."""
    with pytest.raises(ConfigError, match="set advertise_host"):
        ZmqChannel("0.0.0.0")
    channel = ZmqChannel("0.0.0.0", "10.0.0.9")
    assert channel.address.startswith("tcp://10.0.0.9:")
    channel.close()


def test_an_address_that_cannot_be_bound_is_a_config_error() -> None:
    with channels(1) as (channel,):
        port = int(channel.address.rpartition(":")[2])
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}: Address"):
            ZmqChannel(port=port)
    with pytest.raises(ConfigError, match=r"cannot listen on 203\.0\.113\.1:0"):
        ZmqChannel("203.0.113.1")


def test_frames_over_the_limit_are_refused_here_and_cut_off_there() -> None:
    with channels(1, ChannelOptions(max_message_bytes=1000)) as (small,), channels(1) as (big,):
        assert not small.send(big.address, b"x" * 1001)
        assert big.send(small.address, b"x" * 1001)  # the peer will drop the connection
        assert big.send(small.address, b"y")
        assert not Poller([small]).wait(0.2) or small.receive() in ([], [b"y"])


def test_garbage_on_the_port_harms_nobody() -> None:
    with channels(2) as (one, other):
        host, port = "127.0.0.1", int(other.address.rpartition(":")[2])
        for noise in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, b""):
            with socket.create_connection((host, port), timeout=WAIT_S) as raw:
                raw.sendall(noise)
        one.send(other.address, b"x")
        assert collect(other, 1) == [b"x"]


def check_no_wakeup_is_lost(channel: ZmqChannel, wait: Callable[[float], bool], count: int) -> None:
    """Everything has arrived; one frame is taken per wake-up."""
    for i in range(count):
        assert wait(1.0), f"asleep with {count - i} frames unread"
        assert len(channel.receive(limit=1)) == 1


def test_edge_triggered_wakeups_are_not_lost() -> None:
    """pyzmq #2173 and its like: reading one frame hides the others from the descriptor."""
    with channels(2) as (one, other):
        for _ in range(50):
            one.send(other.address, b"x")
        poller = Poller([other])
        check_no_wakeup_is_lost(other, poller.wait, 50)
        assert not poller.wait(0.0)

        for _ in range(50):
            one.send(other.address, b"x")
        assert poller.wait(WAIT_S)
        fd = other.fileno()
        assert fd is not None

        def bare(timeout_s: float) -> bool:
            """What select on the descriptor alone sees: the rule of a first attempt."""
            return bool(select.select([fd], [], [], min(timeout_s, 0.2))[0])

        with pytest.raises(AssertionError, match="asleep with"):
            check_no_wakeup_is_lost(other, bare, 50)


def test_the_poller_wakes_for_plain_descriptors_and_times_out() -> None:
    with channels(1) as (channel,):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            poller = Poller([channel], [ours.fileno()])
            assert not poller.wait(0.0)
            assert not poller.wait(0.001)
            theirs.send(b"!")
            assert poller.wait(WAIT_S)
            assert poller.wait(None), "level-triggered until its owner reads it"
            ours.recv(1)
            assert not poller.wait(0.0)
            channel.send(channel.address, b"to myself")
            assert poller.wait(WAIT_S)


def test_another_threads_call_is_found_at_once() -> None:
    """SGLang PR29984: a socket has one owner."""
    channel = ZmqChannel(thread_id=threading.get_ident)
    caught: list[OwnershipError] = []

    def intrude() -> None:
        try:
            channel.send("tcp://127.0.0.1:9", b"x")
        except OwnershipError as error:
            caught.append(error)

    thread = threading.Thread(target=intrude)
    thread.start()
    thread.join()
    assert len(caught) == 1
    assert "belongs to the thread" in str(caught[0])
    channel.close()


def test_d49_channels_share_nothing() -> None:
    """D49: the seed's class-level cache was closed for all by the first shutdown."""
    with channels(3) as (one, other, third):
        one.send(third.address, b"1")
        collect(third, 1)
        one.close()
        assert other.send(third.address, b"2")
        assert collect(third, 1) == [b"2"]


def test_a_shared_context_is_left_alone() -> None:
    context = new_context()
    one, other = ZmqChannel(context=context), ZmqChannel(context=context)
    one.close()
    assert other.send(other.address, b"x")
    assert collect(other, 1) == [b"x"]
    other.close()
    context.term()


def test_close_is_idempotent_and_never_waits_for_a_dead_peer() -> None:
    channel = ZmqChannel()
    to = dead_address()
    channel.send(to, b"x")
    with must_not_block(WAIT_S):  # the default linger would wait for ever
        channel.close()
        channel.close()
    assert channel.fileno() is None
    assert channel.receive() == []
    assert not channel.send(to, b"x")


def test_close_may_let_last_frames_leave() -> None:
    with channels(1) as (other,):
        channel = ZmqChannel()
        for i in range(20):
            channel.send(other.address, b"%d" % i)
        channel.close(linger_s=WAIT_S)
        assert len(collect(other, 20)) == 20


def test_every_socket_is_bounded() -> None:
    context = new_context()
    sock = context.socket(zmq.PUSH)
    configure(sock, ChannelOptions())
    assert sock.getsockopt(zmq.LINGER) == 0
    assert int(sock.getsockopt(zmq.SNDHWM)) == ChannelOptions().send_high_water_mark
    assert int(sock.getsockopt(zmq.RCVHWM)) > 0
    assert sock.getsockopt(zmq.MAXMSGSIZE) == 4 << 20
    sock.close()
    context.term()


@pytest.mark.parametrize(
    ("address", "is_numeric"),
    [
        ("tcp://127.0.0.1:80", True),
        ("tcp://[::1]:80", True),
        ("tcp://localhost:80", True),
        ("tcp://no-such-host.example:1", False),
        ("tcp://127.0.0.1:0", False),
        ("ipc:///tmp/x", False),
    ],
)
def test_nothing_that_needs_a_resolver_is_connected_to(address: str, is_numeric: bool) -> None:
    """libzmq resolves on the thread that moves every frame, at each reconnect: one peer with
    a name that does not resolve stopped the whole channel."""
    assert is_numeric_address(address) is is_numeric
