"""The leader link over real sockets: refusals at once, nothing lost, nobody poses as a worker."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import threading
from collections.abc import AsyncIterator, Callable, Coroutine

import attrs
import pytest
import zmq

from pdcore.control.codec import encode_link
from pdcore.control.link import (
    LINK_OPTIONS,
    LeaderLink,
    WorkerId,
    WorkerLink,
    pack_identity,
    split_address,
    unpack_identity,
)
from pdcore.control.messages import (
    Abort,
    Accepted,
    LeaderMessage,
    Stop,
    Tokens,
    WorkerHealth,
    WorkerMessage,
    WorkerReady,
)
from pdcore.control.zmq import ChannelOptions, Poller
from pdcore.errors import CodecError, ConfigError, Overloaded, OwnershipError
from pdcore.types import Incarnation, RoomKey

WAIT_S = 10.0
KEY = RoomKey(5, 6)
A = WorkerId(0, Incarnation(b"a" * 16))
B = WorkerId(0, Incarnation(b"b" * 16))
OTHER_RANK = WorkerId(1, Incarnation(b"c" * 16))


def ready(worker: WorkerId) -> WorkerReady:
    return WorkerReady(
        worker.rank, 0, worker.incarnation, "tcp://127.0.0.1:5", 2048, 8192, 50_000, 100, "shm"
    )


class Leader:
    """A LeaderLink with an inbox that can be awaited."""

    def __init__(self, link: LeaderLink, inbox: asyncio.Queue[tuple[int, WorkerMessage]]) -> None:
        self.link = link
        self._inbox = inbox

    async def next(self) -> tuple[int, WorkerMessage]:
        return await asyncio.wait_for(self._inbox.get(), WAIT_S)

    def is_quiet(self) -> bool:
        return self._inbox.empty()

    def connect(self, worker: WorkerId, **options: int) -> WorkerLink:
        return WorkerLink(self.link.address, worker, **options)


@contextlib.asynccontextmanager
async def leading(options: ChannelOptions = LINK_OPTIONS) -> AsyncIterator[Leader]:
    inbox: asyncio.Queue[tuple[int, WorkerMessage]] = asyncio.Queue()
    link = LeaderLink(lambda rank, message: inbox.put_nowait((rank, message)), options=options)
    await link.start()
    try:
        yield Leader(link, inbox)
    finally:
        link.close()


def in_loop(test: Callable[[], Coroutine[object, object, None]]) -> Callable[[], None]:
    """Runs an async test in a loop of its own; no plugin needed."""

    @functools.wraps(test)
    def run() -> None:
        asyncio.run(test())

    del run.__wrapped__
    return run


def receive_one(link: WorkerLink) -> LeaderMessage:
    poller = Poller([link])
    while True:
        assert poller.wait(WAIT_S), "nothing came"
        messages = link.receive(limit=1)
        if messages:
            return messages[0]


@in_loop
async def test_round_trip() -> None:
    async with leading() as leader:
        worker = leader.connect(A)
        worker.send(ready(A))
        assert await leader.next() == (0, ready(A))
        assert leader.link.send(0, Abort(KEY, "client is gone", True))
        assert receive_one(worker) == Abort(KEY, "client is gone", True)
        worker.close()


@in_loop
async def test_results_keep_their_order_and_none_is_lost() -> None:
    async with leading() as leader:
        worker = leader.connect(A)
        for i in range(5_000):
            worker.send(Tokens([KEY], [[i]]))
        for i in range(5_000):
            worker.flush()
            _, message = await leader.next()
            assert isinstance(message, Tokens)
            assert message.token_ids == [[i]]
        worker.close()


def check_says_when_nobody_is_there(send: Callable[[], object]) -> None:
    assert send() is False, "accepted a request for a worker that is not there"


@in_loop
async def test_d42_a_request_for_an_absent_worker_is_refused_at_once() -> None:
    """D42: ROUTER without the mandatory flag drops it in silence; the client waits 1,800 s."""
    async with leading() as leader:
        check_says_when_nobody_is_there(lambda: leader.link.send(0, Stop(1.0)))
        worker = leader.connect(A)
        worker.send(ready(A))
        await leader.next()
        assert leader.link.send(0, Stop(1.0))
        assert receive_one(worker) == Stop(1.0)
        worker.close()
        # The connection's end is noticed by ZMQ's thread; from then on it is a refusal.
        while leader.link.send(0, Stop(1.0)):
            await asyncio.to_thread(lambda: None)
        assert leader.link.counters.num_not_connected >= 2

    context = zmq.Context()
    seed = context.socket(zmq.ROUTER)  # the seed's rule
    seed.bind("tcp://127.0.0.1:*")

    def send_seed() -> bool:
        seed.send_multipart([b"0", b"request"], zmq.DONTWAIT)
        return True

    with pytest.raises(AssertionError, match="not there"):
        check_says_when_nobody_is_there(send_seed)
    seed.close(linger=0)
    context.term()


@in_loop
async def test_d42_a_full_queue_is_a_refusal_and_what_was_accepted_arrives() -> None:
    """ROUTER at its mark without the flag lost 46 of 60 messages of 1 MB (measured)."""
    options = attrs.evolve(LINK_OPTIONS, send_high_water_mark=2, receive_high_water_mark=2)
    async with leading(options) as leader:
        worker = WorkerLink(leader.link.address, A, options=options)
        worker.send(ready(A))
        await leader.next()
        accepted = 0
        big = "x" * 4096
        while leader.link.send(0, Abort(RoomKey(accepted + 1, 1), big, False)):
            accepted += 1
            assert accepted < 1_000_000
        assert leader.link.counters.num_overloaded == 1
        for i in range(accepted):
            message = receive_one(worker)
            assert isinstance(message, Abort)
            assert message.key.room == i + 1
        worker.close()


@in_loop
async def test_a_worker_keeps_results_while_the_leader_is_busy() -> None:
    options = attrs.evolve(LINK_OPTIONS, send_high_water_mark=2, receive_high_water_mark=2)
    async with leading(options) as leader:
        worker = WorkerLink(leader.link.address, A, options=options, max_backlog=20_000)
        sent = 0
        while worker.num_backlog < 3:
            worker.send(Accepted(RoomKey(sent + 1, 1)))
            sent += 1
            assert sent < 1_000_000
        assert worker.poll_interest()[1] & zmq.POLLOUT

        def drain_backlog() -> None:
            poller = Poller([worker])
            while worker.num_backlog:
                assert poller.wait(WAIT_S), "no wake-up when there was room again"
                worker.flush()

        drained = asyncio.create_task(asyncio.to_thread(drain_backlog))
        for i in range(sent):
            _, message = await leader.next()
            assert isinstance(message, Accepted)
            assert message.key.room == i + 1
        await drained
        assert not worker.poll_interest()[1] & zmq.POLLOUT
        worker.close()


def test_a_backlog_is_bounded() -> None:
    options = attrs.evolve(LINK_OPTIONS, send_high_water_mark=1)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    worker = WorkerLink(f"tcp://127.0.0.1:{port}#{'00' * 16}", A, options=options, max_backlog=5)
    for _ in range(6):  # one in the socket, five behind it
        worker.send(Accepted(KEY))
    with pytest.raises(Overloaded, match="the leader has not read 5 messages"):
        worker.send(Accepted(KEY))
    worker.close()
    worker.close()


@in_loop
async def test_a_message_over_the_limit_is_the_callers_fault() -> None:
    options = attrs.evolve(LINK_OPTIONS, max_message_bytes=100)
    async with leading(options) as leader:
        with pytest.raises(CodecError, match="exceeds"):
            leader.link.send(0, Abort(KEY, "x" * 200, False))


@in_loop
async def test_strangers_and_garbage_are_counted_and_dropped() -> None:
    """D40: an identity holds the link's secret; no other process can inject results."""
    async with leading() as leader:
        where, secret = split_address(leader.link.address)
        context = zmq.Context()
        for identity in (
            b"0",
            pack_identity(A, b"\x00" * 16),
            pack_identity(A, secret)[:-1],
            pack_identity(OTHER_RANK, secret),
        ):
            stranger = context.socket(zmq.DEALER)
            stranger.setsockopt(zmq.LINGER, 1000)
            stranger.setsockopt(zmq.ROUTING_ID, identity)
            stranger.connect(where)
            stranger.send(encode_link(Accepted(KEY)))
            stranger.send(b"noise")
            stranger.send_multipart([b"two", b"parts"])
            stranger.close()
        await asyncio.to_thread(context.term)
        worker = leader.connect(A)
        worker.send(ready(A))
        seen = [await leader.next(), await leader.next()]
        assert sorted(seen, key=lambda one: one[0]) == [(0, ready(A)), (1, Accepted(KEY))]
        while leader.link.counters.num_unknown_identity < 9:
            await asyncio.sleep(0)
        assert leader.link.counters.num_garbage == 2
        assert leader.is_quiet()
        worker.close()


@in_loop
async def test_a_worker_may_speak_for_itself_only() -> None:
    async with leading() as leader:
        worker = leader.connect(A)
        worker.send(ready(B))  # another incarnation's word
        worker.send(WorkerHealth(7, [], {}))  # another rank's
        worker.send(WorkerHealth(0, ["starting"], {}))
        assert await leader.next() == (0, WorkerHealth(0, ["starting"], {}))
        assert leader.link.counters.num_garbage == 2
        worker.close()


@in_loop
async def test_d32_the_newest_life_of_a_rank_counts() -> None:
    """A restarted worker replaces the former; what that still says changes nothing."""
    async with leading() as leader:
        old = leader.connect(A)
        old.send(ready(A))
        assert await leader.next() == (0, ready(A))
        new = leader.connect(B)
        new.send(ready(B))
        assert await leader.next() == (0, ready(B))
        old.send(Accepted(KEY))
        old.send(ready(A))  # a late word must not bring it back
        while leader.link.counters.num_stale < 2:
            await asyncio.sleep(0)
        assert leader.link.send(0, Stop(2.0))
        assert receive_one(new) == Stop(2.0)
        assert old.receive() == []
        old.close()
        new.close()


@in_loop
async def test_first_words_read_in_the_wrong_order_heal() -> None:
    """The dead life's WorkerReady is read last: one refused send later the living one counts."""
    async with leading() as leader:
        new, old = leader.connect(B), leader.connect(A)
        new.send(ready(B))
        assert await leader.next() == (0, ready(B))
        old.send(ready(A))
        assert await leader.next() == (0, ready(A))
        old.close()
        while leader.link.send(0, Stop(1.0)):
            await asyncio.sleep(0)
        new.send(WorkerHealth(0, [], {}))
        assert await leader.next() == (0, WorkerHealth(0, [], {}))
        assert leader.link.send(0, Stop(2.0))
        assert receive_one(new) == Stop(2.0)
        new.close()


@in_loop
async def test_d43_results_are_delivered_whatever_else_is_pending() -> None:
    """D43: no thread pool between the socket and the futures: 200 waiters hold up none."""
    async with leading() as leader:
        worker = leader.connect(A)
        futures = {i: asyncio.get_running_loop().create_future() for i in range(1, 201)}
        deliver = asyncio.create_task(_resolve(leader, futures))
        worker.send(Accepted(RoomKey(200, 1)))  # the youngest first
        await asyncio.wait_for(futures[200], WAIT_S)
        assert not futures[1].done()
        deliver.cancel()
        worker.close()


async def _resolve(leader: Leader, futures: dict[int, asyncio.Future[None]]) -> None:
    while True:
        _, message = await leader.next()
        assert isinstance(message, Accepted)
        futures[message.key.room].set_result(None)


@in_loop
async def test_a_callback_that_raises_does_not_stop_the_link() -> None:
    seen: list[WorkerMessage] = []
    errors: list[object] = []
    done = asyncio.Event()

    def on_message(rank: int, message: WorkerMessage) -> None:
        seen.append(message)
        if len(seen) == 1:
            raise ValueError("a bug of the caller")
        done.set()

    asyncio.get_running_loop().set_exception_handler(lambda loop, context: errors.append(context))
    link = LeaderLink(on_message)
    await link.start()
    worker = WorkerLink(link.address, A)
    worker.send(Accepted(RoomKey(1, 1)))
    worker.send(Accepted(RoomKey(2, 1)))
    await asyncio.wait_for(done.wait(), WAIT_S)
    assert len(errors) == 1
    worker.close()
    link.close()


@in_loop
async def test_a_callback_may_close_the_link() -> None:
    closed = asyncio.Event()

    def on_message(rank: int, message: WorkerMessage) -> None:
        link.close()
        closed.set()

    link = LeaderLink(on_message)
    await link.start()
    worker = WorkerLink(link.address, A)
    worker.send(Accepted(KEY))
    worker.send(Accepted(KEY))
    await asyncio.wait_for(closed.wait(), WAIT_S)
    assert not link.send(0, Stop(1.0))
    link.close()
    worker.close()


@in_loop
async def test_a_long_queue_does_not_starve_the_loop() -> None:
    """At most ``drain_budget`` messages per turn of the event loop."""
    turns = 0
    counts: list[int] = []
    done = asyncio.Event()

    def on_message(rank: int, message: WorkerMessage) -> None:
        counts.append(turns)
        if len(counts) == 100:
            done.set()

    link = LeaderLink(on_message, drain_budget=10)
    worker = WorkerLink(link.address, A)
    for _ in range(100):
        worker.send(Accepted(KEY))
    await link.start()
    while not done.is_set():
        turns += 1
        await asyncio.sleep(0)
    assert max(counts.count(turn) for turn in set(counts)) <= 20  # reader and look in one turn
    worker.close()
    link.close()


@in_loop
async def test_messages_sent_before_start_are_delivered() -> None:
    """Workers connect while the leader is still starting; the edge was long ago."""
    inbox: asyncio.Queue[int] = asyncio.Queue()
    link = LeaderLink(lambda rank, message: inbox.put_nowait(rank))
    worker = WorkerLink(link.address, OTHER_RANK)
    worker.send(Accepted(KEY))
    await link.start()
    assert await asyncio.wait_for(inbox.get(), WAIT_S) == 1
    link.close()
    worker.close()


@in_loop
async def test_stop_may_still_leave_when_the_link_closes() -> None:
    async with leading() as leader:
        worker = leader.connect(A)
        worker.send(ready(A))
        await leader.next()
        assert leader.link.send(0, Stop(1.0))
        leader.link.close(linger_s=WAIT_S)
        assert receive_one(worker) == Stop(1.0)
        worker.close()


@in_loop
async def test_a_worker_counts_garbage_from_its_leader() -> None:
    async with leading() as leader:
        worker = leader.connect(A)
        worker.send(ready(A))
        await leader.next()
        _, secret = split_address(leader.link.address)
        leader.link._socket.send_multipart([pack_identity(A, secret), b"noise"])
        leader.link.send(0, Stop(1.0))
        assert receive_one(worker) == Stop(1.0)
        assert worker.num_garbage == 1
        worker.close()


def test_identities() -> None:
    secret = b"s" * 16
    assert unpack_identity(pack_identity(A, secret), secret) == A
    assert unpack_identity(pack_identity(A, secret), b"t" * 16) is None
    assert unpack_identity(b"", secret) is None
    assert pack_identity(A, secret)[0] != 0, "ROUTER reserves a leading zero"
    assert pack_identity(A, secret) != pack_identity(B, secret)


@pytest.mark.parametrize(
    "address",
    ["tcp://127.0.0.1:5", "tcp://127.0.0.1:5#", "tcp://127.0.0.1:5#xyz", f"ipc:///x#{'0' * 32}"],
)
def test_a_link_address_needs_its_secret(address: str) -> None:
    with pytest.raises(ConfigError, match="must be tcp://host:port#secret"):
        WorkerLink(address, A)


@in_loop
async def test_a_taken_port_is_a_config_error() -> None:
    async with leading() as leader:
        port = int(split_address(leader.link.address)[0].rpartition(":")[2])
        with pytest.raises(ConfigError, match="cannot listen on"):
            LeaderLink(lambda rank, message: None, port=port)


@in_loop
async def test_another_threads_call_is_found_at_once() -> None:
    async with leading() as leader:
        worker = WorkerLink(leader.link.address, A, thread_id=threading.get_ident)
        with pytest.raises(OwnershipError, match="the leader link belongs to the thread"):
            await asyncio.to_thread(worker.receive)
        worker.close()
