"""What a pair world remembers: numbers for messages, writes and local states of actors.

What an event does to an actor is computed once per (local state, event), by really running
its core, and remembered as a :class:`Step`. A local state is kept as the way to it: what
happened to its process since it started, so that its actor can be made again.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Final, NamedTuple

import attrs
import msgspec

from pdcore.control.messages import Handshake, Status, StatusKind
from pdcore.sim.actors import (
    Actor,
    ActorEvent,
    Offer,
    Output,
    Packet,
    Write,
    is_at_rest,
    pack,
    resends,
    unpack,
)
from pdcore.sim.decode_actor import DecodeActor
from pdcore.sim.firing import ROWS
from pdcore.sim.packets import describe
from pdcore.sim.places import Place, Shape
from pdcore.sim.prefill_actor import PrefillActor
from pdcore.types import LeaseId

#: Ticks until a core must have come to rest.
MAX_TICKS: Final = 50


class Outlive(enum.Enum):
    """What becomes of a dead process's writes, and how that ends."""

    #: They die with it, and the transport says so (death fences).
    NO = "die with their process"
    #: They may land later; the transport reports when nothing of that life can any more.
    REPORTED = "outlive their process, the transport reports their end"
    #: They may land later; nobody says when, but within the declared period. While the process
    #: lives its handles say when nothing of them lands any more.
    UNREPORTED = "outlive their process, for less than the quarantine"


@attrs.frozen
class Rules:
    """What may happen in a world. ``faults``: kinds of events that are allowed at all
    (:func:`kind_of`), everywhere or as "kind@place"; ``crashes``: places whose process
    may die, once each, and start anew."""

    shape: Shape
    faults: frozenset[str]
    crashes: frozenset[str] = frozenset()
    #: Words of the labels of the first moves: what happened before the world begins.
    prologue: tuple[str, ...] = ()
    outlive: Outlive = Outlive.NO
    #: Places where time passes: who waits for nobody there ends by its deadline. Elsewhere
    #: nothing may depend on that.
    fair_deadlines: frozenset[str] = frozenset()
    #: A tick follows each event at once, as in a loop that is never late.
    is_tick_eager: bool = False
    #: The dispatches after the first are made by the router when it likes.
    is_retry: bool = False
    #: Places where dispatches may arrive a second time.
    duplicates: frozenset[str] = frozenset()
    #: Decode also sends every handshake as one for a dummy target.
    has_dummies: bool = False


class Step(NamedTuple):
    """What one event does to one place. ``says`` are its own messages, ``emits`` also those
    that it resends from then on."""

    target: int
    says: int
    emits: int
    rows: tuple[str, ...]
    label: str


class Local:
    """One local state of one place: the way to it, and what others need to know of it."""

    __slots__ = (
        "actor_facts",
        "deaf",
        "event",
        "number",
        "offers",
        "parent",
        "resends",
        "slot",
        "steps",
        "writes",
    )

    def __init__(self, number: int, slot: int, parent: int, event: ActorEvent) -> None:
        self.number = number
        self.slot = slot
        #: The local state before, -1 for a process that just started, and what happened.
        self.parent = parent
        self.event = event
        self.steps: dict[object, Step] = {}
        #: Messages that change nothing here.
        self.deaf = 0
        self.actor_facts = Facts(0, False, (), True, (), ())
        self.offers: tuple[Offer, ...] = ()
        self.resends = 0
        self.writes = 0


class Facts(NamedTuple):
    life: int
    is_dead: bool
    problems: tuple[str, ...]
    is_at_rest: bool
    pinned: tuple[int, ...]
    open_leases: tuple[int, ...]
    #: Dispatches that were reported failed.
    failed: tuple[int, ...] = ()
    #: (lease, dispatch) whose KV has come, as decode believes.
    completed: tuple[tuple[int, int], ...] = ()


def kind_of(event: ActorEvent) -> str:
    """The kind of a fault: what :class:`Rules` allows or not."""
    match event:
        case ("timer", str() as kind, _):
            return kind
        case ("computed", _):
            return "engine"
        case ("ended", _, "unsure"):
            return "unsure"
        case ("ended", _, _):
            return "transfer"
        case ("route", _, _):
            return "route"
        case _:
            return str(event[0])


def _dummy_twin(packet: Packet) -> Packet | None:
    """The same handshake, as if to a dummy target."""
    message = unpack(packet.data)
    if not isinstance(message, Handshake):
        return None
    return packet._replace(data=pack(msgspec.structs.replace(message, is_dummy=True)))


def _done_of(packet: Packet) -> tuple[LeaseId, str, int] | None:
    """The lease and the place of the rank that says Done of it."""
    message = unpack(packet.data)
    if isinstance(message, Status) and message.kind is StatusKind.DONE:
        return message.lease, packet.sender.instance, packet.sender.rank
    return None


class Book:
    """Numbers for what is met: messages and sessions, writes, local states."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.places: tuple[Place, ...] = (*rules.shape.prefill, *rules.shape.decode)
        self.log = ROWS
        self.outputs: dict[Output, int] = {}
        self.packets: list[Packet | None] = []
        self.inbox = [0] * len(self.places)
        self.writes: dict[Write, int] = {}
        #: (lease, place of a prefill rank) -> its messages that say Done of it.
        self.dones: dict[tuple[LeaseId, str, int], int] = {}
        self.locals: list[Local] = []
        self._keys: dict[tuple[object, ...], int] = {}

    def bit_of(self, output: Output) -> int:
        bit = self.outputs.get(output)
        if bit is None:
            bit = self.outputs[output] = len(self.outputs)
            packet = output if isinstance(output, Packet) else None
            self.packets.append(packet)
            done = None if packet is None else _done_of(packet)
            if done is not None:
                self.dones[done] = self.dones.get(done, 0) | 1 << bit
            for slot, place in enumerate(self.places):
                if packet is not None and packet.address == place.ref(0).address:
                    self.inbox[slot] |= 1 << bit
        return 1 << bit

    def write_bit(self, write: Write) -> int:
        return 1 << self.writes.setdefault(write, len(self.writes))

    def mask_of(self, outputs: Iterable[Output]) -> int:
        mask = 0
        for output in outputs:
            mask |= self.bit_of(output)
            if self.rules.has_dummies and isinstance(output, Packet):
                twin = _dummy_twin(output)
                mask |= 0 if twin is None else self.bit_of(twin)
        return mask

    def actor(self, slot: int, life: int) -> Actor:
        place = self.places[slot]
        if place.is_decode:
            return DecodeActor(place, life, self.rules.shape)
        return PrefillActor(place, life, self.rules.shape)

    def rebuild(self, local: Local) -> Actor:
        """The actor of a local state, made again by what happened to it."""
        events: list[ActorEvent] = []
        at = local
        while at.parent >= 0:
            events.append(at.event)
            at = self.locals[at.parent]
        actor = self.actor(at.slot, at.actor_facts.life)
        for event in reversed(events):
            self.feed(actor, event)
        return actor

    def feed(self, actor: Actor, event: ActorEvent) -> list[Output]:
        """One event, and the ticks that follow it where ticks are eager."""
        out = list(actor.apply(event))
        if self.rules.is_tick_eager:
            for _ in range(MAX_TICKS):
                if not actor.core.wants_tick or actor.problems:
                    break
                out += actor.apply(("tick",))
            else:
                actor.problems.append(f"{actor.place.name} ticks without end")
        return out

    def born(self, slot: int, life: int) -> Local:
        """A process that just started."""
        return self.intern(self.actor(slot, life), slot, -1, ("start",))

    def dead(self, slot: int, life: int) -> Local:
        key = ("dead", slot, life)
        number = self._keys.get(key)
        if number is None:
            local = self._new(key, slot, -1, ("death",))
            local.actor_facts = Facts(life, True, (), True, (), ())
            return local
        return self.locals[number]

    def intern(self, actor: Actor, slot: int, parent: int, event: ActorEvent) -> Local:
        key = (slot, actor.life, actor.key())
        number = self._keys.get(key)
        if number is not None:
            return self.locals[number]
        local = self._new(key, slot, parent, event)
        pinned: tuple[int, ...] = ()
        open_leases: tuple[int, ...] = ()
        completed: tuple[tuple[int, int], ...] = ()
        if isinstance(actor, DecodeActor):
            completed = actor.completed()
            pinned, open_leases = actor.pinned(), tuple(sorted(actor.open_leases))
        elif isinstance(actor, PrefillActor):
            for write in actor.writes.values():
                local.writes |= self.write_bit(write)
        local.actor_facts = Facts(
            actor.life,
            False,
            tuple(actor.problems),
            is_at_rest(actor),
            pinned,
            open_leases,
            tuple(sorted(actor.failed)),
            completed,
        )
        local.offers = tuple(o for o in actor.offers() if self._may_happen(o, actor.place))
        local.resends = self.mask_of(resends(actor))
        return local

    def _may_happen(self, offer: Offer, place: Place) -> bool:
        match offer.needs:
            case ("abort", _):
                return True  # whether it does is asked when it is time
            case ("deadline",) if place.name in self.rules.fair_deadlines:
                return True
            case _:
                return not offer.is_fault or self.allows(kind_of(offer.event), place)

    def allows(self, kind: str, place: Place) -> bool:
        return bool({kind, f"{kind}@{place.name}"} & self.rules.faults)

    def _new(self, key: tuple[object, ...], slot: int, parent: int, event: ActorEvent) -> Local:
        local = Local(len(self.locals), slot, parent, event)
        self._keys[key] = local.number
        self.locals.append(local)
        return local

    def step(self, local: Local, event: ActorEvent, label: str) -> Step:
        """What ``event`` does, computed by running the core once."""
        known = local.steps.get(event)
        if known is not None:
            return known
        actor = self.rebuild(local)
        self.log.clear()
        says = self.mask_of(self.feed(actor, event))
        rows = self.log.taken()
        target = self.intern(actor, local.slot, local.number, event)
        step = Step(
            target.number,
            says,
            says | target.resends,
            rows,
            f"{self.places[local.slot].name}: {label}",
        )
        local.steps[event] = step
        return step

    def delivery(self, local: Local, bit: int) -> Step:
        known = local.steps.get(bit)
        if known is not None:
            return known
        packet = self.packets[bit]
        assert packet is not None
        step = self.step(local, ("deliver", packet), f"gets {describe(packet)}")
        local.steps[bit] = step
        if step.target == local.number and not step.says and not step.rows:
            local.deaf |= 1 << bit
        return step
