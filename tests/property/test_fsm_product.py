"""Proofs over every (state, event) pair of every lifecycle: nothing is left undefined."""

from __future__ import annotations

import enum

import attrs
import pytest

from pdcore.fsm.machine import build_machine, compile_lifecycle, lifecycle
from pdcore.fsm.table import Lifecycle, Row, StateInfo
from tests.property.fsm_probe import (
    REAL,
    Ran,
    actions_of,
    assignments,
    guards_of,
    probe_class,
    row_taken,
)

TABLES = pytest.mark.parametrize("table", [t for t, _ in REAL.values()], ids=list(REAL))


# --- the product ------------------------------------------------------------------------


@TABLES
def test_every_pair_is_a_row_or_is_ignored_and_counted(table: Lifecycle) -> None:
    """SGLang I25063, PR20686, PR31075: no pair is left to chance. (State x event x every answer of
    the guards): the compiled class does exactly what the table says, and where the table says
    nothing, it counts and changes nothing."""
    probe = compile_lifecycle(table, probe_class(table))
    checked = 0
    for state in table.states:
        for event in table.events:
            asked = sorted({r.guard for r in table.rows_for(state, event) if r.guard})
            for answers in assignments(asked):
                entity = probe(answers)
                entity.state = state
                may = getattr(entity, f"may_{event}")(7)
                assert all(line.endswith("?") for line in entity.log), "may_ ran an action"
                entity.log.clear()
                effects = getattr(entity, event)(7)
                row = row_taken(table, state, event, answers)
                assert may == (row is not None)
                if row is None:
                    assert (effects, entity.state, entity.ignored) == (None, state, 1)
                    assert not [line for line in entity.log if "!" in line]
                else:
                    assert list(effects) == [Ran(name, 7) for name in row.actions]
                    assert (entity.state, entity.ignored) == (row.dest, 0)
                checked += 1
    assert checked >= len(table.states) * len(table.events)


@TABLES
def test_an_event_without_effects_returns_the_shared_empty_tuple(table: Lifecycle) -> None:
    silent = [row for row in table.rows if not row.actions]
    probe = compile_lifecycle(table, probe_class(table))
    for row in silent:
        entity = probe(dict.fromkeys(guards_of(table), False) | {row.guard: True})
        entity.state = row.source
        if row_taken(table, row.source, row.event, entity.answers) is row:
            assert getattr(entity, row.event)() == ()


# --- the shape of the table -------------------------------------------------------------


def reachable(table: Lifecycle, start: enum.Enum) -> set[enum.Enum]:
    seen, frontier = {start}, [start]
    while frontier:
        here = frontier.pop()
        for row in table.rows:
            if row.source is here and row.dest not in seen:
                seen.add(row.dest)
                frontier.append(row.dest)
    return seen


def check_terminal_states_absorb(table: Lifecycle) -> None:
    for row in table.rows:
        assert row.source not in table.terminal or row.dest is row.source, row


def check_nobody_waits_for_ever(table: Lifecycle) -> None:
    """Every state is reachable; every state that waits names whom it waits for, has a
    deadline and a row for it, and a way to an end (or back to rest)."""
    assert reachable(table, table.initial) == set(table.states)
    for state in table.states:
        info = table.info[state]
        assert info.meaning
        if state in table.terminal:
            assert not info.awaits, f"{state} is terminal and waits for {info.awaits}"
            continue
        assert info.awaits, f"{state} waits for nobody"
        assert info.deadline, f"{state} has no deadline"
        ends = table.terminal or {table.initial}
        assert reachable(table, state) & ends, f"{state} has no way to an end"
        rests = not table.terminal and state is table.initial
        timed = {row.event for row in table.rows if row.source is state}
        assert rests or timed & set(table.deadline_events), f"{state} has no row for its deadline"


@TABLES
def test_terminal_states_absorb(table: Lifecycle) -> None:
    check_terminal_states_absorb(table)


@TABLES
def test_nobody_waits_for_ever(table: Lifecycle) -> None:
    """SGLang PR31800: every state but the terminal ones has a deadline and names whom it awaits."""
    check_nobody_waits_for_ever(table)


@pytest.mark.parametrize("name", REAL)
def test_every_guard_and_action_is_a_method_of_the_class(name: str) -> None:
    table, cls = REAL[name]
    for callback in (*guards_of(table), *actions_of(table)):
        assert callable(getattr(cls, callback))
    for event in table.events:
        assert callable(getattr(cls, event))
        assert callable(getattr(cls, f"may_{event}"))
        assert event in cls.__annotations__, f"{cls.__name__}.{event} has no type"


# --- D39: no state without an owner -----------------------------------------------------


def seed_prefill() -> Lifecycle:
    """The seed's rule (D39): after the forward pass a request without a sender goes into no
    queue at all; it keeps its KV while the client waits half an hour."""

    class Seed(enum.Enum):
        QUEUED = "Queued"
        FORGOTTEN = "Forgotten"
        INFLIGHT = "Inflight"
        DONE = "Done"

    return Lifecycle(
        name="seed prefill",
        states=Seed,
        initial=Seed.QUEUED,
        terminal=frozenset({Seed.DONE}),
        events=("computed", "sent", "deadline_expired"),
        rows=(
            Row(Seed.QUEUED, "computed", Seed.INFLIGHT, (), "has_sender"),
            Row(Seed.QUEUED, "computed", Seed.FORGOTTEN),
            Row(Seed.QUEUED, "deadline_expired", Seed.DONE),
            Row(Seed.INFLIGHT, "sent", Seed.DONE),
            Row(Seed.INFLIGHT, "deadline_expired", Seed.DONE),
        ),
        info={
            Seed.QUEUED: StateInfo("queued", "engine", "request deadline"),
            Seed.FORGOTTEN: StateInfo("in no queue"),
            Seed.INFLIGHT: StateInfo("sending", "transport", "request deadline"),
            Seed.DONE: StateInfo("over"),
        },
    )


def test_d39_a_computed_request_always_has_an_owner() -> None:
    """D39: whatever the guards answer, a sender that was computed is in a state that is
    terminal or names whom it waits for, until when."""
    table, _ = REAL["sender"]
    probe = compile_lifecycle(table, probe_class(table))
    for state in table.states:
        for answers in assignments(guards_of(table)):
            entity = probe(answers)
            entity.state = state
            entity.compute_ended(None)
            info = table.info[entity.state]
            assert entity.state in table.terminal or (info.awaits and info.deadline)
    check_nobody_waits_for_ever(table)


def test_d39_mutant_the_forgotten_request_is_found() -> None:
    with pytest.raises(AssertionError, match="waits for nobody"):
        check_nobody_waits_for_ever(seed_prefill())


# --- D5: Failed absorbs -----------------------------------------------------------------

STATUSES = ("Bootstrapping", "WaitingForInput", "Transferring", "Success")


class SeedStatusStore:
    """The seed's rule (R47 before its change): maximum of old and new, Failed (0) overwrites."""

    VALUES = ("Failed", *STATUSES)

    def __init__(self) -> None:
        self.value = 1

    def update(self, status: str) -> None:
        new = self.VALUES.index(status)
        if new == 0:
            self.value = 0
        elif new > 1:
            self.value = max(self.value, new)

    def is_failed(self) -> bool:
        return self.value == 0


#: Status -> events of sender and receiver that the same news is.
NEWS = {
    "Failed": ("failed", "quiesced"),
    "Bootstrapping": (),
    "WaitingForInput": ("advanced",),
    "Transferring": ("advanced",),
    "Success": ("completed",),
}


class LifecycleStatusStore:
    """The same updates, fed to a compiled lifecycle whose guards all say yes."""

    def __init__(self, table: Lifecycle) -> None:
        probe = compile_lifecycle(table, probe_class(table))
        self.entity = probe(dict.fromkeys(guards_of(table), True))

    def update(self, status: str) -> None:
        for event in NEWS[status]:
            getattr(self.entity, event)()

    def is_failed(self) -> bool:
        return self.entity.state.value == "Failed"


def check_failed_absorbs(store: SeedStatusStore | LifecycleStatusStore) -> None:
    store.update("Failed")
    assert store.is_failed()
    for status in STATUSES:
        store.update(status)
        assert store.is_failed(), f"{status} revived a failed room"


@pytest.mark.parametrize("name", ["sender", "receiver"])
@pytest.mark.parametrize("steps", [0, 1, 2])
def test_d5_failed_absorbs(name: str, steps: int) -> None:
    """D5: a later Success or WaitingForInput revived a failed room in the seed."""
    store = LifecycleStatusStore(REAL[name][0])
    for status in STATUSES[1 : 1 + steps]:
        store.update(status)
    check_failed_absorbs(store)


def test_d5_mutant_the_maximum_rule_is_found() -> None:
    with pytest.raises(AssertionError, match="revived"):
        check_failed_absorbs(SeedStatusStore())


@pytest.mark.parametrize("name", REAL)
def test_d5_mutant_a_row_out_of_a_terminal_state_is_found(name: str) -> None:
    table, _ = REAL[name]
    if not table.terminal:
        return
    end = next(s for s in table.states if s in table.terminal)
    mutant = attrs.evolve(table, rows=(*table.rows, Row(end, table.events[0], table.initial)))
    with pytest.raises(AssertionError):
        check_terminal_states_absorb(mutant)
    with pytest.raises(Exception, match="leaves a terminal state"):
        build_machine(mutant)
    with pytest.raises(Exception, match="leaves a terminal state"):
        lifecycle(mutant)(probe_class(mutant))
