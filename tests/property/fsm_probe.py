"""A class made from nothing but a table: guards answer what the test scripts, actions record.

Guards and actions write into one log, so that two implementations can be compared by what
they asked and did, in order.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

from pdcore.fsm import instance, peer, rank, receiver, routed, sender
from pdcore.fsm.effects import Effect
from pdcore.fsm.table import Lifecycle, Row

#: Every lifecycle with the class that it is compiled onto.
REAL: dict[str, tuple[Lifecycle, type]] = {
    "sender": (sender.SENDER, sender.Sender),
    "receiver": (receiver.RECEIVER, receiver.Receiver),
    "peer": (peer.PEER, peer.Peer),
    "rank": (rank.RANK, rank.Rank),
    "instance": (instance.INSTANCE, instance.Instance),
    "routed": (routed.ROUTED, routed.Routed),
}


class Ran(Effect, frozen=True):
    action: str
    payload: object


def guards_of(table: Lifecycle) -> list[str]:
    return sorted({row.guard for row in table.rows if row.guard is not None})


def actions_of(table: Lifecycle) -> list[str]:
    return sorted({action for row in table.rows for action in row.actions})


def probe_class(table: Lifecycle) -> type:
    """A slotted class with every guard and action of the table; not compiled yet."""

    def init(self, answers: Mapping[str, bool] | None = None) -> None:
        self.state = table.initial
        self.ignored = 0
        self.answers = dict(answers or {})
        self.log = []

    def guard(name: str) -> Callable[[object, object], bool]:
        def ask(self, payload: object) -> bool:
            self.log.append(f"{name}?")
            return self.answers[name]

        return ask

    def action(name: str) -> Callable[[object, object], Sequence[Effect]]:
        def run(self, payload: object) -> Sequence[Effect]:
            # The state has changed before the first action runs: record which one it saw.
            self.log.append(f"{name}! in {self.state.value}")
            # Actions without effects are common, and an empty result must not end the list.
            return () if name.startswith("quiet") else (Ran(name, payload),)

        return run

    body: dict[str, object] = {
        "__slots__": ("answers", "ignored", "log", "state"),
        "__init__": init,
        **{name: guard(name) for name in guards_of(table)},
        **{name: action(name) for name in actions_of(table)},
    }
    return type(f"Probe_{table.name.replace(' ', '_')}", (), body)


def assignments(names: Sequence[str]) -> Iterator[dict[str, bool]]:
    """Every way in which the guards can answer."""
    for values in itertools.product((False, True), repeat=len(names)):
        yield dict(zip(names, values, strict=True))


def row_taken(table: Lifecycle, state: object, event: str, answers: Mapping[str, bool]):
    """What the table means: the first row of (state, event) whose guard holds, or None."""
    row: Row
    for row in table.rows:
        if row.source is state and row.event == event and (row.guard is None or answers[row.guard]):
            return row
    return None
