"""Which row of a table an event takes: what exploration counts.

Worlds drive the production entities (compiled from the tables); this module asks the table
first which row that will be, guard by guard, and holds the entity to it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple, Protocol

from pdcore.errors import LifecycleError
from pdcore.fsm.diagram import LIFECYCLES
from pdcore.fsm.effects import Effect
from pdcore.fsm.table import Lifecycle, Row, describe

#: Every lifecycle of the product, by name.
TABLES: Final[dict[str, Lifecycle]] = {table.name: table for table, _ in LIFECYCLES}


class Stateful(Protocol):
    """What an entity of any lifecycle has; its ``state`` is a member of ``table.states``."""

    ignored: int


class Fired(NamedTuple):
    """``row`` None: no row let the event through, it was ignored."""

    row: str | None
    effects: Sequence[Effect]


def row_id(table: Lifecycle, row: Row) -> str:
    """ "sender: row WaitingForInput --advanced--> Transferring": unique within all tables."""
    return f"{table.name}: {describe(row)}"


#: table -> ids of its rows, in the order of the table.
ROW_IDS: Final[dict[str, tuple[str, ...]]] = {
    name: tuple(row_id(table, row) for row in table.rows) for name, table in TABLES.items()
}


def row_taken(table: Lifecycle, entity: Stateful, event: str, payload: object = None) -> Row | None:
    """The row that ``event`` would take now, by the rules of the table; changes nothing."""
    state = operator.attrgetter("state")(entity)
    for row in table.rows_for(state, event):
        if row.guard is None or operator.methodcaller(row.guard, payload)(entity):
            return row
    return None


def fire(table: Lifecycle, entity: Stateful, event: str, payload: object = None) -> Fired:
    """Feed one event to a production entity and say which row it took.

    Raises LifecycleError when the compiled entity does not do what its table says.
    """
    row = row_taken(table, entity, event, payload)
    effects: Sequence[Effect] | None = operator.methodcaller(event, payload)(entity)
    _hold(entity, event, row, effects)
    return Fired(None if row is None else row_id(table, row), effects or ())


class RowLog:
    """Rows that watched entities took since the last :meth:`clear`, in order."""

    def __init__(self) -> None:
        self.rows: list[str] = []

    def clear(self) -> None:
        self.rows.clear()

    def taken(self) -> tuple[str, ...]:
        return tuple(self.rows)


#: Where the worlds of real cores read what happened inside.
ROWS: Final = RowLog()


@contextmanager
def watching(log: RowLog, *watched: tuple[Lifecycle, type]) -> Iterator[None]:
    """While this is open, every event of these compiled classes is held to its table and the
    row it takes is written to ``log``, whoever feeds it (a core does, inside)."""
    former: list[tuple[type, str, object]] = []
    for table, cls in watched:
        for event in table.events:
            original = vars(cls)[event]
            former.append((cls, event, original))
            setattr(cls, event, _watched(log, table, event, original))
    try:
        yield
    finally:
        for cls, event, original in former:
            setattr(cls, event, original)


def _watched(
    log: RowLog,
    table: Lifecycle,
    event: str,
    original: Callable[[Stateful, object], Sequence[Effect] | None],
) -> Callable[..., Sequence[Effect] | None]:
    def fed(entity: Stateful, payload: object = None) -> Sequence[Effect] | None:
        row = row_taken(table, entity, event, payload)
        effects = original(entity, payload)
        _hold(entity, event, row, effects)
        if row is not None:
            log.rows.append(row_id(table, row))
        return effects

    return fed


def _hold(entity: Stateful, event: str, row: Row | None, effects: Sequence[Effect] | None) -> None:
    state = operator.attrgetter("state")(entity)
    if (effects is None) is not (row is None) or (row is not None and state is not row.dest):
        raise LifecycleError(f"{entity!r} does not follow its table at event {event!r} ({row})")
