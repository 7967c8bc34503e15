from __future__ import annotations

import itertools
import socket
import sys
import threading
import time
from collections.abc import Iterator

import attrs
import numpy as np
import pytest

pytest.importorskip("torch", reason="torchdist needs the extra `torch`")

from pdcore.errors import PeerGone, TransportError
from pdcore.kv.plan import WriteBatch
from pdcore.testing.transport_harness import make_lease
from pdcore.transports import torchdist_sender
from pdcore.transports.base import Completion, HandleStatus, PeerDied, PeerSession
from pdcore.transports.regions import RegionTable
from pdcore.transports.torchdist_channel import End, LinkOver
from pdcore.transports.torchdist_courier import Limits
from pdcore.transports.torchdist_group import GlooBackend
from pdcore.transports.torchdist_hub import Ended, Hub
from pdcore.transports.torchdist_sender import MAX_QUEUED, Sender
from pdcore.transports.torchdist_wire import (
    MAX_PAYLOAD_BYTES,
    Address,
    Kind,
)
from pdcore.types import Incarnation
from tests.unit.transports.torchdist_rig import (
    HOST,
    LIMITS,
    SOON_S,
    THEM,
    HandReceiver,
    warm_up,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="torchdist is Linux")
US = Incarnation(b"u" * 16)
SIZE = 1 << 18
ALL = make_lease(THEM, 1, {1: [(0, SIZE)]})


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    warm_up()


class Rig:
    """A sender, and one receiver that the test plays."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        self.hub = Hub()
        self.regions = RegionTable()
        self.backend = GlooBackend(HOST)
        self.backend.build_timeout_s = SOON_S
        self.sender = Sender(US, self.regions, self.hub, self.backend, limits)
        self.receiver = HandReceiver(self.backend, SIZE)
        self.source = self.regions.add(memoryview(bytes(range(256)) * (SIZE // 256)), target=False)
        self.deaths: list[PeerDied] = []
        self.left: list[str] | None = None

    def connect(self) -> PeerSession:
        session = self.sender.connect(self.receiver.descriptor)
        self.receiver.welcomed()
        return session

    def batch(self, num_bytes: int = SIZE) -> WriteBatch:
        pieces = np.array([[0, 0, num_bytes, 1, 0, 0]], np.int64)
        return WriteBatch(self.source.region_id, 1, pieces)

    def submit(self, session: PeerSession, num_bytes: int = SIZE) -> int:
        return self.sender.submit(session, [self.batch(num_bytes)], ALL, None)

    def completions(self, count: int) -> list[Completion]:
        """The next ``count``, waited for on the bell."""
        found: list[Completion] = []
        deadline = time.monotonic() + SOON_S
        while len(found) < count:
            assert time.monotonic() < deadline, f"only {found} came"
            for item in self.hub.drain():
                if isinstance(item, Ended):
                    found.append(self.sender.ended(item))
                elif isinstance(item, PeerDied):
                    self.deaths.append(item)
        return found

    def close(self, timeout_s: float = SOON_S) -> list[str]:
        if self.left is None:
            self.left = self.sender.close(time.monotonic() + timeout_s)
            for item in self.hub.drain():
                if isinstance(item, Ended):
                    self.sender.ended(item)
            self.receiver.close()
            self.backend.close()
            self.hub.close(keep_bell=False)
        return self.left


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.close()


def goodbye(receiver: HandReceiver) -> End:
    """How the sender takes its leave."""
    try:
        while True:
            receiver.hear()
    except LinkOver as over:
        return over.end


@pytest.fixture
def silent() -> Iterator[socket.socket]:
    """Somebody whose kernel takes connections, and who says nothing: a stopped process."""
    with socket.create_server((HOST, 0)) as listener:
        yield listener


def test_another_backend_is_refused_before_dialling(rig: Rig) -> None:
    address = Address("hccl", HOST, 9, b"k" * 16)
    other = attrs.evolve(rig.receiver.descriptor, blob=address.encode())
    with pytest.raises(TransportError, match=r"'hccl', ours is 'gloo'"):
        rig.sender.connect(other)
    rig.connect()


def test_connect_to_a_stopped_peer_is_bounded_and_no_death(silent: socket.socket) -> None:
    """The peer that wakes up later must not take us for dead: we said goodbye."""
    rig = Rig(attrs.evolve(LIMITS, connect_timeout_s=0.05))
    try:
        address = Address("gloo", HOST, silent.getsockname()[1], b"k" * 16)
        target = attrs.evolve(rig.receiver.descriptor, blob=address.encode())
        with pytest.raises(PeerGone, match="did not answer in time"):
            rig.sender.connect(target)
        caller = silent.accept()[0]
        said = b""
        while part := caller.recv(4096):
            said += part
        caller.close()
        assert b"did not answer in time" in said
    finally:
        rig.connect()
        rig.close()


def test_regions_that_the_peer_does_not_have_are_refused(rig: Rig) -> None:
    stale = attrs.evolve(rig.receiver.descriptor, regions={1: SIZE + 1})
    with pytest.raises(TransportError, match="stale descriptor"):
        rig.sender.connect(stale)
    rig.receiver.welcomed()
    assert goodbye(rig.receiver) is End.DISCONNECTED


def test_a_refusal_is_passed_on(rig: Rig) -> None:
    rig.receiver.refusal = b"not you"
    with pytest.raises(TransportError, match="the peer refused: not you"):
        rig.sender.connect(rig.receiver.descriptor)


def test_no_thread_for_a_session_is_an_error_and_no_death(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_thread(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        with pytest.raises(TransportError, match="at its limits: can't start new thread"):
            rig.sender.connect(rig.receiver.descriptor)
    rig.receiver.welcomed()
    assert goodbye(rig.receiver) is End.DISCONNECTED
    assert rig.hub.drain() == []


def test_transfers_wait_for_the_group_off_the_loop(rig: Rig) -> None:
    """``connect`` and ``submit`` return though the peer has built nothing; building a group
    blocks, on the link's thread."""
    handle = rig.submit(rig.connect())
    assert rig.hub.drain() == []
    rig.receiver.join_group()
    for _ in range(SIZE // LIMITS.chunk_bytes):
        rig.receiver.take()
        rig.receiver.say(Kind.PLACED)
    assert rig.completions(1) == [Completion(handle, HandleStatus.DONE, True)]


def test_sources_are_pinned_until_quiesced(rig: Rig) -> None:
    """G5."""
    session = rig.connect()
    rig.submit(session, 1000)
    with pytest.raises(TransportError, match="in flight"):
        rig.regions.remove(rig.source)
    rig.receiver.join_group()
    rig.receiver.take()
    rig.receiver.say(Kind.PLACED)
    rig.completions(1)
    rig.regions.remove(rig.source)


def test_what_waits_is_bounded(rig: Rig) -> None:
    session = rig.connect()
    with pytest.raises(TransportError, match="notify has"):
        rig.sender.submit(session, [], ALL, b"x" * (MAX_PAYLOAD_BYTES + 1))
    for _ in range(MAX_QUEUED):
        rig.sender.submit(session, [], ALL, None)
    with pytest.raises(TransportError, match="stopped, or overloaded"):
        rig.sender.submit(session, [], ALL, None)


def test_a_peer_that_never_builds_its_group_fails_the_transfers() -> None:
    """gloo can hang: a deadline of our own, and nothing of it lands."""
    rig = Rig(attrs.evolve(LIMITS, stall_timeout_s=0.05))
    try:
        session = rig.connect()
        handle = rig.submit(session)
        (end,) = rig.completions(1)
        assert (end.handle, end.status, end.quiesced) == (handle, HandleStatus.FAILED, True)
        assert "no progress" in end.detail
        assert goodbye(rig.receiver) is End.DISCONNECTED
        with pytest.raises(PeerGone):
            rig.submit(session)
        assert not rig.deaths, "stalled is not dead"
    finally:
        rig.close()


def test_a_chunk_that_may_land_keeps_its_handle_unquiesced() -> None:
    """G2: the peer stalls with a chunk of ours. The handle fails in time, but it may land
    yet: quiesced comes with the answer, however late."""
    rig = Rig(attrs.evolve(LIMITS, stall_timeout_s=0.2))
    try:
        session = rig.connect()
        handle, other = rig.submit(session), rig.submit(session)
        rig.receiver.join_group()
        rig.receiver.take()
        first, second = rig.completions(2)
        assert (first.handle, first.status, first.quiesced) == (handle, HandleStatus.FAILED, False)
        assert (second.handle, second.quiesced) == (other, True), "nothing of it was sent"
        rig.receiver.say(Kind.PLACED)
        (last,) = rig.completions(1)
        assert (last.handle, last.status, last.quiesced) == (handle, HandleStatus.FAILED, True)
        assert goodbye(rig.receiver) is End.DISCONNECTED
    finally:
        rig.close()


def in_doubt(rig: Rig) -> int:
    """A handle whose chunk was sent, and whose connection is of no use any more."""
    session = rig.connect()
    handle = rig.submit(session)
    rig.receiver.join_group()
    rig.receiver.take()
    assert rig.receiver.channel is not None
    rig.receiver.channel._sock.send(b"HTTP/1.1 200 OK\r\n\r\n")
    (first,) = rig.completions(1)
    assert (first.handle, first.quiesced) == (handle, False)
    return handle


@pytest.mark.parametrize("answer", [Kind.WELCOME, Kind.REFUSED])
def test_a_chunk_in_doubt_is_asked_for_anew(rig: Rig, answer: Kind) -> None:
    """G2: every handle has its quiesced mark, also where the connection broke under it. The
    source of such a one stayed pinned until the end of the process."""
    handle = in_doubt(rig)
    hello = rig.receiver.asked_anew(answer)
    assert (hello.number, hello.drops) == (0, 1)
    (last,) = rig.completions(1)
    assert (last.handle, last.status, last.quiesced) == (handle, HandleStatus.FAILED, True)
    rig.regions.remove(rig.source)
    assert not rig.deaths


def test_where_nobody_listens_nothing_is_in_doubt(rig: Rig) -> None:
    session = rig.connect()
    handle = rig.submit(session)
    rig.receiver.join_group()
    rig.receiver.take()
    rig.receiver.hang_up()
    assert rig.receiver.channel is not None
    rig.receiver.channel._sock.send(b"HTTP/1.1 200 OK\r\n\r\n")
    first, last = rig.completions(2)
    assert [(end.handle, end.quiesced) for end in (first, last)] == [
        (handle, False),
        (handle, True),
    ]


def test_silence_leaves_the_doubt_until_close(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody answers: asked ever again, and named at the end."""
    monkeypatch.setattr(torchdist_sender, "ASK_FIRST_S", 0.01)
    asked = threading.Event()
    tries = itertools.count(1)

    def silence(*args: object) -> bool:
        if next(tries) == 3:
            asked.set()
        return False

    monkeypatch.setattr(torchdist_sender, "has_dropped", silence)
    in_doubt(rig)
    assert asked.wait(SOON_S)
    assert rig.close(1.0) == ["a chunk that the receiver has not confirmed"]


def test_close_names_a_chunk_that_nobody_confirms(rig: Rig) -> None:
    """Bounded, and no lie: nobody knows what the peer will do with it."""
    session = rig.connect()
    rig.submit(session)
    rig.receiver.join_group()
    rig.receiver.take()
    started = time.monotonic()
    assert rig.close(1.0) == ["a chunk that the receiver has not confirmed"]
    assert time.monotonic() - started < SOON_S / 2


def test_close_says_goodbye_for_the_whole_incarnation(rig: Rig) -> None:
    session = rig.connect()
    handles = [rig.submit(session) for _ in range(3)]
    rig.receiver.join_group()
    rig.receiver.take()
    rig.receiver.say(Kind.PLACED)
    rig.sender.cancel(handles[0])
    assert rig.sender.close(time.monotonic() + SOON_S) == []
    ends = rig.completions(3)
    assert [end.status for end in ends] == [HandleStatus.CANCELLED] * 3
    assert all(end.quiesced for end in ends)


def test_a_death_ends_everything(rig: Rig) -> None:
    """The peer is gone with a chunk of ours: its memory is gone, too."""
    session = rig.connect()
    handles = {rig.submit(session) for _ in range(3)}
    rig.receiver.join_group()
    rig.receiver.take()
    assert rig.receiver.channel is not None
    rig.receiver.channel.close()
    ends = rig.completions(3)
    assert {end.handle for end in ends if end.quiesced} == handles
    assert {end.status for end in ends} == {HandleStatus.FAILED}
    rig.sender.close(time.monotonic() + SOON_S)
    deaths = rig.deaths + [item for item in rig.hub.drain() if isinstance(item, PeerDied)]
    assert [(death.incarnation, death.fenced) for death in deaths] == [(THEM, True)]
