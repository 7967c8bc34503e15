"""Lifecycles as tables: the one definition that machines, proofs and diagrams share.

A lifecycle is total: a (state, event) pair without a row, or whose guards all say no, is
"ignored and counted". Terminal states have no rows that leave them. Rows of one
(source, event) are tried in order, the first whose guard holds is taken.

Guards and actions are names of methods of the entity class. A guard is a pure predicate
``guard(self, payload) -> bool`` over the entity's facts. An action updates facts and
returns effects (values): ``action(self, payload) -> Sequence[Effect]``. Actions run after the
state has changed and must not raise: a lifecycle never does I/O (architecture, section 3).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import NamedTuple

import attrs


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
    #: Guard names of rows that open the way out of a state by deadline alone.
    deadline_events: tuple[str, ...] = ("deadline_expired",)

    def rows_for(self, state: enum.Enum, event: str) -> tuple[Row, ...]:
        return tuple(r for r in self.rows if r.source is state and r.event == event)
