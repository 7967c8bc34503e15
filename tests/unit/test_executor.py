"""Effects into calls, with real loopback transports and a channel that writes down."""

from __future__ import annotations

import select
import zlib
from collections.abc import Callable, Iterator

import attrs
import msgspec
import numpy as np
import pytest

from pdcore import executor as executor_module
from pdcore.background import Background, FailedCall
from pdcore.control.codec import decode_frame, encode_frames
from pdcore.control.messages import (
    Accepted,
    Finished,
    Frame,
    Grant,
    Heartbeat,
    HeartbeatAck,
    Status,
    StatusKind,
    Tokens,
    WorkerMessage,
)
from pdcore.errors import CodecError, PeerGone, TransportError, failure
from pdcore.executor import MAX_LIVES, MAX_UNREACHABLE, Executor, to_leader
from pdcore.fsm.effects import (
    CancelTransfer,
    ConnectPeer,
    Effect,
    FencePeer,
    FetchTopology,
    ForgetPeer,
    GrantLease,
    PostTransfer,
    ReduceVotes,
    ReleaseLease,
    ReportAccepted,
    ReportFinished,
    ReportTokens,
    RevokeLease,
    SendMessage,
    VerifyBlocks,
)
from pdcore.fsm.events import (
    BlocksVerified,
    ConnectFailed,
    Event,
    HandleEnded,
    LeaseRevoked,
    PeerLost,
    TopologyFetched,
    VotesReduced,
)
from pdcore.kv.checksums import LegPart, LegSums
from pdcore.kv.layout import place_entries
from pdcore.kv.plan import WriteBatch
from pdcore.kv.spec import KVCacheEntry, KVCacheSpec
from pdcore.scheduler.consensus import LocalConsensus
from pdcore.scheduler.setup import CoreSetup
from pdcore.testing.world import InlineBackground
from pdcore.transports.base import PeerDied, PeerSession, RemoteLease, Revocation
from pdcore.transports.loopback import LoopbackTransport
from pdcore.transports.loopback_fabric import LoopbackFabric
from pdcore.types import FinishReason, Incarnation, LeaseId, Nonce, PeerRef, RoomKey
from tests.unit.scheduler.kit import DECODE, PREFILL, make_setup

KEY = RoomKey(1, 1)
LEASE = LeaseId(DECODE.incarnation, 1)
RANGES = {1: np.array([[0, 64]], np.int64)}


class WrittenChannel:
    """A control channel that keeps its frames; ``is_full`` refuses them."""

    address = "tcp://prefill:1"

    def __init__(self) -> None:
        self.frames: list[tuple[str, Frame]] = []
        self.forgotten: list[str] = []
        self.is_full = False

    def send(self, to: str, frame: bytes) -> bool:
        if not self.is_full:
            self.frames.append((to, decode_frame(frame)))
        return not self.is_full

    def receive(self, limit: int = 256) -> list[bytes]:
        return []

    def fileno(self) -> int | None:
        return None

    def forget(self, to: str) -> None:
        self.forgotten.append(to)

    def close(self) -> None:
        return None


@attrs.define(eq=False)
class Pair:
    """The executor of a prefill rank, and the transport of the decode rank it writes to."""

    fabric: LoopbackFabric
    decode: LoopbackTransport
    executor: Executor
    channel: WrittenChannel
    said: list[WorkerMessage]
    decode_setup: CoreSetup

    def post(self, handle: int = 1, peer: PeerRef = DECODE, endpoint: bytes = b"") -> PostTransfer:
        rows = np.array([[0, 0, 64, 1, 0, 0]], np.int64)
        return PostTransfer(
            handle,
            KEY,
            peer,
            LEASE,
            0,
            4,
            endpoint or self.decode_setup.endpoint(),
            (WriteBatch(1, 1, rows),),
            RANGES,
        )

    def run(self, *effects: Effect, now: float = 0.0) -> list[Event]:
        return self.executor.execute(effects, now)


def route_missing(bootstrap: str) -> TopologyFetched:
    return TopologyFetched(bootstrap, None, failure("unreachable", "nobody"))


@pytest.fixture
def make_pair() -> Iterator[Callable[..., Pair]]:
    made: list[LoopbackTransport] = []

    def build(*, stepped: bool = False, fetch=route_missing, background=None, **options) -> Pair:
        fabric = LoopbackFabric(stepped=stepped)
        prefill = LoopbackTransport(PREFILL.incarnation, fabric, **options)
        decode = LoopbackTransport(DECODE.incarnation, fabric, **options)
        made.extend((prefill, decode))
        prefill.allocate(256).buffer[:64] = bytes(range(64))
        decode.allocate(256)
        channel, said = WrittenChannel(), list[WorkerMessage]()
        executor = Executor(
            make_setup(PREFILL),
            prefill,
            channel,
            said.append,
            LocalConsensus(),
            background or InlineBackground(),
            fetch,
        )
        setup = make_setup(transport_descriptor=decode.descriptor())
        decode.grant(RemoteLease(LEASE, RANGES))
        return Pair(fabric, decode, executor, channel, said, setup)

    yield build
    for transport in made:
        transport.close()


def written(pair: Pair) -> bytes:
    return pair.decode._endpoint.regions.arrays[1][:64].tobytes()


# --- messages ---------------------------------------------------------------------------


def test_one_frame_per_peer_and_the_order_of_messages_is_kept(make_pair) -> None:
    pair = make_pair()
    other = DECODE._replace(rank=1, address="tcp://decode:2")
    events = pair.run(
        SendMessage(DECODE, Heartbeat(1)),
        SendMessage(other, Heartbeat(2)),
        SendMessage(DECODE, HeartbeatAck(3)),
        SendMessage(DECODE, Heartbeat(4)),
    )
    assert events == []
    (to, frame), (other_to, other_frame) = pair.channel.frames
    assert (to, other_to) == (DECODE.address, other.address)
    assert frame.messages == [Heartbeat(1), HeartbeatAck(3), Heartbeat(4)]
    assert other_frame.messages == [Heartbeat(2)]
    assert (frame.instance, frame.rank, frame.incarnation) == PREFILL[:3]
    assert (frame.reply_to, frame.to_incarnation) == (PREFILL.address, DECODE.incarnation)


def test_two_lives_at_one_address_get_their_own_frames(make_pair) -> None:
    """``to_incarnation`` belongs to the frame."""
    pair = make_pair()
    reborn = DECODE._replace(incarnation=PREFILL.incarnation)
    pair.run(SendMessage(DECODE, Heartbeat(1)), SendMessage(reborn, Heartbeat(2)))
    assert [f.to_incarnation for _, f in pair.channel.frames] == [
        DECODE.incarnation,
        PREFILL.incarnation,
    ]


def test_a_frame_leaves_after_what_stood_before_it(make_pair) -> None:
    """A lease is open before its handshake or grant can arrive (rule 1)."""
    pair = make_pair()
    seen: list[int] = []
    send = pair.channel.send
    table = pair.executor.transport._endpoint.regions

    def looking(to: str, frame: bytes) -> bool:
        seen.append(len(table._grants))
        return send(to, frame)

    pair.channel.send = looking
    lease = LeaseId(PREFILL.incarnation, 1)
    pair.run(GrantLease(lease, RANGES), SendMessage(DECODE, Grant(KEY, Nonce(b"n" * 16, 1))))
    assert seen == [1]
    pair.run(RevokeLease(lease), ReleaseLease(lease), ReleaseLease(lease))
    assert len(table._grants) == 0


def test_a_refused_frame_is_dropped_without_a_word(make_pair) -> None:
    """The core resends what is not answered (rule 4)."""
    pair = make_pair()
    pair.channel.is_full = True
    assert pair.run(SendMessage(DECODE, Heartbeat(1))) == []


def test_every_report_is_a_message_to_the_leader_in_order(make_pair) -> None:
    pair = make_pair()
    why = failure("out_of_memory", "full")
    pair.run(
        ReportAccepted(KEY),
        ReportTokens([KEY], [(5, 6)], [(-0.5, None)]),
        ReportFinished(KEY, FinishReason.ERROR, why, 8, 2, {"queue": 0.5}),
    )
    assert pair.said == [
        Accepted(KEY),
        Tokens([KEY], [(5, 6)], [(-0.5, None)]),
        Finished(KEY, "error", why, 8, 2, {"queue": 0.5}),
    ]
    assert to_leader(ReportTokens([KEY], [(5,)], None)) == Tokens([KEY], [(5,)], None)
    assert to_leader(SendMessage(DECODE, Heartbeat(1))) is None


def test_a_vote_is_answered_at_once(make_pair) -> None:
    assert make_pair().run(ReduceVotes(3, 9, (1, 2))) == [VotesReduced(3, (1, 2))]


def test_an_effect_that_nobody_knows_is_our_own_mistake(make_pair) -> None:
    with pytest.raises(TypeError, match="Effect"):
        make_pair().run(Effect())


# --- transfers --------------------------------------------------------------------------


def test_a_transfer_lands_and_its_handle_ends_once(make_pair) -> None:
    pair = make_pair()
    assert pair.run(pair.post(handle=41)) == []
    assert pair.executor.poll() == [HandleEnded(41, True, None)]
    assert written(pair) == bytes(range(64))
    assert pair.executor.poll() == []
    assert len(pair.executor._handles) == 0


def test_one_session_serves_all_transfers_to_a_life(make_pair) -> None:
    pair = make_pair()
    pair.run(pair.post(1), pair.post(2))
    assert [e.handle for e in pair.executor.poll()] == [1, 2]
    assert len(pair.fabric._links) == 1


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda p: {"endpoint": b"garbage"}, "TransportError"),
        (lambda p: {"peer": DECODE._replace(incarnation=PREFILL.incarnation)}, "another process"),
        (
            lambda p: {
                "endpoint": attrs.evolve(p.decode_setup, transport_descriptor=b"x").endpoint()
            },
            "TransportError",
        ),
    ],
)
def test_a_transfer_that_cannot_be_posted_ends_quiet_and_failed(make_pair, change, named) -> None:
    """It wrote nothing, so its handle is quiet; the session of a wrong process is closed."""
    pair = make_pair()
    (ended,) = pair.run(pair.post(7, **change(pair)))
    assert isinstance(ended, HandleEnded)
    assert (ended.handle, ended.quiesced) == (7, True)
    assert ended.failure is not None
    assert ended.failure.code == "transfer_failed"
    assert named in ended.failure.detail
    assert pair.fabric._links == []
    assert len(pair.executor._handles) == 0
    pair.run(pair.post(8))
    assert pair.executor.poll() == [HandleEnded(8, True, None)]


def test_a_lease_that_does_not_cover_the_write_is_refused_before_byte_0(make_pair) -> None:
    pair = make_pair()
    post = pair.post()
    narrow = {1: np.array([[0, 32]], np.int64)}
    (ended,) = pair.run(msgspec.structs.replace(post, ranges=narrow))
    assert isinstance(ended, HandleEnded)
    assert ended.quiesced
    assert ended.failure is not None
    assert written(pair) == bytes(64)


def test_a_cancel_stops_the_write_and_is_idempotent(make_pair) -> None:
    pair = make_pair(stepped=True)
    pair.run(pair.post(1), CancelTransfer(1), CancelTransfer(1), CancelTransfer(99))
    (ended,) = pair.executor.poll()
    assert isinstance(ended, HandleEnded)
    assert (ended.handle, ended.quiesced) == (1, True)
    assert ended.failure is not None
    pair.run(CancelTransfer(1))
    assert written(pair) == bytes(64)


def test_a_late_write_ends_twice_and_its_handle_lives_until_the_second(make_pair) -> None:
    """G2: not quiet with the first completion."""
    pair = make_pair(stepped=True)
    pair.fabric.faults(PREFILL.incarnation).late_landing = True
    pair.run(pair.post(1), CancelTransfer(1))
    first = pair.executor.poll()
    while pair.fabric.step() is not None:
        pass
    second = pair.executor.poll()
    assert [(e.handle, e.quiesced) for e in (*first, *second)] == [(1, False), (1, True)]
    assert len(pair.executor._handles) == 0


def lose_a_session_only(pair: Pair) -> None:
    """A cable was cut and is back: no request fails but those that were under way."""
    pair.run(pair.post(1))
    (link,) = pair.fabric._links
    pair.fabric.close_link(link, "the wire was cut")
    assert pair.run(pair.post(2)) == [], "a healthy request pays for it"
    while pair.fabric.step() is not None:
        pass
    ended = {e.handle: e.failure for e in pair.executor.poll() if isinstance(e, HandleEnded)}
    assert set(ended) == {1, 2}
    assert ended[1] is not None
    assert ended[2] is None
    assert written(pair) == bytes(range(64))


def test_a_session_that_lost_its_peer_costs_no_further_request(make_pair) -> None:
    """G3: a refused submit wrote nothing, so it is safe to submit again over a new session."""
    lose_a_session_only(make_pair(stepped=True))


def test_a_request_burnt_for_each_lost_session_is_found(make_pair, monkeypatch) -> None:
    """The former rule: whoever meets the dead session fails, the next one connects."""
    pair = make_pair(stepped=True)
    submit = pair.executor.transport.submit

    def refuse(*arguments: object) -> int:
        try:
            return submit(*arguments)
        except PeerGone as error:
            raise TransportError(str(error)) from error

    monkeypatch.setattr(pair.executor.transport, "submit", refuse)
    with pytest.raises(AssertionError, match="healthy request"):
        lose_a_session_only(pair)


@pytest.mark.parametrize(("num_sessions", "num_tries"), [(1, 1), (2, 2)])
def test_a_peer_that_refuses_is_connected_to_anew_once(
    make_pair, monkeypatch, num_sessions: int, num_tries: int
) -> None:
    """A transport that calls every session dead costs a request one connect, not the loop."""
    pair = make_pair(stepped=True)
    connects = CountedConnects(pair, monkeypatch)
    connects.is_stuck = False
    if num_sessions == 2:
        pair.run(pair.post(1))
    tried: list[PeerSession] = []

    def gone(session: PeerSession, *_: object) -> int:
        tried.append(session)
        raise PeerGone("the session is closed or its peer is gone: connect again")

    monkeypatch.setattr(pair.executor.transport, "submit", gone)
    (ended,) = pair.run(pair.post(7))
    assert isinstance(ended, HandleEnded)
    assert (ended.handle, ended.quiesced) == (7, True)
    assert ended.failure is not None
    assert "PeerGone" in ended.failure.detail
    assert (connects.tried, len(tried)) == (num_sessions, num_tries)


def test_a_peer_that_is_gone_is_not_connected_to_twice(make_pair, monkeypatch) -> None:
    """Where nobody answers, a request ends with that: each try holds up the loop."""
    pair = make_pair(stepped=True)
    connects = CountedConnects(pair, monkeypatch)
    connects.is_stuck = False
    pair.run(pair.post(1))
    (link,) = pair.fabric._links
    pair.fabric.close_link(link, "the wire was cut")
    connects.is_stuck = True
    for handle in (2, 3):
        (ended,) = pair.run(pair.post(handle))
        assert isinstance(ended, HandleEnded)
        assert ended.failure is not None
        assert "no answer within 1.0 s" in ended.failure.detail
    assert connects.tried == 2


def test_a_connection_is_opened_before_anything_is_posted(make_pair) -> None:
    """Rule 3: whoever claims can be seen to die, also one that has not written yet."""
    pair = make_pair(stepped=True)
    connect = ConnectPeer(DECODE, pair.decode_setup.endpoint())
    assert pair.run(connect, connect) == []
    assert len(pair.fabric._links) == 1
    pair.fabric.die(PREFILL.incarnation)
    (died,) = pair.decode.poll()
    assert isinstance(died, PeerDied)
    assert (died.incarnation, died.fenced) == (PREFILL.incarnation, True)


@pytest.mark.parametrize("endpoint", [b"garbage", make_setup(transport_descriptor=b"x").endpoint()])
def test_a_connection_that_cannot_be_opened_proves_no_death(make_pair, endpoint: bytes) -> None:
    pair = make_pair()
    (told,) = pair.run(ConnectPeer(DECODE, endpoint))
    assert isinstance(told, ConnectFailed)
    assert told.incarnation == DECODE.incarnation


class CountedConnects:
    """How often a transport was asked to connect; ``is_stuck``: to a peer that is stopped."""

    def __init__(self, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tried = 0
        self.is_stuck = True
        self._connect = pair.executor.transport.connect
        monkeypatch.setattr(pair.executor.transport, "connect", self)

    def __call__(self, descriptor: bytes) -> PeerSession:
        self.tried += 1
        if self.is_stuck:
            raise TransportError("no answer within 1.0 s")
        return self._connect(descriptor)


def check_a_stopped_peer_costs_one_try(pair: Pair, connects: CountedConnects) -> None:
    connect = ConnectPeer(DECODE, pair.decode_setup.endpoint())
    for now in (10.0, 10.0, 12.0, 14.9):
        (lost,) = pair.run(connect, now=now)
        assert isinstance(lost, ConnectFailed)
        assert "no answer within 1.0 s" in lost.detail
        (ended,) = pair.run(pair.post(1), now=now)
        assert isinstance(ended, HandleEnded)
        assert ended.quiesced
    assert connects.tried == 1


def test_a_peer_that_does_not_answer_is_not_asked_again_at_once(make_pair, monkeypatch) -> None:
    """Each try blocks the loop for the connect time-out, and with it every other request."""
    pair = make_pair()
    connects = CountedConnects(pair, monkeypatch)
    check_a_stopped_peer_costs_one_try(pair, connects)
    connects.is_stuck = False
    (still,) = pair.run(pair.post(1), now=14.9)
    assert isinstance(still, HandleEnded)
    assert pair.run(pair.post(2), now=15.0) == [], "asked again after a few seconds"
    assert pair.executor.poll() == [HandleEnded(2, True, None)]
    assert connects.tried == 2


def test_trying_every_time_fails_the_check(make_pair, monkeypatch) -> None:
    """Mutant: nothing is remembered."""
    monkeypatch.setattr("pdcore.executor.CONNECT_AGAIN_S", 0.0)
    pair = make_pair()
    with pytest.raises(AssertionError):
        check_a_stopped_peer_costs_one_try(pair, CountedConnects(pair, monkeypatch))


def test_a_strangers_descriptor_makes_nobody_unreachable(make_pair, monkeypatch) -> None:
    """And what is remembered is bounded."""
    pair = make_pair()
    connects = CountedConnects(pair, monkeypatch)
    for i in range(MAX_UNREACHABLE + 10):
        fake = attrs.evolve(pair.decode_setup, transport_descriptor=b"%d" % i).endpoint()
        assert len(pair.run(ConnectPeer(DECODE, fake))) == 1
    assert len(pair.executor._unreachable._failed) == MAX_UNREACHABLE
    connects.is_stuck = False
    assert pair.run(ConnectPeer(DECODE, pair.decode_setup.endpoint())) == []


# --- deaths and fences ------------------------------------------------------------------


@pytest.mark.parametrize("late", [False, True])
def test_the_death_of_a_peer_becomes_an_event(make_pair, late: bool) -> None:
    """Prefill dies; what decode's executor tells its core."""
    pair = make_pair(stepped=True)
    pair.run(pair.post(1))
    executor = Executor(
        make_setup(),
        pair.decode,
        WrittenChannel(),
        pair.said.append,
        LocalConsensus(),
        InlineBackground(),
        route_missing,
    )
    pair.fabric.die(PREFILL.incarnation, late=late)
    assert executor.poll() == [PeerLost(PREFILL.incarnation, not late, "killed")]
    fence = [PeerLost(PREFILL.incarnation, True, "its process is gone")]
    assert executor.execute([FencePeer(PREFILL)], 0.0) == ([] if late else fence)
    if late:
        while pair.fabric.step() is not None:
            pass
        assert executor.poll() == [PeerLost(PREFILL.incarnation, True, "last write landed")]
        assert executor.execute([FencePeer(PREFILL)], 0.0) == fence


def test_a_death_ends_the_handles_and_the_session(make_pair) -> None:
    pair = make_pair(stepped=True)
    pair.run(pair.post(1))
    pair.fabric.die(DECODE.incarnation)
    events = pair.executor.poll()
    assert PeerLost(DECODE.incarnation, True, "killed") in events
    (ended,) = [e for e in events if isinstance(e, HandleEnded)]
    assert (ended.handle, ended.quiesced) == (1, True)
    assert pair.executor._sessions == {}


def test_fencing_a_living_peer_destroys_the_session_and_proves_nothing(make_pair) -> None:
    pair = make_pair(stepped=True)
    pair.run(pair.post(1))
    assert pair.run(FencePeer(DECODE)) == []
    (ended,) = pair.executor.poll()
    assert isinstance(ended, HandleEnded)
    assert (ended.handle, ended.quiesced) == (1, True)
    assert pair.fabric._links == []
    assert pair.run(FencePeer(DECODE)) == [], "idempotent"


def test_forgetting_a_peer_drops_its_connection_and_its_session(make_pair) -> None:
    pair = make_pair()
    pair.run(pair.post(1))
    pair.executor.poll()
    pair.run(ForgetPeer(DECODE))
    assert pair.channel.forgotten == [DECODE.address]
    assert pair.fabric._links == []


def test_the_last_words_to_a_forgotten_peer_do_not_connect_again(make_pair) -> None:
    """What was due to be sent again together with the end of waiting for an answer."""
    pair = make_pair()
    other = DECODE._replace(rank=1, address="tcp://decode:2")
    pair.run(
        SendMessage(DECODE, Heartbeat(1)), SendMessage(other, Heartbeat(2)), ForgetPeer(DECODE)
    )
    assert [to for to, _ in pair.channel.frames] == [other.address]
    assert pair.channel.forgotten == [DECODE.address]


def check_a_dead_life_leaves_no_socket(pair: Pair) -> None:
    """Each life of a peer listens at a port of its own: what is kept for the former ones
    would grow with every restart."""
    pair.run(SendMessage(DECODE, Heartbeat(1)))
    pair.run(pair.post(1))
    pair.fabric.die(DECODE.incarnation)
    pair.executor.poll()
    pair.run(SendMessage(DECODE, Heartbeat(2)))
    assert pair.channel.forgotten == [DECODE.address]
    assert len(pair.channel.frames) == 1, "nobody hears it"


def test_a_dead_life_leaves_no_socket(make_pair) -> None:
    """D24, D39: found by random kills: one more descriptor for every restart of a peer."""
    check_a_dead_life_leaves_no_socket(make_pair(stepped=True))


def test_the_check_fails_on_sockets_that_stay(make_pair) -> None:
    """The mutant: only the transport's session ends with the peer."""
    pair = make_pair(stepped=True)
    pair.executor._lives.end = lambda incarnation, fenced: None
    with pytest.raises(AssertionError):
        check_a_dead_life_leaves_no_socket(pair)


def test_a_death_that_fences_nothing_leaves_no_socket_either(make_pair) -> None:
    """QUARANTINE transports never fence: the process is gone all the same."""
    pair = make_pair()
    pair.run(SendMessage(DECODE, Heartbeat(1)))
    pair.executor.transport.poll = lambda: [PeerDied(DECODE.incarnation, False)]
    pair.executor.poll()
    assert pair.channel.forgotten == [DECODE.address]
    assert pair.run(FencePeer(DECODE)) == []
    pair.executor.transport.poll = lambda: [PeerDied(DECODE.incarnation, True)]
    pair.executor.poll()
    assert len(pair.run(FencePeer(DECODE))) == 1


def test_a_death_leaves_the_socket_of_another_life_at_the_same_address(make_pair) -> None:
    pair = make_pair()
    successor = DECODE._replace(incarnation=Incarnation(b"s" * 16))
    pair.run(SendMessage(DECODE, Heartbeat(1)), SendMessage(successor, Heartbeat(2)))
    pair.executor.transport.poll = lambda: [PeerDied(DECODE.incarnation, True)]
    pair.executor.poll()
    assert pair.channel.forgotten == []


def test_lives_remembered_are_bounded(make_pair) -> None:
    pair = make_pair()
    lives = [Incarnation(i.to_bytes(16, "big")) for i in range(MAX_LIVES + 10)]
    pair.run(*(SendMessage(DECODE._replace(incarnation=i), Heartbeat(1)) for i in lives))
    assert len(pair.executor._lives._addresses) == MAX_LIVES
    pair.executor.transport.poll = lambda: [PeerDied(i, True) for i in lives]
    pair.executor.poll()
    assert len(pair.executor._lives._over) == MAX_LIVES


@pytest.mark.parametrize(
    ("revocation", "events"),
    [(Revocation.SENDER_ACK, []), (Revocation.RECEIVER_ENFORCED, [LeaseRevoked(LEASE)])],
)
def test_only_a_transport_that_enforces_answers_a_revoke(make_pair, revocation, events) -> None:
    assert make_pair(revocation=revocation).run(RevokeLease(LEASE)) == events


def check_a_message_for_no_frame(pair: Pair) -> None:
    """Checksums of a million blocks and more: one Done of 5 MB between two others."""
    huge = Status(KEY, LEASE, StatusKind.DONE, Nonce(PREFILL.incarnation, 1), None, bytes(5 << 20))
    pair.run(*(SendMessage(DECODE, one) for one in (Heartbeat(1), huge, Heartbeat(2))))
    assert [m for _, f in pair.channel.frames for m in f.messages] == [Heartbeat(1), Heartbeat(2)]


def test_d45_a_message_that_no_frame_holds_ends_no_loop(
    make_pair, caplog: pytest.LogCaptureFixture
) -> None:
    """D45: nothing that a request brings ends the loop, nor takes others' messages along."""
    check_a_message_for_no_frame(make_pair())
    assert "cannot be sent: Status, rank frame of 5243010 bytes exceeds" in caplog.text


def test_d45_a_frame_that_raises_is_noticed(make_pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: the encoder's word is final."""
    monkeypatch.setattr(executor_module, "_frames_of", encode_frames)
    with pytest.raises(CodecError):
        check_a_message_for_no_frame(make_pair())


# --- background calls -------------------------------------------------------------------


class HeldBackground:
    """Runs calls when the test says so."""

    def __init__(self) -> None:
        self.calls: list[tuple[Callable[[], Event], FailedCall]] = []
        self.answers: list[Event] = []

    def run(self, call: Callable[[], Event], failed: FailedCall) -> None:
        self.calls.append((call, failed))

    def compute(self, call: Callable[[], Event], failed: FailedCall) -> None:
        self.calls.append((call, failed))

    def wake(self) -> None:
        return None

    def poll(self) -> list[Event]:
        found, self.answers = self.answers, []
        return found

    def fileno(self) -> int | None:
        return None

    def close(self) -> None:
        return None


def test_d28_a_route_is_asked_for_in_the_background(make_pair) -> None:
    """D28: and whatever the call raises becomes an answer, or decode would wait for ever."""
    asked: list[str] = []
    background = HeldBackground()

    def fetch(bootstrap: str) -> TopologyFetched:
        asked.append(bootstrap)
        return route_missing(bootstrap)

    pair = make_pair(fetch=fetch, background=background)
    assert pair.run(FetchTopology("a:1"), FetchTopology("b:2")) == []
    assert asked == []
    answers = [call() for call, _ in background.calls]
    assert [a.bootstrap for a in answers if isinstance(a, TopologyFetched)] == ["a:1", "b:2"]
    (_, failed), *_ = background.calls
    answer = failed(KeyError("surprise"))
    assert isinstance(answer, TopologyFetched)
    assert (answer.bootstrap, answer.route) == ("a:1", None)
    assert answer.failure is not None
    assert answer.failure.code == "unreachable"
    assert "KeyError" in answer.failure.detail


# --- checksums --------------------------------------------------------------------------


def summing(pair: Pair) -> LegPart:
    """Of the 64 bytes that :meth:`Pair.post` moves, with one cut per block of 4 tokens."""
    pair.executor.summing.memory[1] = pair.executor.transport._endpoint.regions.arrays[1]
    entry = KVCacheEntry("k", "full", "uint8", 4, 1, 1, 16)
    spec = KVCacheSpec((entry,))
    place, _ = place_entries(spec, 4, region=1)
    blocks = {"full": [0]}
    return LegPart(LegSums(spec, place, spec, True), blocks, {"full": [1]}, ((0, 4),), (0, 1))


def to_be_summed(pair: Pair, handle: int) -> PostTransfer:
    return msgspec.structs.replace(pair.post(handle), sums=summing(pair))


EXPECTED = zlib.crc32(bytes(range(64))).to_bytes(4, "little")


def test_checksums_are_taken_before_the_first_byte_leaves_and_come_with_the_end(make_pair) -> None:
    """Issue 4.7: once, when nothing of the transfer can land any more."""
    pair = make_pair(stepped=True)
    assert pair.run(to_be_summed(pair, 41)) == []
    assert pair.executor.answers() == []
    pair.executor.summing.memory[1][:] = 0
    pair.fabric.run()
    assert pair.executor.poll() == [HandleEnded(41, True, None, (4, EXPECTED))]


def check_summing_is_off_the_loop(pair: Pair, background: HeldBackground) -> None:
    """A gigabyte took the loop a second, in which it answered no heartbeat: carrying out the
    effect reads nothing, and writes nothing that is not summed."""
    effect = to_be_summed(pair, 41)
    memory = pair.executor.summing.memory.pop(1)
    assert pair.run(effect) == []
    assert pair.executor.answers() == []
    pair.executor.summing.memory[1] = memory
    assert len(background.calls) == 1
    ((call, _),) = background.calls
    assert pair.executor.poll() == []
    background.answers.append(call())
    assert pair.executor.answers() == []
    assert pair.executor.poll() == [HandleEnded(41, True, None, (4, EXPECTED))]


def test_d24_prefill_sums_off_the_loop(make_pair) -> None:
    """D24, rule 6."""
    background = HeldBackground()
    check_summing_is_off_the_loop(make_pair(background=background), background)


def test_d24_summing_on_the_loop_is_noticed(make_pair) -> None:
    """The mutant: calls are made where they are asked for."""
    background = HeldBackground()
    vars(background)["compute"] = lambda call, failed: background.answers.append(call())
    with pytest.raises((AssertionError, KeyError)):
        check_summing_is_off_the_loop(make_pair(background=background), background)


def test_a_transfer_that_is_cancelled_before_it_is_summed_writes_nothing(make_pair) -> None:
    """Rule 9: its handle ends once, and the late answer finds nobody."""
    background = HeldBackground()
    pair = make_pair(background=background)
    pair.run(to_be_summed(pair, 41))
    (event,) = pair.run(CancelTransfer(41))
    assert (event.handle, event.quiesced, event.failure.code) == (41, True, "transfer_failed")
    assert pair.run(CancelTransfer(41)) == []
    ((call, _),) = background.calls
    background.answers.append(call())
    assert pair.executor.answers() == []
    assert pair.executor.poll() == []
    assert not pair.decode._endpoint.regions.arrays[1].any()
    assert len(pair.executor.summing) == len(pair.executor._handles) == 0


def test_checksums_that_cannot_be_taken_fail_their_transfer(make_pair) -> None:
    pair = make_pair(background=(background := HeldBackground()))
    pair.run(to_be_summed(pair, 41))
    ((_, failed),) = background.calls
    background.answers.append(failed(KeyError(1)))
    (event,) = pair.executor.answers()
    assert (event.handle, event.quiesced) == (41, True)
    assert event.failure.detail == "taking checksums raised KeyError: 1"


def test_answers_of_other_calls_are_passed_on(make_pair) -> None:
    pair = make_pair()
    pair.run(FetchTopology("a:1"))
    assert pair.executor.answers() == [route_missing("a:1")]


def test_comparing_is_off_the_tick_and_says_what_is_wrong(make_pair) -> None:
    pair = make_pair()
    part = summing(pair)._replace(dst_blocks={"full": [1]})
    right = part.sums(pair.executor.summing.memory)
    for sums, problem in ((right, ""), (b"9999", "the KV of 1 of 1 checked parts")):
        assert pair.run(VerifyBlocks(KEY, LEASE, 3, part, sums)) == []
        (event,) = pair.executor.answers()
        assert isinstance(event, BlocksVerified)
        assert (event.key, event.lease, event.rank) == (KEY, LEASE, 3)
        assert event.problem.startswith(problem)
        assert bool(event.problem) == bool(problem)


def test_memory_that_is_gone_is_an_answer_too(make_pair) -> None:
    """A worker closes while its threads compare: somebody waits for their event."""
    background = Background()
    pair = make_pair(background=background)
    part = summing(pair)
    pair.executor.summing.memory.clear()
    pair.run(VerifyBlocks(KEY, LEASE, 3, part, b"9999"))
    assert select.select([background], [], [], 20.0)[0]
    (event,) = background.poll()
    background.close()
    assert event.problem == "comparing raised KeyError: 1"
