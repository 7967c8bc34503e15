"""One process life of a rank, driven event by event: the real core, and nothing else.

An actor owns a :class:`~pdcore.scheduler.prefill.PrefillCore` or a
:class:`~pdcore.scheduler.decode.DecodeCore`, feeds it one event at a time and tells what came
out of it. Time does not pass here: a timer that is armed may go off at any moment, by name.
:meth:`Actor.key` is everything that its future depends on; two actors with the same key do
the same from then on (a test holds them to it).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Final, NamedTuple

import msgspec

from pdcore.control.messages import PeerMessage, Refuse, Status
from pdcore.errors import PdcoreError, RoomInUse
from pdcore.fsm.effects import (
    ConnectPeer,
    Effect,
    FencePeer,
    ReduceVotes,
    ReportFinished,
    SendMessage,
)
from pdcore.fsm.events import Event, MessageReceived, PeerLost, VotesReduced
from pdcore.kv.cache import KVBlocks
from pdcore.scheduler.decode import DecodeCore
from pdcore.scheduler.prefill import PrefillCore
from pdcore.sim.places import Place, Shape, num_blocks_of, setup_of
from pdcore.types import Failure, Incarnation, PeerRef, RoomKey

#: The one moment at which everything happens.
NOW: Final = 0.0
#: Failures travel, but what they say changes nothing.
WHY: Final = Failure("prefill_failed", "", 502)

#: An event of an actor: its name and its arguments, hashable.
ActorEvent = tuple[object, ...]


class Packet(NamedTuple):
    """A message on its way. ``to_incarnation`` is whom its sender believes to live there;
    ``data`` is the message, encoded, without texts and times."""

    sender: PeerRef
    address: str
    to_incarnation: Incarnation
    data: bytes


class Connected(NamedTuple):
    """A data plane session was opened: from now on this death is seen at the other end."""

    source: Incarnation
    target: Incarnation


#: What an event of an actor puts into the world, apart from its own new state.
Output = Packet | Connected


class Offer(NamedTuple):
    """Something that may happen to an actor by itself. ``needs`` names what the rest of the
    world must be like for it (see :mod:`pdcore.sim.pair_world`)."""

    event: ActorEvent
    label: str
    is_fault: bool
    needs: tuple[object, ...] = ()


class Write(NamedTuple):
    """A one-sided write under a lease that may still land."""

    source: Incarnation
    target: Incarnation
    lease: int


def pack(message: PeerMessage) -> bytes:
    """Encoded without what changes no lifecycle: texts, durations, reasons."""
    if isinstance(message, Status):
        why = None if message.failure is None else WHY
        message = msgspec.structs.replace(message, failure=why, timings={})
    elif isinstance(message, Refuse):
        message = msgspec.structs.replace(message, reason="")
    return msgspec.msgpack.encode(message)


@lru_cache(maxsize=4096)
def unpack(data: bytes) -> PeerMessage:
    return msgspec.msgpack.decode(data, type=PeerMessage)


def entity_number(index: int, ordinal: int) -> int:
    """Ids of different entities of one process never meet (nonces, leases, handles)."""
    return 100 * (10 * index + ordinal)


def index_of(number: int) -> int:
    """The dispatch whose entity has this number, or minted this id."""
    return number // 1000


class Actor:
    """What both roles share. ``apply`` one event at a time; never raises for what the core
    makes of it: that is a problem of the world."""

    __slots__ = (
        "created",
        "failed",
        "fenced",
        "life",
        "me",
        "out",
        "place",
        "problems",
        "results",
        "shape",
    )

    def __init__(self, place: Place, life: int, shape: Shape) -> None:
        self.place = place
        self.life = life
        self.shape = shape
        self.me = place.ref(life)
        self.out: list[Output] = []
        self.problems: list[str] = []
        #: Entities created per dispatch, and results of the present one.
        self.created = [0] * len(shape.dispatches)
        self.results = [0] * len(shape.dispatches)
        #: Dispatches whose failure was reported: the router knows.
        self.failed: set[int] = set()
        #: Lives that the transport reported dead and fenced.
        self.fenced: set[Incarnation] = set()

    @property
    def core(self) -> PrefillCore | DecodeCore:
        raise TypeError("an actor has a core: use a subclass")

    @property
    def holds_nothing(self) -> bool:
        """Beside blocks: what only one role has."""
        return True

    def key(self) -> tuple[object, ...]:
        raise TypeError("an actor has a key: use a subclass")

    def apply(self, event: ActorEvent) -> list[Output]:
        """Feed one event; the messages and sessions that follow from it."""
        self.out = []
        try:
            self._apply(event)
            self._drain()
            self.core.blocks.audit()
            self.problems.extend(self.exposed())
        except (PdcoreError, AssertionError) as error:
            self.problems.append(f"{self.place.name}: {type(error).__name__}: {error}")
        return self.out

    def exposed(self) -> Iterator[str]:
        """Blocks that are back in the pool while something here may touch them."""
        yield from ()

    def _apply(self, event: ActorEvent) -> None:
        match event:
            case ("deliver", Packet() as packet):
                message = unpack(packet.data)
                told = MessageReceived(packet.sender, packet.to_incarnation, message)
                self.core.handle_event(told, NOW)
            case ("lost", bytes() as incarnation, bool() as fenced):
                if fenced:
                    self.fenced.add(Incarnation(incarnation))
                self.core.handle_event(PeerLost(Incarnation(incarnation), fenced), NOW)
            case ("timer", str() as kind, RoomKey() | str() as key):
                self._go_off(kind, key)
            case ("abort", int() as index):
                gone = Failure("cancelled", "the client is gone", 499)
                self.core.abort(self._key(index), gone, NOW)
            case ("forget", int() as index):
                self.core.rooms.forget(self._key(index))
            case ("evict", int() as index):
                self.core.rooms.tombstones.pop(self._key(index), NOW)
            case ("tick",):
                self.core.tick(NOW)
            case _:
                raise TypeError(f"no such event: {event}")

    def _key(self, index: int) -> RoomKey:
        return self.shape.dispatches[index].key

    def _index(self, key: RoomKey) -> int:
        return next(i for i, d in enumerate(self.shape.dispatches) if d.key == key)

    def _submit(self, index: int) -> None:
        """A dispatch arrives; one for a room that is known is answered 409, no more."""
        try:
            self.core.submit(self.shape.request(index), NOW)
        except RoomInUse:
            return
        self.created[index] += 1
        self.results[index] = 0

    def _go_off(self, kind: str, key: object) -> None:
        """An armed timer falls due: the core is told so, at the one moment there is."""
        self.core.rooms.timers.arm(kind, key, NOW)
        self.core.handle_timeout(NOW)

    def _drain(self) -> None:
        """Carry out effects in order, as the shell does; what the shell knows at once comes
        back after all of them."""
        while effects := self.core.poll_effects():
            events: list[Event] = []
            for effect in effects:
                if isinstance(effect, SendMessage):
                    to = effect.to
                    self.out.append(
                        Packet(self.me, to.address, to.incarnation, pack(effect.message))
                    )
                elif isinstance(effect, ReduceVotes):
                    events.append(VotesReduced(effect.sequence, effect.votes))
                elif isinstance(effect, ConnectPeer):
                    self.out.append(Connected(self.me.incarnation, effect.peer.incarnation))
                elif isinstance(effect, ReportFinished):
                    self._finish(effect)
                elif isinstance(effect, FencePeer) and effect.peer.incarnation in self.fenced:
                    events.append(PeerLost(effect.peer.incarnation, True))
                else:
                    events.extend(self._carry_out(effect))
            for event in events:
                self.core.handle_event(event, NOW)

    def _carry_out(self, effect: Effect) -> Iterator[Event]:
        """Effects that only one role has."""
        raise TypeError(f"no one carries out {effect}")

    def _finish(self, effect: ReportFinished) -> None:
        index = self._index(effect.key)
        if effect.failure is not None:
            self.failed.add(index)
        self.results[index] += 1
        if self.results[index] > 1:
            self.problems.append(f"{self.place.name}: request {effect.key.room} has two results")

    def offers(self) -> Iterator[Offer]:
        """Everything that may happen here by itself."""
        for index in range(len(self.shape.dispatches)):
            yield from _request_offers(self, index)
        if self.core.wants_tick:
            yield Offer(("tick",), "tick", False)


def _request_offers(actor: Actor, index: int) -> Iterator[Offer]:
    """What may happen to one dispatch: only what more than one entity makes different is
    forgotten."""
    rooms, shape = actor.core.rooms, actor.shape
    key = shape.dispatches[index].key
    name = f"request {key.room}.{key.attempt}"
    record = rooms.records.get(key)
    if record is None:
        if actor.created[index] < shape.num_entities:
            yield Offer(("submit", index), f"{name} arrives", False, ("dispatch", index))
        if rooms.tombstones.get(key, NOW) is not None and shape.num_entities > 1:
            yield Offer(("evict", index), f"the tombstone of {name} is evicted", True)
        return
    if rooms.timers.is_armed("deadline", key):
        timer: ActorEvent = ("timer", "deadline", key)
        yield Offer(timer, f"the deadline of {name} passes", True, ("deadline",))
    if rooms.timers.is_armed("drain", key):
        timer = ("timer", "drain", key)
        yield Offer(timer, f"the draining of {name} takes too long", True)
    if rooms.timers.is_armed("linger", key) and shape.num_entities > 1:
        yield Offer(("forget", index), f"{name} is forgotten", True)
    if not record.is_reported:
        yield Offer(("abort", index), f"{name} is aborted", True, ("abort", index))


def resends(actor: Actor) -> list[Packet]:
    """Messages that are sent again and again until they are answered (rule 4)."""
    out: list[Packet] = []
    rooms = actor.core.rooms
    for record in rooms.records.values():
        if rooms.timers.is_armed("resend", record.key):
            for effect in record.entity.unanswered():
                if isinstance(effect, SendMessage):
                    to, data = effect.to, pack(effect.message)
                    out.append(Packet(actor.me, to.address, to.incarnation, data))
    return out


def is_at_rest(actor: Actor) -> bool:
    """Every entity has its one result, nothing is held."""
    core = actor.core
    return (
        all(record.is_over for record in core.rooms.records.values())
        and all(ledger.free == ledger.total for ledger in core.blocks.ledger().values())
        and all(n == 1 for n, made in zip(actor.results, actor.created, strict=True) if made)
        and actor.holds_nothing
    )


def common_key(actor: Actor) -> tuple[object, ...]:
    """The part of :meth:`Actor.key` that both roles have."""
    rooms, dispatches = actor.core.rooms, actor.shape.dispatches
    armed = tuple(
        tuple(
            rooms.timers.is_armed(kind, d.key) for kind in ("deadline", "drain", "linger", "resend")
        )
        for d in dispatches
    )
    tombs = (rooms.tombstones.get(d.key, NOW) for d in dispatches)
    return (
        tuple(actor.created),
        tuple(actor.results),
        tuple(actor.problems),
        tuple(sorted(actor.failed)),
        tuple(sorted(actor.fenced)),
        tuple(None if t is None else t.failure is not None for t in tombs),
        tuple(sorted(rooms.records.keys() & rooms._dirty.keys())),
        armed,
        actor.core.wants_tick,
        tuple(ledger.free for ledger in actor.core.blocks.ledger().values()),
    )


def make_blocks(place: Place, life: int, shape: Shape) -> KVBlocks:
    setup = setup_of(place, life, shape)
    return KVBlocks(setup.spec, num_blocks_of(place, shape), setup.max_model_len)
