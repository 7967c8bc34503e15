"""The states one production entity can be in, numbered; each step of it is made once.

A world of many entities is explored fast when a global state is a tuple of small numbers:
this table gives the numbers out. A step clones the entity that stands for a number, feeds it
the event (so the production code decides), and looks the result up by its *key*: what of the
entity decides its future. The answer is remembered, the next time it costs a dictionary look-up.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, NamedTuple, TypeVar

from pdcore.fsm.effects import Effect
from pdcore.fsm.table import Lifecycle
from pdcore.sim.firing import ROWS, RowLog, Stateful, fire

E = TypeVar("E", bound=Stateful)


class Stepped(NamedTuple):
    """``row`` is "" for an event that no row let through (it was ignored)."""

    number: int
    effects: Sequence[Effect]
    row: str


class Ids:
    """An iterator of fresh ids that can be copied with the entity that mints from it."""

    __slots__ = ("next_id",)

    def __init__(self, first: int = 1) -> None:
        self.next_id = first

    def __iter__(self) -> Ids:
        return self

    def __next__(self) -> int:
        self.next_id += 1
        return self.next_id - 1


class Interned(Generic[E]):
    """``key`` must tell entities apart whose futures differ. It may leave out what only
    decides when something is sent again, where the network keeps every message for ever."""

    def __init__(self, table: Lifecycle, key: Callable[[E], Hashable]) -> None:
        self.table = table
        self._key = key
        self._entities: list[E] = []
        self._names: list[str] = []
        self._numbers: dict[Hashable, int] = {}
        self._steps: dict[tuple[int, Hashable], Stepped] = {}

    def __len__(self) -> int:
        return len(self._entities)

    def entity(self, number: int) -> E:
        """The entity that stands for a number: to be looked at, never to be changed."""
        return self._entities[number]

    def name(self, number: int) -> str:
        """The key in words: the same in every run, where numbers are given out as states are
        met. What must not depend on the way (an order, a label) goes by this."""
        return self._names[number]

    def number(self, entity: E) -> int:
        """Take this entity over; the caller must not change it any more."""
        key = self._key(entity)
        known = self._numbers.get(key)
        if known is None:
            known = len(self._entities)
            self._numbers[key] = known
            self._entities.append(entity)
            self._names.append(repr(key))
        return known

    def change(self, number: int, name: Hashable, change: Callable[[E], Stepped]) -> Stepped:
        """``change(clone)`` may do anything with the clone; the number it returns is ignored.
        ``name`` says what is done: one (number, name) is done once."""
        known = self._steps.get((number, name))
        if known is None:
            clone = copy.deepcopy(self._entities[number])
            done = change(clone)
            clone.ignored = 0
            known = Stepped(self.number(clone), done.effects, done.row)
            self._steps[number, name] = known
        return known

    def step(self, number: int, event: str, payload: object, name: Hashable) -> Stepped:
        """Feed one event; ``name`` stands for (event, payload)."""

        def feed(entity: E) -> Stepped:
            fired = fire(self.table, entity, event, payload)
            return Stepped(0, fired.effects, fired.row or "")

        return self.change(number, name, feed)


C = TypeVar("C")


class Changed(NamedTuple):
    """``note`` is what the change said, ``rows`` what watched entities inside it took."""

    number: int
    note: str
    rows: tuple[str, ...]


class Cores(Generic[C]):
    """As :class:`Interned`, for a production object that holds entities: open
    :func:`pdcore.sim.firing.watching` around it, so that ``log`` hears of their rows."""

    def __init__(self, start: C, key: Callable[[C], Hashable], log: RowLog = ROWS) -> None:
        self._key = key
        self._log = log
        self._cores = [start]
        self._numbers: dict[Hashable, int] = {key(start): 0}
        self._steps: dict[tuple[int, Hashable], Changed] = {}

    def core(self, number: int) -> C:
        """To be looked at, never to be changed. 0 is the first one."""
        return self._cores[number]

    def step(self, number: int, name: Hashable, change: Callable[[C], str]) -> Changed:
        """Change a clone; one (number, name) is done once."""
        known = self._steps.get((number, name))
        if known is None:
            core = copy.deepcopy(self._cores[number])
            self._log.clear()
            note = change(core)
            after = self._numbers.setdefault(self._key(core), len(self._cores))
            if after == len(self._cores):
                self._cores.append(core)
            known = Changed(after, note, self._log.taken())
            self._steps[number, name] = known
        return known
