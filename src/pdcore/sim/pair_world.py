"""Sender x receiver x transport x network: real cores of one decode rank and its prefill ranks.

Each place holds one process life, an :class:`~pdcore.sim.actors.Actor` around a production
core. What an actor does is computed once per (local state, event), by really running the
core, and remembered: a global state is a few small numbers (a local state per place, the
messages, the writes, what is still to come), so a million of them fit and are quick.

The network: messages are a set that only grows. A message that was sent may be delivered from
then on any number of times, in any order, or never: loss, duplication, reordering and any
delay in one. Whether a delivery may be *counted on* is another question (liveness): only if its
sender, as it is now, still resends the message, or if it answers one that is resent (rule 4).
Every other delivery is a fault like any other.

The transport: a write may land from the moment it is posted until its handle quiesced. What
a process that dies leaves behind is the world's choice (``outlives``), how decode learns of it
follows the declared revocation kind. Nothing is said about bytes: a write that may land while
its lease is not pinned by its receiver is the corruption.
"""

from __future__ import annotations

from collections.abc import Iterator

from pdcore.sim.actors import Connected, Offer
from pdcore.sim.explore import Move
from pdcore.sim.pair_book import Book, Local, Outlive, Step
from pdcore.sim.places import life_of
from pdcore.types import LeaseId

#: (local state per place..., messages, writes of nobody, what is still to come): numbers.
State = tuple[int, ...]


class Agenda:
    """What is still to come from the router, as bits of one number.

    Per (dispatch, place): it arrives, it arrives again. Then: the router may dispatch again.
    Then per dispatch: decode failed it, so prefill is cancelled (CD); it was replaced, so both
    halves are cancelled. Cancels are resent until answered: the bits stay."""

    def __init__(self, book: Book) -> None:
        self.places = book.places
        self.rules = book.rules
        self.dispatches = book.rules.shape.dispatches
        self._count = len(book.places)
        self.retry = 1 << (2 * len(self.dispatches) * self._count)
        self.arrivals = 0
        for index in range(len(self.dispatches)):
            for slot in range(self._count):
                self.arrivals |= self.arrival(index, slot)

    def arrival(self, index: int, slot: int) -> int:
        return 1 << (2 * (index * self._count + slot))

    def again(self, index: int, slot: int) -> int:
        return 2 << (2 * (index * self._count + slot))

    def failed(self, index: int) -> int:
        return self.retry << (1 + 2 * index)

    def replaced(self, index: int) -> int:
        return self.retry << (2 + 2 * index)

    def dispatch(self, index: int) -> int:
        """The router dispatches: to decode and to every rank of the prefill instance."""
        bits = 0
        for slot, place in enumerate(self.places):
            if place.is_decode or place.instance == self.dispatches[index].prefill:
                bits |= self.arrival(index, slot)
                if place.name in self.rules.duplicates:
                    bits |= self.again(index, slot)
        return bits

    def first(self) -> int:
        if self.rules.is_retry:
            return self.retry | self.dispatch(0)
        bits = 0
        for index in range(len(self.dispatches)):
            bits |= self.dispatch(index)
        return bits

    def dispatch_again(self, todo: int) -> int:
        """The second attempt; the first is cancelled."""
        return todo & ~self.retry | self.replaced(0) | self.dispatch(1)

    def all_failed(self) -> int:
        bits = 0
        for index in range(len(self.dispatches)):
            bits |= self.failed(index)
        return bits

    def is_cancelled(self, todo: int, index: int, *, is_decode: bool) -> bool:
        known = self.replaced(index) | (0 if is_decode else self.failed(index))
        return bool(todo & known)


class Lives:
    """Deaths, starts, and how the rest of the world hears of them."""

    def __init__(self, book: Book, agenda: Agenda) -> None:
        self.book = book
        self.agenda = agenda
        self.rules = book.rules
        count = len(book.places)
        self.net, self.late, self.todo = count, count + 1, count + 2

    def moves(self, state: State, slot: int, local: Local) -> Iterator[Move[State]]:
        facts = local.actor_facts
        if facts.is_dead:
            born = self.book.born(slot, facts.life + 1)
            name = self.book.places[slot].name
            new = changed(state, {slot: born.number})
            yield Move(f"{name} starts again", True, new)
            yield from self._unreachable(state, slot)
            return
        if self.book.places[slot].name in self.rules.crashes and not facts.life:
            yield self._crash(state, slot, local)
        yield from self._losses(state, slot, local)

    def _crash(self, state: State, slot: int, local: Local) -> Move[State]:
        """Its writes may outlive it; the router's connection to it breaks."""
        place = self.book.places[slot]
        dead = self.book.dead(slot, local.actor_facts.life)
        late, todo = state[self.late], state[self.todo]
        if self.rules.outlive is not Outlive.NO:
            late |= local.writes
        if place.is_decode:
            todo |= self.agenda.all_failed()
        name = life_of(place.ref(local.actor_facts.life).incarnation)
        new = changed(state, {slot: dead.number, self.late: late, self.todo: todo})
        return Move(f"{name} dies", True, new)

    def _unreachable(self, state: State, slot: int) -> Iterator[Move[State]]:
        """A dispatch to a place where nobody lives: its connection is refused."""
        for index in range(len(self.agenda.dispatches)):
            arrival = self.agenda.arrival(index, slot)
            if state[self.todo] & arrival:
                new = changed(state, {self.todo: state[self.todo] & ~arrival})
                name = self.book.places[slot].name
                yield Move(f"{name}: dispatch {index} is refused a connection", False, new)

    def _losses(self, state: State, slot: int, local: Local) -> Iterator[Move[State]]:
        """The transport tells the other end of a session that a process is gone."""
        if not self.rules.crashes:
            return
        me = self.book.places[slot]
        mine = me.ref(local.actor_facts.life).incarnation
        for other, place in enumerate(self.book.places):
            facts = self.book.locals[state[other]].actor_facts
            if place.is_decode is me.is_decode:
                continue
            for life in range(facts.life + facts.is_dead):
                gone = place.ref(life).incarnation
                session = Connected(gone, mine) if me.is_decode else Connected(mine, gone)
                if not state[self.net] & self.book.bit_of(session):
                    continue
                for fenced in self._verdicts(state, gone):
                    how = "dead and fenced" if fenced else "dead"
                    label = f"{life_of(gone)} is {how}"
                    step = self.book.step(local, ("lost", gone, fenced), label)
                    net = state[self.net] | step.emits
                    new = changed(state, {slot: step.target, self.net: net})
                    if step.rows or new != state:
                        yield Move(step.label, False, new, step.rows)

    def _verdicts(self, state: State, gone: bytes) -> tuple[bool, ...]:
        """Is it fenced? By what the transport declares."""
        match self.rules.outlive:
            case Outlive.NO:
                return (True,)
            case Outlive.UNREPORTED:
                return (False,)
            case Outlive.REPORTED:
                late = state[self.late]
                left = any(
                    late >> bit & 1 and w.source == gone for w, bit in self.book.writes.items()
                )
                return (False,) if left else (False, True)


def changed(state: State, changes: dict[int, int]) -> State:
    new = list(state)
    for position, value in changes.items():
        new[position] = value
    return tuple(new)


class PairWorld:
    """See the module. A :class:`~pdcore.sim.explore.World`."""

    def __init__(self, book: Book) -> None:
        self.book = book
        self.rules = book.rules
        self.agenda = Agenda(book)
        self.lives = Lives(book, self.agenda)
        self.count = len(book.places)
        self.net, self.late, self.todo = self.count, self.count + 1, self.count + 2
        self.decode_slots = tuple(s for s, p in enumerate(book.places) if p.is_decode)

    def initial(self) -> State:
        born = [self.book.born(slot, 0).number for slot in range(self.count)]
        state: State = (*born, 0, 0, self.agenda.first())
        for words in self.rules.prologue:
            state = next(move.state for move in self.moves(state) if words in move.label)
        return state

    # --- moves --------------------------------------------------------------------------

    def moves(self, state: State) -> Iterator[Move[State]]:
        yield from self._deliveries(state)
        for slot in range(self.count):
            local = self.book.locals[state[slot]]
            if not local.actor_facts.is_dead:
                for offer in local.offers:
                    yield from self._offered(state, slot, local, offer)
            yield from self.lives.moves(state, slot, local)
        late, todo = state[self.late], state[self.todo]
        if late:
            for write, bit in self.book.writes.items():
                if late >> bit & 1:
                    label = f"a write of {life_of(write.source)} for {write.lease} lands late"
                    new = changed(state, {self.late: late & ~(1 << bit)})
                    yield Move(label, False, new)
        if todo & self.agenda.retry:
            new = changed(state, {self.todo: self.agenda.dispatch_again(todo)})
            yield Move("the router dispatches again", True, new)

    def _stepped(self, state: State, slot: int, step: Step, late: int, todo: int) -> State:
        """The state after a step at one place."""
        if self.book.places[slot].is_decode:
            for index in self.book.locals[step.target].actor_facts.failed:
                todo |= self.agenda.failed(index)
        net = state[self.net] | step.emits
        return (*state[:slot], step.target, *state[slot + 1 : self.count], net, late, todo)

    def _deliveries(self, state: State) -> Iterator[Move[State]]:
        book = self.book
        net = state[self.net]
        resent = answered = 0
        found: list[tuple[int, int, Step]] = []
        for number in state[: self.count]:
            resent |= book.locals[number].resends
        for slot in range(self.count):
            local = book.locals[state[slot]]
            if local.actor_facts.is_dead:
                continue
            waiting = net & book.inbox[slot] & ~local.deaf
            while waiting:
                low = waiting & -waiting
                waiting ^= low
                step = local.steps.get(low.bit_length() - 1)
                if step is None:
                    step = book.delivery(local, low.bit_length() - 1)
                if resent & low:
                    answered |= step.says
                found.append((slot, low, step))
        fair = resent | answered
        for slot, low, step in found:
            new = self._stepped(state, slot, step, state[self.late], state[self.todo])
            if step.rows or new != state:
                yield Move(step.label, not fair & low, new, step.rows)

    def _offered(
        self, state: State, slot: int, local: Local, offer: Offer
    ) -> Iterator[Move[State]]:
        event, is_fault = offer.event, offer.is_fault
        late, todo = state[self.late], state[self.todo]
        match offer.needs:
            case ("dispatch", int() as index):
                arrival, again = self.agenda.arrival(index, slot), self.agenda.again(index, slot)
                if todo & arrival:
                    todo &= ~arrival
                elif todo & again:
                    todo, is_fault = todo & ~again, True
                else:
                    return
            case ("abort", int() as index):
                is_decode = self.book.places[slot].is_decode
                is_cancel = self.agenda.is_cancelled(todo, index, is_decode=is_decode)
                if not is_cancel and not self.book.allows("abort", self.book.places[slot]):
                    return
                is_fault = not is_cancel
            case ("deadline",):
                is_fault = self.book.places[slot].name not in self.rules.fair_deadlines
            case ("lives", bytes() as target):
                if not self._lives(state, target):
                    return
            case ("over", bytes() as target):
                if self._lives(state, target):
                    return
            case ("route", str() as bootstrap):
                event = (*event, self._registered(state, bootstrap))
            case ("landed", tuple() as leases):
                if self._on_the_way(state, leases):
                    return
            case _:
                pass
        step = self.book.step(local, event, offer.label)
        new = self._stepped(state, slot, step, late, todo)
        if step.rows or new != state:
            yield Move(step.label, is_fault, new, step.rows)

    def _lives(self, state: State, incarnation: bytes) -> bool:
        for slot in self.decode_slots:
            facts = self.book.locals[state[slot]].actor_facts
            if self.book.places[slot].ref(facts.life).incarnation == incarnation:
                return not facts.is_dead
        return False

    def _registered(self, state: State, bootstrap: str) -> tuple[int, ...]:
        """Lives that the bootstrap server names: the last that started, dead or not."""
        return tuple(
            self.book.locals[state[slot]].actor_facts.life
            for slot, place in enumerate(self.book.places)
            if place.bootstrap == bootstrap and not place.is_decode
        )

    def _on_the_way(self, state: State, leases: tuple[int, ...]) -> bool:
        late = state[self.late]
        return any(late >> bit & 1 and w.lease in leases for w, bit in self.book.writes.items())

    # --- judging ------------------------------------------------------------------------

    def problems(self, state: State) -> Iterator[str]:
        book = self.book
        flying = state[self.late]
        for number in state[: self.count]:
            local = book.locals[number]
            yield from local.actor_facts.problems
            flying |= local.writes
            if local.actor_facts.completed:
                yield from self._unsaid(state[self.net], local)
        if not flying:
            return
        for slot in self.decode_slots:
            facts = book.locals[state[slot]].actor_facts
            mine = book.places[slot].ref(facts.life).incarnation
            for write, bit in book.writes.items():
                if not flying >> bit & 1 or write.target != mine or facts.is_dead:
                    continue  # memory of a dead life belongs to nobody
                if self.rules.shape.is_enforced and write.lease not in facts.open_leases:
                    continue  # its target drops it
                if write.lease not in facts.pinned:
                    yield (
                        f"{life_of(write.source)} may still write under lease {write.lease} of "
                        f"{life_of(write.target)}, and its blocks are not kept for it any more"
                    )

    def _unsaid(self, net: int, local: Local) -> Iterator[str]:
        """Decode went on without the word of a rank: by what was sent, not by what it noted."""
        me = self.book.places[local.slot].ref(local.actor_facts.life).incarnation
        for lease, index in local.actor_facts.completed:
            prefill = self.agenda.dispatches[index].prefill
            for place in self.rules.shape.prefill:
                its = (LeaseId(me, lease), place.instance, place.rank)
                if place.instance == prefill and not net & self.book.dones.get(its, 0):
                    yield f"{life_of(me)} runs a request whose KV {place.name} never sent"

    def is_goal(self, state: State) -> bool:
        if state[self.late] or state[self.todo] & self.agenda.arrivals:
            return False
        return all(self.book.locals[n].actor_facts.is_at_rest for n in state[: self.count])

    def show(self, state: State) -> str:
        parts: list[str] = []
        for slot, number in enumerate(state[: self.count]):
            local = self.book.locals[number]
            name = self.book.places[slot].name
            if local.actor_facts.is_dead:
                parts.append(f"{name} is dead")
                continue
            rooms = self.book.rebuild(local).core.rooms
            parts.append(f"{name} {[r.entity for r in rooms.records.values()]}")
        if state[self.late]:
            writes = [w for w, bit in self.book.writes.items() if state[self.late] >> bit & 1]
            parts.append(f"on the way of dead writers {[w.lease for w in writes]}")
        return "; ".join(parts)
