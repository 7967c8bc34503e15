"""The production router core as numbered states: one request, a fleet of four instances.

A step clones the core, feeds it one event through its public methods and reads its effects.
Two cores are one state when they are equal in everything but counters, words and the times at
which cancels are sent again (in this world a cancel that was sent can arrive at any time until
it is answered, so sending again needs no move). Its request's lifecycle is replaced by one that
notes which rows of the table it takes.
"""

from __future__ import annotations

import copy
import enum
import inspect
import operator
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from typing import Final, NamedTuple

from pdcore.fsm.routed import ROUTED, Leg, Routed
from pdcore.fsm.states import RoutedState
from pdcore.router.core import RouterCore, RouterLimits
from pdcore.router.events import (
    Answer,
    CancelAnswered,
    Dispatch,
    DropLegs,
    EndStream,
    InstanceEvicted,
    RouterEvent,
)
from pdcore.router.fleet import Fleet, Health, Member, Report
from pdcore.router.limits import OnPrefillLoss
from pdcore.router.live import Live
from pdcore.router.outbox import CancelKey, SendCancel
from pdcore.router.policies import ClientFields, parse_targets
from pdcore.sim.firing import row_id, row_taken

ROOM: Final = 7
#: Of the request; the router's own timer is ``grace_s`` later.
TIMEOUT_S: Final = 100.0
GRACE_S: Final = 10.0

#: Not part of a state: counts, words, when something is sent again, and bounds.
_LEFT_OUT: Final = frozenset(
    {
        "counters",
        "num_given_up",
        "num_replayed",
        "ignored",
        "detail",
        "evictions",
        "limits",
        "since_s",
        "taken",
        "_count",
        "_limits",
        "_queue",
        "delay_s",
        "due_s",
        "unknown_since_s",
    }
)


class Ids:
    """The router's randomness: 1, 2, 3, ..."""

    def __init__(self) -> None:
        self.last = 0

    def getrandbits(self, k: int, /) -> int:
        self.last += 1
        return self.last


class TracedRouted(Routed):
    """The production lifecycle; ``taken`` lists the rows it took."""

    __slots__ = ("taken",)

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[str] = []


def traced(event: str) -> Callable[..., object]:
    """The production event as a method that notes the row it takes."""
    function = vars(Routed)[event]
    assert inspect.isfunction(function)

    def noted(self: TracedRouted, *payload: object) -> object:
        row = row_taken(ROUTED, self, event, *payload)
        if row is not None:
            self.taken.append(row_id(ROUTED, row))
        return function(self, *payload)

    return noted


for _event in ROUTED.events:
    setattr(TracedRouted, _event, traced(_event))


def freeze(value: object) -> Hashable:
    """Everything that decides what this will do, as a hashable value. Handles what cores are
    made of: containers, enums, named tuples, slotted and plain objects."""
    if value is None or isinstance(value, str | bytes | int | float | enum.Enum):
        return value
    if isinstance(value, dict | OrderedDict):
        return tuple((freeze(key), freeze(one)) for key, one in value.items())
    if isinstance(value, tuple | list | deque):
        return tuple(freeze(one) for one in value)
    if isinstance(value, set | frozenset):
        return tuple(sorted(repr(freeze(one)) for one in value))
    names = [name for kind in type(value).__mro__ for name in vars(kind).get("__slots__", ())]
    names = names or list(vars(value))
    kept = [name for name in sorted(set(names)) if name not in _LEFT_OUT and name[:2] != "__"]
    return (
        type(value).__name__,
        *((name, freeze(operator.attrgetter(name)(value))) for name in kept),
    )


class Outcome(NamedTuple):
    """What one step led to. ``cancels``: (attempt, leg, only unless it has received)."""

    core: int
    rows: tuple[str, ...]
    #: (attempt, decode computes the prompt itself).
    dispatched: tuple[tuple[int, bool], ...] = ()
    dropped: tuple[int, ...] = ()
    cancels: tuple[tuple[int, Leg, bool], ...] = ()
    #: Failed or not, of each response that was taken, and whose: (failed, passed on).
    answers: tuple[tuple[bool, Leg | None], ...] = ()
    #: Failed or not, of each stream that was ended.
    ends: tuple[bool, ...] = ()


class RouterSteps:
    """Numbered cores. ``max_attempts`` bounds the attempts of the one request."""

    def __init__(
        self,
        max_attempts: int,
        routed_type: type[TracedRouted] = TracedRouted,
        on_prefill_loss: OnPrefillLoss = OnPrefillLoss.RETRY,
    ) -> None:
        limits = RouterLimits(
            request_timeout_s=TIMEOUT_S,
            grace_s=GRACE_S,
            max_attempts=max_attempts,
            on_prefill_loss=on_prefill_loss,
        )
        prefills, decodes = parse_targets(["p0:1", "p1:1"], ["d0:1", "d1:1"], [2])
        fleet = Fleet(prefills, decodes)
        for _, member in fleet.members():
            member.health = Health.UP
        self._cores: list[RouterCore] = []
        self._numbers: dict[Hashable, int] = {}
        self._steps: dict[tuple[int, Hashable, float], Outcome] = {}
        self._pairs: list[dict[int, tuple[str, str]]] = []
        core = RouterCore(fleet, limits, Ids())
        core.submit(ClientFields(room=ROOM), 0.0, 0.0)
        live = _request(core)
        assert live is not None
        fresh, routed = Routed(), routed_type()
        row = row_taken(ROUTED, fresh, "dispatched", live.routed.attempt)
        routed.state, routed.attempts = live.routed.state, live.routed.attempts
        live.routed = routed
        assert row is not None
        #: The submit, which is no move: ``rows`` holds the one it took.
        self.start = self._outcome(core, (row_id(ROUTED, row),), {})

    def step(self, number: int, event: RouterEvent, now_s: float) -> Outcome:
        """Feed one event of the legs or the client."""
        return self._step(number, event, now_s, lambda core: core.handle_event(event, now_s))

    def evict(self, number: int, leg: Leg, attempt: int, now_s: float) -> Outcome:
        """Probes found nobody where that attempt's leg was sent to."""
        netloc = self._pairs[number][attempt][leg is Leg.DECODE]

        def evict(core: RouterCore) -> None:
            found = [m for _, m in core.fleet.members() if m.target.netloc == netloc]
            core.handle_event(InstanceEvicted(found[0], "gone"), now_s)

        return self._step(number, ("evict", netloc), now_s, evict)

    def lose_fleet(self, number: int) -> Outcome:
        """Probes say that no instance is up."""

        def lose(core: RouterCore) -> None:
            for _, member in core.fleet.members():
                core.fleet.report(member, Report(is_up=False, detail="down"))

        return self._step(number, "lose", 0.0, lose)

    def expire(self, number: int, now_s: float) -> Outcome:
        """The core's timers at that time."""
        return self._step(number, "timeout", now_s, lambda core: core.handle_timeout(now_s))

    def answered(
        self, number: int, attempt: int, leg: Leg, now_s: float, *, unless_received: bool = False
    ) -> Outcome:
        """A leg says that it knows what a cancel is about."""
        key = CancelKey(ROOM, attempt, leg)
        return self.step(number, CancelAnswered(key, True, unless_received), now_s)

    def resent(self, number: int) -> set[tuple[int, Leg, bool]]:
        """Cancels that the core sends until they are answered, as in ``Outcome.cancels``."""
        entries = operator.attrgetter("_outbox._entries")(self._cores[number])
        cancels: list[SendCancel] = [entry.cancel for entry in entries.values()]
        return {(c.key.attempt, c.key.leg, c.unless_received) for c in cancels}

    def state(self, number: int) -> RoutedState | None:
        """Of the request; None: the core has closed its books."""
        live = _request(self._cores[number])
        return None if live is None else live.routed.state

    def attempt(self, number: int) -> int:
        live = _request(self._cores[number])
        return 0 if live is None else live.routed.attempt

    def places(self, number: int) -> list[tuple[str, str]]:
        """Where each attempt went, the first one first: (prefill, decode)."""
        return list(self._pairs[number].values())

    def loads(self, number: int) -> list[int]:
        """Requests that each instance is thought to have."""
        return [member.num_live for _, member in self._cores[number].fleet.members()]

    def _step(
        self, number: int, name: Hashable, now_s: float, feed: Callable[[RouterCore], None]
    ) -> Outcome:
        known = self._steps.get((number, name, now_s))
        if known is None:
            core = copy.deepcopy(self._cores[number])
            live = _request(core)
            routed = None if live is None else live.routed
            feed(core)
            rows: tuple[str, ...] = ()
            if isinstance(routed, TracedRouted):
                rows, routed.taken = tuple(routed.taken), []
            known = self._outcome(core, rows, self._pairs[number])
            self._steps[number, name, now_s] = known
        return known

    def _outcome(
        self, core: RouterCore, rows: tuple[str, ...], pairs: dict[int, tuple[str, str]]
    ) -> Outcome:
        effects = core.poll_effects()
        sent = [e for e in effects if isinstance(e, Dispatch)]
        pairs = {
            **pairs,
            **{e.attempt: (_netloc(e.prefill), _netloc(e.decode)) for e in sent},
        }
        key = (freeze(core), freeze(pairs))
        number = self._numbers.setdefault(key, len(self._cores))
        if number == len(self._cores):
            self._cores.append(core)
            self._pairs.append(pairs)
        return Outcome(
            number,
            rows,
            dispatched=tuple((e.attempt, e.prefill is None) for e in sent),
            dropped=tuple(e.attempt for e in effects if isinstance(e, DropLegs)),
            cancels=tuple(
                (e.key.attempt, e.key.leg, e.unless_received)
                for e in effects
                if isinstance(e, SendCancel)
            ),
            answers=tuple((e.failure is not None, e.leg) for e in effects if isinstance(e, Answer)),
            ends=tuple(e.failure is not None for e in effects if isinstance(e, EndStream)),
        )


def _netloc(member: Member | None) -> str:
    return "" if member is None else member.target.netloc


def _request(core: RouterCore) -> Live | None:
    """The one request in flight."""
    live: dict[int, Live] = operator.attrgetter("_live")(core)
    return next(iter(live.values()), None)
