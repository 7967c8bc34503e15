"""One process life of a decode rank: see :mod:`pdcore.sim.actors`."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

from pdcore.control.messages import Route
from pdcore.fsm.effects import (
    Effect,
    FetchTopology,
    GrantLease,
    ReleaseLease,
    ReportFinished,
    RevokeLease,
)
from pdcore.fsm.events import Event, LeaseRevoked, StepCompleted, TopologyFetched
from pdcore.fsm.receiver import Receiver
from pdcore.fsm.states import ReceiverState
from pdcore.scheduler.decode import DecodeCore
from pdcore.scheduler.decode_record import DecodeRecord
from pdcore.sim.actors import (
    NOW,
    Actor,
    ActorEvent,
    Offer,
    common_key,
    entity_number,
    index_of,
    make_blocks,
)
from pdcore.sim.places import TOKEN, Place, Shape, route_to, setup_of
from pdcore.types import Batch, Failure, StepOutput

#: Asking again cannot help: whoever waits for this route fails.
_REFUSED: Final = Failure("incompatible", "", 409)

_PINNED: Final = (ReceiverState.TRANSFERRING, ReceiverState.DRAINING)


class DecodeActor(Actor):
    """Events beyond the common ones: ``submit``, ``route`` (the answer of a bootstrap server,
    by the lives that it names; none: refused), ``look`` (a second of quarantine passes),
    ``step`` and ``stepped`` (a decode step begins and ends)."""

    __slots__ = (
        "_core",
        "aged_looks",
        "answered",
        "batch",
        "fetching",
        "granted",
        "looks",
        "open_leases",
    )

    def __init__(self, place: Place, life: int, shape: Shape) -> None:
        super().__init__(place, life, shape)
        self._core = DecodeCore(setup_of(place, life, shape), make_blocks(place, life, shape))
        self.batch: Batch | None = None
        #: Bootstrap addresses being asked.
        self.fetching: dict[str, None] = {}
        #: Leases that the transport accepts writes for.
        self.open_leases: set[int] = set()
        #: The last lease of each dispatch, and those of the ones that were answered well.
        self.granted: dict[int, int] = {}
        self.answered: set[tuple[int, int]] = set()
        self.looks = 0
        #: Of each lease: looks since no writer of it could post any more.
        self.aged_looks: Counter[int] = Counter()

    @property
    def core(self) -> DecodeCore:
        return self._core

    @property
    def holds_nothing(self) -> bool:
        """Every metadata slot is back, and the transport takes writes under no lease."""
        slots = self._core.rooms.slots
        return slots.available == slots.capacity and not self.open_leases

    def _apply(self, event: ActorEvent) -> None:
        core = self._core
        match event:
            case ("submit", int() as index):
                core._ids = itertools.count(entity_number(index, self.created[index]) + 1)
                self._submit(index)
            case ("route", str() as bootstrap, tuple() as lives):
                del self.fetching[bootstrap]
                route = self._route(bootstrap, lives)
                why = None if route is not None else _REFUSED
                core.handle_event(TopologyFetched(bootstrap, route, why), NOW)
            case ("timer", "topology", str() as bootstrap):
                core.prealloc.topologies.lookup(bootstrap, NOW).retry_s = NOW
                self._go_off("topology", bootstrap)
            case ("step",):
                self.batch = core.schedule(NOW)
            case ("stepped",):
                batch, self.batch = self.batch, None
                assert batch is not None
                output = StepOutput([[TOKEN] for _ in batch.sample])
                core.handle_event(StepCompleted(batch.batch_id, output), NOW)
            case ("look",):
                self.looks += 1
                for record in self._aging():
                    self.aged_looks[record.receiver.lease.counter] += 1
                core.rooms.timers.disarm("quarantine", "clock")
                core.rooms.age_quarantine(NOW + self.looks)
            case _:
                super()._apply(event)

    def _route(self, bootstrap: str, lives: Sequence[int]) -> Route | None:
        places = [p for p in self.shape.prefill if p.bootstrap == bootstrap]
        return route_to(places, lives, self.shape) if lives else None

    def _carry_out(self, effect: Effect) -> Iterator[Event]:
        match effect:
            case FetchTopology():
                self.fetching[effect.bootstrap] = None
            case GrantLease():
                self.open_leases.add(effect.lease.counter)
                self.granted[index_of(effect.lease.counter)] = effect.lease.counter
            case RevokeLease():
                if self.shape.is_enforced:
                    self.open_leases.discard(effect.lease.counter)
                    yield LeaseRevoked(effect.lease)
            case ReleaseLease():
                self.open_leases.discard(effect.lease.counter)
            case _:
                pass

    def _finish(self, effect: ReportFinished) -> None:
        super()._finish(effect)
        index = self._index(effect.key)
        if effect.failure is None:
            self.answered.add((self.granted.get(index, 0), index))

    def offers(self) -> Iterator[Offer]:
        yield from super().offers()
        rooms = self._core.rooms
        for bootstrap in self.fetching:
            needs = ("route", bootstrap)
            yield Offer(("route", bootstrap), f"the route of {bootstrap} comes", False, needs)
            refused: ActorEvent = ("route", bootstrap, ())
            yield Offer(refused, f"the route of {bootstrap} is refused", True)
        for bootstrap in self._core.prealloc.pending:
            if rooms.timers.is_armed("topology", bootstrap):
                timer: ActorEvent = ("timer", "topology", bootstrap)
                yield Offer(timer, f"{bootstrap} may be asked again", False)
        if self.batch is not None:
            yield Offer(("stepped",), "a decode step ends", False)
        elif len(self._core.running):
            yield Offer(("step",), "a decode step begins", False)
        if rooms.timers.is_armed("quarantine", "clock"):
            yield Offer(("look",), "a second of quarantine passes", False, ("landed", self.aged()))

    def aged(self) -> tuple[int, ...]:
        """Leases whose declared period, as counted here, is over with the next look: the
        transport promises that by then nothing of them is on its way."""
        leases = (record.receiver.lease.counter for record in self._aging())
        return tuple(n for n in leases if self.aged_looks[n] + 1 >= self.shape.quarantine_s)

    def _aging(self) -> list[DecodeRecord]:
        return [
            record
            for record in self._core.rooms.records.values()
            if record.aged_s is not None and record.receiver.state is ReceiverState.DRAINING
        ]

    def pinned(self) -> tuple[int, ...]:
        """Leases whose blocks are kept for their writers."""
        return tuple(
            record.receiver.lease.counter
            for record in self._core.rooms.records.values()
            if record.receiver.state in _PINNED and record.seq.seq_id in self._core.blocks
        )

    def completed(self) -> tuple[tuple[int, int], ...]:
        """(lease, dispatch) of what runs, or was answered, as if all of its KV had come."""
        running = (
            (record.receiver.lease.counter, self._index(record.key))
            for record in self._core.rooms.records.values()
            if record.receiver.state is ReceiverState.DONE
        )
        return tuple(sorted({*running, *self.answered}))

    def key(self) -> tuple[object, ...]:
        core = self._core
        prealloc = core.prealloc
        entries = tuple(
            (
                name,
                entry.route is not None
                and tuple(rank.incarnation for rank in entry.route.ranks.values()),
                entry.refusal is not None,
                entry.is_fetching,
            )
            for name, entry in prealloc.topologies.entries.items()
        )
        return (
            common_key(self),
            tuple(self._record_key(record) for record in core.rooms.records.values()),
            entries,
            tuple(prealloc.topologies._over),
            tuple(prealloc.pending),
            tuple(prealloc.waiting),
            tuple(sorted(prealloc._chosen & prealloc.waiting.keys())),
            tuple(self.fetching),
            tuple(sorted(self.open_leases)),
            tuple(sorted(self.answered)),
            core.rooms.timers.is_armed("quarantine", "clock"),
            len(core.running),
            self.batch is not None,
            core.rooms.slots.available,
            core.rooms.slots.num_quarantined,
        )

    def _record_key(self, record: DecodeRecord) -> tuple[object, ...]:
        return (
            record.key,
            _receiver_key(record.receiver),
            self.aged_looks[record.receiver.lease.counter] if record.aged_s is not None else -1,
            record.is_reported,
            record.is_stuck,
            record.seq.seq_id in self._core.blocks,
            record.slot is not None,
            record.seq.num_output_tokens,
        )


def _receiver_key(receiver: Receiver) -> tuple[object, ...]:
    targets = tuple(
        (
            rank,
            target.peer.incarnation,
            None if target.nonce is None else (target.nonce.incarnation, target.nonce.counter),
            target.over,
            target.record is not None,
            target.answered,
            target.cancel_answered,
            target.died and receiver.quarantine_s > 0,
        )
        for rank, target in receiver.targets.items()
    )
    return (
        receiver.state.value,
        receiver.lease.counter,
        receiver.failure is not None,
        targets,
        receiver.admission is not None,
        receiver.wants_admission,
        receiver.quarantine_s,
    )
