"""fsm: compiled lifecycles against stock ``transitions`` and a hand-written dict table.

The tables of sender and receiver, walked by the same scripts on every side: legal steps to
an end, with illegal events mixed in. All sides evaluate the same guards (a bit of the
payload) and return the same effects (a small value made by each action). Sides:

ours        the class that :func:`pdcore.fsm.machine.compile_lifecycle` makes
stock       ``machine.events[name].trigger(model)`` of one shared Machine with string states
            (faster than enum members there), no add_model, logging off: its best case
dict table  ``{event: {state: rows}}`` and a loop over the rows, states as strings
"""

from __future__ import annotations

import logging
import random
import statistics
import tracemalloc
from collections.abc import Callable, Iterable, Sequence

from transitions import Machine

from benchmarks.common import (
    Result,
    check,
    cpu_seconds,
    interleave,
    result_of,
    row,
)
from pdcore.fsm.effects import Effect
from pdcore.fsm.machine import compile_lifecycle
from pdcore.fsm.receiver import RECEIVER
from pdcore.fsm.sender import SENDER
from pdcore.fsm.table import Lifecycle

LIFECYCLES = 100_000
QUICK_LIFECYCLES = 4_000
#: Different walks; each is run LIFECYCLES / SCRIPTS times.
SCRIPTS = 50

Step = tuple[str, int]
Effects = Sequence[Effect] | None
Callback = Callable[[object, int], Sequence[Effect]]


class Done(Effect, frozen=True):
    action: str


# --- the same guards and effects for every side -----------------------------------------


def guard_names(table: Lifecycle) -> list[str]:
    return sorted({r.guard for r in table.rows if r.guard is not None})


def guard(bit: int) -> Callable[[object, int], bool]:
    mask = 1 << bit
    return lambda self, payload: payload & mask != 0


def action(name: str) -> Callback:
    return lambda self, payload: (Done(name),)


def callbacks(table: Lifecycle) -> dict[str, Callable[[object, int], object]]:
    guards = {name: guard(bit) for bit, name in enumerate(guard_names(table))}
    return guards | {a: action(a) for r in table.rows for a in r.actions}


def scripts(table: Lifecycle, seed: int) -> list[list[Step]]:
    """Walks from the initial to a terminal state. At each step, one time in four, an event
    that has no row in this state or whose guards all refuse; else any row that fires."""
    rng = random.Random(seed)
    guards = guard_names(table)
    made: list[list[Step]] = []
    while len(made) < SCRIPTS:
        state, steps = table.initial, list[Step]()
        while state not in table.terminal and len(steps) < 40:
            event = rng.choice(table.events)
            payload = rng.getrandbits(len(guards) or 1)
            fired = next(
                (
                    r
                    for r in table.rows_for(state, event)
                    if r.guard is None or payload >> guards.index(r.guard) & 1
                ),
                None,
            )
            if (fired is None) == (rng.random() < 0.25):
                steps.append((event, payload))
                state = fired.dest if fired is not None else state
        if state in table.terminal:
            # A terminal state absorbs: two late events, as a slow peer sends them.
            late = [rng.choice(table.events) for _ in range(2)]
            made.append([*steps, *((event, 0) for event in late)])
    return made


# --- ours -------------------------------------------------------------------------------


def ours(table: Lifecycle) -> type:
    def init(self) -> None:
        self.state = initial
        self.ignored = 0

    initial = table.initial
    body = {"__slots__": ("ignored", "state"), "__init__": init, **callbacks(table)}
    return compile_lifecycle(table, type("Ours", (), body))


def run_ours(cls: type, walks: Sequence[Sequence[Step]], repeat: int) -> int:
    prepared = [[(vars(cls)[event], payload) for event, payload in walk] for walk in walks]
    refused = 0
    for _ in range(repeat):
        for walk in prepared:
            entity = cls()
            for fire, payload in walk:
                if fire(entity, payload) is None:
                    refused += 1
    return refused


# --- stock transitions ------------------------------------------------------------------


def stock(table: Lifecycle) -> tuple[Machine, type]:
    machine = Machine(
        model=None,
        states=[s.value for s in table.states],
        initial=table.initial.value,
        auto_transitions=False,
        ignore_invalid_triggers=True,
    )
    for r in table.rows:
        dest = None if r.dest is r.source else r.dest.value
        machine.add_transition(
            r.event, r.source.value, dest, conditions=r.guard, after=list(r.actions) or None
        )

    def init(self) -> None:
        self.state = initial
        self.ignored = 0
        self.effects = ()

    def keep(do: Callback) -> Callable[[object, int], None]:
        """Stock drops what a callback returns, so effects are collected on the model."""

        def run(self, payload: int) -> None:
            self.effects += do(self, payload)

        return run

    initial = table.initial.value
    actions = {a for r in table.rows for a in r.actions}
    methods = {n: keep(c) if n in actions else c for n, c in callbacks(table).items()}
    body = {"__slots__": ("effects", "ignored", "state"), "__init__": init, **methods}
    return machine, type("Stock", (), body)


def run_stock(machine: Machine, cls: type, walks: Sequence[Sequence[Step]], repeat: int) -> int:
    events = machine.events
    prepared = [[(events[event].trigger, payload) for event, payload in walk] for walk in walks]
    refused = 0
    for _ in range(repeat):
        for walk in prepared:
            entity = cls()
            for trigger, payload in walk:
                entity.effects = ()
                if not trigger(entity, payload):
                    entity.ignored += 1
                    refused += 1
    return refused


# --- a dict table by hand ---------------------------------------------------------------


def dict_table(table: Lifecycle) -> type:
    rows: dict[str, dict[str, list[tuple]]] = {event: {} for event in table.events}
    named = callbacks(table)
    for r in table.rows:
        dest = None if r.dest is r.source else r.dest.value
        actions = tuple(named[a] for a in r.actions)
        guarded = named[r.guard] if r.guard is not None else None
        rows[r.event].setdefault(r.source.value, []).append((guarded, dest, actions))
    initial = table.initial.value

    class ByHand:
        __slots__ = ("ignored", "state")

        def __init__(self) -> None:
            self.state = initial
            self.ignored = 0

        def fire(self, event: str, payload: int) -> Effects:
            found = rows[event].get(self.state)
            if found is not None:
                for guard, dest, actions in found:
                    if guard is None or guard(self, payload):
                        if dest is not None:
                            self.state = dest
                        if len(actions) == 1:
                            return actions[0](self, payload)
                        effects: tuple[Effect, ...] = ()
                        for do in actions:
                            effects += do(self, payload)
                        return effects
            self.ignored += 1
            return None

    return ByHand


def run_dict(cls: type, walks: Sequence[Sequence[Step]], repeat: int) -> int:
    refused = 0
    for _ in range(repeat):
        for walk in walks:
            entity = cls()
            fire = entity.fire
            for event, payload in walk:
                if fire(event, payload) is None:
                    refused += 1
    return refused


# --- the same work? ---------------------------------------------------------------------


def check_same(
    table: Lifecycle, walks: Iterable[Sequence[Step]], mine: type, peer: tuple, byhand: type
) -> int:
    """Every step of every walk: same state, same effects, same refusals. Returns how many
    steps were refused."""
    machine, stock_class = peer
    refused = 0
    for walk in walks:
        a, b, c = mine(), stock_class(), byhand()
        for event, payload in walk:
            effects = vars(mine)[event](a, payload)
            b.effects = ()
            accepted = machine.events[event].trigger(b, payload)
            b.ignored += not accepted
            by_hand = c.fire(event, payload)
            same = (a.state.value, a.ignored) == (b.state, b.ignored) == (c.state, c.ignored)
            check(same, f"{table.name}: {event} left different states or refusals")
            check((effects is None) == (not accepted) == (by_hand is None), f"{event} refusal")
            if effects is not None and by_hand is not None:
                check(tuple(effects) == b.effects == tuple(by_hand), f"{event} effects")
            refused += effects is None
        check(a.state in table.terminal, f"{table.name}: a walk did not end")
    check(refused > 0, "no illegal event in the scripts")
    return refused


def bytes_per_entity(cls: type, count: int = 10_000) -> float:
    """What one more live entity costs, its own containers included."""
    tracemalloc.start()
    kept = [None] * count
    before = tracemalloc.get_traced_memory()[0]
    for i in range(count):
        kept[i] = cls()
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return grown / count


# --- the benchmark ----------------------------------------------------------------------


def counted(work: Callable[[], int], expected: int, per_event: float) -> Callable[[], float]:
    """A side of the measurement: CPU nanoseconds per event, refusals checked each time."""

    def timed() -> float:
        refused: list[int] = []
        seconds = cpu_seconds(lambda: refused.append(work()))
        check(refused == [expected], "refusals differ between runs")
        return seconds * per_event

    return timed


def measure(table: Lifecycle, repeat: int) -> tuple[list[Result], int, int]:
    """Three rows, and how many events and refused events one run of one side has."""
    walks = scripts(table, seed=7)
    events = repeat * sum(len(walk) for walk in walks)
    mine, (machine, model), byhand = ours(table), stock(table), dict_table(table)
    refused = repeat * check_same(table, walks, mine, (machine, model), byhand)
    sides = {
        "ours": lambda: run_ours(mine, walks, repeat),
        "stock": lambda: run_stock(machine, model, walks, repeat),
        "dict": lambda: run_dict(byhand, walks, repeat),
    }
    timed = interleave(
        {name: counted(work, refused, 1e9 / events) for name, work in sides.items()}, warmup=False
    )
    name, metric = f"fsm/{table.name}", "CPU time per event, creation included"
    peer = "transitions (shared Machine)"
    rows = [
        row(
            name,
            metric,
            "ns",
            timed["ours"],
            peer,
            timed["stock"],
            better="lower",
            target="ratio <= 0.05 (20x faster)",
            meets=lambda ratio: ratio <= 1 / 20,
            limit=statistics.median(timed["dict"]),
        ),
        row(
            name,
            metric,
            "ns",
            timed["ours"],
            "dict table by hand",
            timed["dict"],
            better="lower",
            target="ratio <= 4",
            meets=lambda ratio: ratio <= 4,
        ),
        row(
            name,
            "memory per entity",
            "bytes",
            [bytes_per_entity(mine)],
            peer,
            [bytes_per_entity(model)],
            better="lower",
            target="ratio <= 1",
            meets=lambda ratio: ratio <= 1,
        ),
    ]
    return rows, events, refused


def run(quick: bool) -> Result:
    # Its own logging of every step is not what is compared.
    logging.getLogger("transitions").setLevel(logging.ERROR)
    lifecycles = QUICK_LIFECYCLES if quick else LIFECYCLES
    rows: list[Result] = []
    work: dict[str, dict[str, int]] = {}
    for table in (SENDER, RECEIVER):
        measured, events, refused = measure(table, lifecycles // SCRIPTS)
        rows += measured
        work[table.name] = {"lifecycles": lifecycles, "events": events, "refused": refused}
    return result_of("fsm", rows, workload=work)
