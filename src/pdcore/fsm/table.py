"""Lifecycles as tables: the one definition that machines, proofs and diagrams share.

A lifecycle is total: a (state, event) pair without a row, or whose guards all say no, is
"ignored and counted". Terminal states have no rows that leave them. A lifecycle without
terminal states (a place in a table) rests in its initial state. Rows of one (source, event)
are tried in order, the first whose guard holds is taken.

Guards and actions are names of methods of the entity class. A guard is a pure predicate
``guard(self, payload) -> bool`` over the entity's facts. An action updates facts and
returns effects (values): ``action(self, payload) -> Sequence[Effect]``. Actions run after the
state has changed and must not raise: a lifecycle never does I/O (architecture, section 3).
"""

from __future__ import annotations

import enum
import keyword
from collections.abc import Mapping
from typing import NamedTuple, NoReturn

import attrs

from pdcore.errors import LifecycleError


class Row(NamedTuple):
    """``dest`` == ``source`` is an internal transition: facts may change, the state stays."""

    source: enum.Enum
    event: str
    dest: enum.Enum
    actions: tuple[str, ...] = ()
    guard: str | None = None


@attrs.frozen
class StateInfo:
    """Answers "what is this room waiting for?": the awaited party and the deadline that
    bounds the wait (a config field or "request deadline"). Terminal states have neither."""

    meaning: str
    awaits: str = ""
    deadline: str = ""


@attrs.frozen
class Lifecycle:
    name: str
    states: type[enum.Enum]
    initial: enum.Enum
    terminal: frozenset[enum.Enum]
    events: tuple[str, ...]
    rows: tuple[Row, ...]
    info: Mapping[enum.Enum, StateInfo]
    #: Events that a timer alone causes: each state that waits has a row for one of them.
    deadline_events: tuple[str, ...] = ("deadline_expired", "drain_expired")

    def rows_for(self, state: enum.Enum, event: str) -> tuple[Row, ...]:
        return tuple(r for r in self.rows if r.source is state and r.event == event)


def check_table(table: Lifecycle) -> None:
    """Raise LifecycleError unless the table keeps the rules of its form: known states and
    events, theory for every state, no way out of a terminal state, no row behind an
    unguarded row of the same (state, event), no event without a row."""

    def fault(problem: str) -> NoReturn:
        raise LifecycleError(f"lifecycle {table.name}: {problem}")

    states = set(table.states)
    if table.initial not in states or not table.terminal <= states:
        fault("initial and terminal states must be members of states")
    if set(table.info) != states:
        fault(f"info must describe exactly the states {[s.value for s in table.states]}")
    if len(set(table.events)) != len(table.events):
        fault("an event is listed twice")
    for event in table.events:
        if not event.isidentifier() or keyword.iskeyword(event):
            fault(f"event {event!r} cannot be a method name")
        if all(row.event != event for row in table.rows):
            fault(f"event {event!r} has no row")
    closed: set[tuple[enum.Enum, str]] = set()
    for row in table.rows:
        if row.event not in table.events:
            fault(f"{describe(row)}: event not listed")
        if row.source not in states or row.dest not in states:
            fault(f"{describe(row)}: unknown state")
        if row.source in table.terminal and row.dest is not row.source:
            fault(f"{describe(row)}: leaves a terminal state")
        if (row.source, row.event) in closed:
            fault(f"{describe(row)}: a row before it has no guard, so this one never fires")
        if row.guard is None:
            closed.add((row.source, row.event))


def describe(row: Row) -> str:
    guard = f" [{row.guard}]" if row.guard else ""
    return f"row {row.source.value} --{row.event}{guard}--> {row.dest.value}"
