"""Effects into calls: the only place where a core's wishes meet sockets and memory.

Order is kept (habit 3). Messages to one peer of one batch of effects share a frame. A
transfer that cannot be posted comes back at once as ``HandleEnded`` (quiesced, failed).
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Final, TypeVar

import msgspec

from pdcore.background import BackgroundCalls
from pdcore.control.base import ControlChannel
from pdcore.control.codec import decode_endpoint, encode_frames
from pdcore.control.messages import (
    Accepted,
    Finished,
    Frame,
    PeerMessage,
    Tokens,
    WorkerMessage,
)
from pdcore.errors import CodecError, PeerGone, TransportError, failure
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
    BlocksSummed,
    ConnectFailed,
    Event,
    HandleEnded,
    LeaseRevoked,
    PeerLost,
    TopologyFetched,
)
from pdcore.kv.checksums import ByteArray
from pdcore.scheduler.consensus import Consensus
from pdcore.scheduler.setup import CoreSetup
from pdcore.summing import Summed, Summing
from pdcore.transports.base import (
    Completion,
    HandleStatus,
    PeerDied,
    PeerSession,
    RemoteLease,
    Transport,
)
from pdcore.types import Incarnation, PeerRef

log = logging.getLogger(__name__)

V = TypeVar("V")

#: Process lives remembered: those that are dead and fenced, and as many that live.
MAX_LIVES: Final = 4096

#: Seconds in which a descriptor that could not be connected to is not tried again. A stopped
#: peer costs the loop, and every request of it, a connect time-out per try (1 s with shm).
CONNECT_AGAIN_S: Final = 5.0

#: Failed connects remembered.
MAX_UNREACHABLE: Final = 256

#: ``fetch(bootstrap)`` -> the answer as an event; runs in a background thread.
FetchRoute = Callable[[str], TopologyFetched]


class Executor:
    """Carries out effects of one core. Owned by the worker loop's thread. ``memory``: of the KV
    cache, by region, where this process can read it."""

    def __init__(
        self,
        setup: CoreSetup,
        transport: Transport,
        channel: ControlChannel,
        send: Callable[[WorkerMessage], None],
        consensus: Consensus,
        background: BackgroundCalls,
        fetch_route: FetchRoute,
        memory: dict[int, ByteArray] | None = None,
    ) -> None:
        self.setup = setup
        self.transport = transport
        self.channel = channel
        self.send = send
        self.consensus = consensus
        self.background = background
        self.fetch_route = fetch_route
        self._sessions: dict[Incarnation, PeerSession] = {}
        self.summing = Summing({} if memory is None else memory, background)
        self._handles = _Handles()
        self._lives = _Lives()
        self._unreachable = _Unreachable()

    def execute(self, effects: Iterable[Effect], now: float) -> list[Event]:
        """Carry out in order; returns the events that are known at once. ``now`` is
        monotonic time (seconds)."""
        self._unreachable.now = now
        frames: dict[PeerRef, list[PeerMessage]] = {}
        events: list[Event] = []
        for effect in effects:
            if isinstance(effect, ReduceVotes):
                if (reduced := self.consensus.reduce(effect)) is not None:
                    events.append(reduced)
            elif isinstance(effect, SendMessage):
                frames.setdefault(effect.to, []).append(effect.message)
            elif (report := to_leader(effect)) is not None:
                self.send(report)
            else:
                if isinstance(effect, ForgetPeer):  # a last word would connect again
                    frames.pop(effect.peer, None)
                events.extend(self._carry_out(effect))
        for peer, messages in frames.items():
            self._send_frames(peer, messages)
        return events

    def poll(self) -> list[Event]:
        """What the transport has to tell, as core events."""
        events: list[Event] = []
        for event in self.transport.poll():
            if isinstance(event, Completion):
                events.extend(self._completed(event))
            elif isinstance(event, PeerDied):
                self._sessions.pop(event.incarnation, None)
                address = self._lives.end(event.incarnation, event.fenced)
                if address is not None:
                    # Its successor listens elsewhere: a socket for each life would stay.
                    self.channel.forget(address)
                events.append(PeerLost(event.incarnation, event.fenced, event.detail))
            # A Notification is a wake-up only: STATUS Done is the completion (rule 5).
        return events

    def answers(self) -> list[Event]:
        """Of background calls. A transfer that waited for its checksums is posted now."""
        events: list[Event] = []
        for event in self.background.poll():
            if isinstance(event, BlocksSummed):
                events.extend(self._post_summed(event))
            else:
                events.append(event)
        return events

    # --- inside -------------------------------------------------------------------------

    def _carry_out(self, effect: Effect) -> list[Event]:
        if isinstance(effect, PostTransfer):
            if effect.sums is None:
                return self._post(effect, None)
            self.summing.take(effect, effect.sums)
        elif isinstance(effect, ConnectPeer):
            return self._open(effect)
        elif isinstance(effect, CancelTransfer):
            if self.summing.cancel(effect.handle):
                why = failure("transfer_failed", "cancelled before anything was written")
                return [HandleEnded(effect.handle, True, why)]
            if (handle := self._handles.posted.get(effect.handle)) is not None:
                self.transport.cancel(handle)
        elif isinstance(effect, GrantLease):
            self.transport.grant(RemoteLease(effect.lease, effect.ranges))
        elif isinstance(effect, RevokeLease):
            if self.transport.revoke(effect.lease):
                return [LeaseRevoked(effect.lease)]
        elif isinstance(effect, ReleaseLease):
            self.transport.release(effect.lease)
        elif isinstance(effect, FetchTopology):
            self._fetch(effect.bootstrap)
        elif isinstance(effect, VerifyBlocks):
            self.summing.verify(effect)
        elif isinstance(effect, FencePeer):
            return self._fence(effect.peer)
        elif isinstance(effect, ForgetPeer):
            self.channel.forget(effect.peer.address)
            self._disconnect(effect.peer.incarnation)
        else:
            raise TypeError(f"no one carries out {type(effect).__name__}")
        return []

    def _fetch(self, bootstrap: str) -> None:
        def failed(error: BaseException) -> TopologyFetched:
            detail = f"asking {bootstrap} for its route raised {type(error).__name__}: {error}"
            return TopologyFetched(bootstrap, None, failure("unreachable", detail))

        self.background.run(lambda: self.fetch_route(bootstrap), failed)

    def _post_summed(self, event: BlocksSummed) -> list[Event]:
        effect = self.summing.taken(event)
        if effect is None:
            return []
        if event.problem:
            return [HandleEnded(effect.handle, True, failure("transfer_failed", event.problem))]
        return self._post(effect, (effect.start_token + effect.num_tokens, event.sums))

    def _post(self, effect: PostTransfer, summed: Summed | None) -> list[Event]:
        """A session that lost its peer never comes back. What it refuses was not written (G3), so
        the same process life is connected to anew, once."""
        is_old = effect.peer.incarnation in self._sessions
        try:
            session = self._session(effect.peer, effect.endpoint)
            lease = RemoteLease(effect.lease, effect.ranges)
            handle = self.transport.submit(session, effect.batches, lease)
        except TransportError as error:
            if isinstance(error, PeerGone):
                self._disconnect(effect.peer.incarnation)
                if is_old:
                    return self._post(effect, summed)
            why = failure("transfer_failed", f"{type(error).__name__}: {error}")
            return [HandleEnded(effect.handle, True, why)]
        self._handles.add(handle, effect.handle, summed)
        return []

    def _open(self, effect: ConnectPeer) -> list[Event]:
        try:
            self._session(effect.peer, effect.endpoint)
        except TransportError as error:
            detail = f"its data plane cannot be reached: {error}"
            return [ConnectFailed(effect.peer.incarnation, detail)]
        return []

    def _session(self, peer: PeerRef, descriptor: bytes) -> PeerSession:
        """A session belongs to one incarnation: no reconnect by address (rule 7)."""
        if (known := self._sessions.get(peer.incarnation)) is not None:
            return known
        try:
            endpoint = decode_endpoint(descriptor)
        except CodecError as error:
            raise TransportError(str(error)) from error
        # Whoever names another's incarnation beside his own descriptor makes only that unreachable.
        key = (peer.incarnation, endpoint.transport_descriptor)
        self._unreachable.check(key)
        try:
            session = self.transport.connect(endpoint.transport_descriptor)
        except TransportError as error:
            self._unreachable.add(key, error)
            raise
        if session.incarnation != peer.incarnation:
            self.transport.disconnect(session)
            raise TransportError("the descriptor belongs to another process than its sender")
        self._sessions[session.incarnation] = session
        return session

    def _completed(self, event: Completion) -> list[Event]:
        core_handle, summed = self._handles.find(event.handle)
        if core_handle is None:
            return []
        if event.quiesced:
            self._handles.end(event.handle)
        why = None
        if event.status is not HandleStatus.DONE:
            why = failure("transfer_failed", event.detail or f"the write {event.status.value}")
        return [HandleEnded(core_handle, event.quiesced, why, summed)]

    def _fence(self, peer: PeerRef) -> list[Event]:
        """Prefill: destroy the session, its handles end. Decode: only a death that the
        transport saw and that fences counts; anything else keeps the blocks out."""
        self._disconnect(peer.incarnation)
        if self._lives.is_fenced(peer.incarnation):
            return [PeerLost(peer.incarnation, True, "its process is gone")]
        return []

    def _disconnect(self, incarnation: Incarnation) -> None:
        if (session := self._sessions.pop(incarnation, None)) is not None:
            self.transport.disconnect(session)

    def _send_frames(self, peer: PeerRef, messages: list[PeerMessage]) -> None:
        if not self._lives.speak_to(peer):
            return
        me = self.setup.me
        frame = Frame(me.instance, me.rank, me.incarnation, me.address, peer.incarnation, messages)
        for data in _frames_of(frame):
            if not self.channel.send(peer.address, data):
                log.debug("control channel refused a frame to %s; it is resent", peer.address)


def _frames_of(frame: Frame) -> list[bytes]:
    """Without a message that no frame holds: only its own request ends, by its deadline (D45)."""
    try:
        return encode_frames(frame)
    except CodecError as error:
        if len(frame.messages) == 1:
            log.error("cannot be sent: %s, %s", type(frame.messages[0]).__name__, error)
            return []
    alone = (msgspec.structs.replace(frame, messages=[one]) for one in frame.messages)
    return [data for one in alone for data in _frames_of(one)]


class _Handles:
    """Of transfers that have not quiesced: the transport's number, the core's, checksums."""

    def __init__(self) -> None:
        #: Core handle -> transport handle.
        self.posted: dict[int, int] = {}
        self._live: dict[int, tuple[int, Summed | None]] = {}

    def add(self, handle: int, core_handle: int, summed: Summed | None) -> None:
        self.posted[core_handle] = handle
        self._live[handle] = core_handle, summed

    def find(self, handle: int) -> tuple[int | None, Summed | None]:
        return self._live.get(handle, (None, None))

    def end(self, handle: int) -> None:
        core_handle, _ = self._live.pop(handle)
        self.posted.pop(core_handle, None)

    def __len__(self) -> int:
        return len(self.posted) + len(self._live)


class _Lives:
    """Which process lives are over for good, and where the others were spoken to. Who is
    over hears nothing, so nothing is sent: that would open a socket to nobody."""

    def __init__(self) -> None:
        #: Those that are over -> nothing of them can land any more.
        self._over: OrderedDict[Incarnation, bool] = OrderedDict()
        self._addresses: OrderedDict[Incarnation, str] = OrderedDict()

    def is_fenced(self, incarnation: Incarnation) -> bool:
        return self._over.get(incarnation, False)

    def speak_to(self, peer: PeerRef) -> bool:
        """False: it is over."""
        if peer.incarnation in self._over:
            return False
        if self._addresses.get(peer.incarnation) != peer.address:
            self._addresses[peer.incarnation] = peer.address
            _trim(self._addresses)
        return True

    def end(self, incarnation: Incarnation, fenced: bool) -> str | None:
        """Dead. The address where nobody else lives now, if it was spoken to."""
        self._over[incarnation] = fenced or self.is_fenced(incarnation)
        _trim(self._over)
        address = self._addresses.pop(incarnation, None)
        return None if address in self._addresses.values() else address


def _trim(lives: OrderedDict[Incarnation, V]) -> None:
    while len(lives) > MAX_LIVES:
        lives.popitem(last=False)


class _Unreachable:
    """Process lives that could not be connected to. ``now`` is set by who calls: no clock here."""

    def __init__(self) -> None:
        self.now = 0.0
        self._failed: OrderedDict[tuple[Incarnation, bytes], tuple[float, str]] = OrderedDict()

    def add(self, key: tuple[Incarnation, bytes], error: TransportError) -> None:
        self._failed.pop(key, None)
        self._failed[key] = self.now + CONNECT_AGAIN_S, str(error)
        while len(self._failed) > MAX_UNREACHABLE:
            self._failed.popitem(last=False)

    def check(self, key: tuple[Incarnation, bytes]) -> None:
        """Raises TransportError, with the reason of then, while it is too soon."""
        until_s, why = self._failed.get(key, (self.now, ""))
        if self.now < until_s:
            raise TransportError(f"{why} (tried within the last {CONNECT_AGAIN_S:.0f} s)")
        self._failed.pop(key, None)


def to_leader(effect: Effect) -> WorkerMessage | None:
    """The message to the leader that this effect is, or None."""
    if isinstance(effect, ReportTokens):
        return Tokens(effect.keys, list(effect.token_ids), effect.logprobs)
    if isinstance(effect, ReportAccepted):
        return Accepted(effect.key)
    if isinstance(effect, ReportFinished):
        return Finished(
            effect.key,
            effect.reason.value,
            effect.failure,
            effect.prompt_tokens,
            effect.completion_tokens,
            effect.timeline,
        )
    return None
