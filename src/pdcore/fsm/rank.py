"""Rank registration: one place (dp, cp, tp) in the bootstrap server's rank table.

Theory
------
  Absent      no process life holds the place. An instance whose table has an Absent rank is
              not ready and says which rank is missing (D33);
  Registered  one incarnation holds the place under a lease that it renews by registering
              again; only then is the rank in the route (D34: it registers last);
  Stale       the lease ran out. The rank is out of the route, but remembered: it may have
              been stopped or cut off and come back under the same incarnation, and a decode
              that asks learns "stale", not "never seen".

There is no terminal state: a place lives as long as its table and rests in Absent.

Who moves it: the bootstrap server, for a registration (``registered``), a goodbye
(``deregistered``), and its own clock (``lease_expired``, ``retention_expired``). Another
incarnation always wins over the one that holds the place (R24: registration replaces), and
the loser never gets it back: a delayed registration of a replaced or departed incarnation is
ignored and counted, so a restart cannot be undone by an old packet (D32). Every change of
the route is an effect ``RouteChanged``, by which the table's epoch grows and decode learns
that the former incarnation must be fenced.

Not modelled here: what a registration must agree with (topology, block sizes; the table
checks that first and answers 400 or 409), time, HTTP.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

from pdcore.control.messages import RankRegistration
from pdcore.fsm.effects import Effect
from pdcore.fsm.machine import Event, Query, lifecycle
from pdcore.fsm.states import RankState as S
from pdcore.fsm.table import Lifecycle, Row, StateInfo

#: Replaced incarnations remembered per place; each costs a restart of a process, and a
#: packet delayed by this many restarts is not a case to spend memory on.
REPLACED_CAP: Final = 8


class RouteChanged(Effect, frozen=True):
    """Incarnations (32 hex digits) in the route before and after; "" is none."""

    place: str
    former: str
    current: str


_HELD = (S.REGISTERED, S.STALE)

RANK = Lifecycle(
    name="rank registration",
    states=S,
    initial=S.ABSENT,
    terminal=frozenset(),
    events=("registered", "deregistered", "lease_expired", "retention_expired"),
    rows=(
        Row(S.ABSENT, "registered", S.REGISTERED, ("adopt",), "is_not_replaced"),
        Row(S.REGISTERED, "registered", S.REGISTERED, (), "is_renewal"),
        Row(S.REGISTERED, "registered", S.REGISTERED, ("adopt",), "is_not_replaced"),
        Row(S.STALE, "registered", S.REGISTERED, ("adopt",), "is_not_replaced"),
        Row(S.REGISTERED, "lease_expired", S.STALE, ("withdraw",)),
        *(Row(s, "deregistered", S.ABSENT, ("withdraw", "retire"), "is_holder") for s in _HELD),
        Row(S.ABSENT, "deregistered", S.ABSENT, ("retire",), "is_forgotten"),
        Row(S.STALE, "retention_expired", S.ABSENT, ("forget",)),
    ),
    info={
        S.ABSENT: StateInfo(
            "no process life holds this place",
            awaits="the rank's worker, which registers last",
            deadline="start_timeout_s of the instance (then /health names the rank)",
        ),
        S.REGISTERED: StateInfo(
            "in the route, under a lease",
            awaits="the worker's next registration",
            deadline="rank_lease_s",
        ),
        S.STALE: StateInfo(
            "lease ran out; out of the route, remembered",
            awaits="the worker, or its successor",
            deadline="rank_retention_s",
        ),
    },
    deadline_events=("lease_expired", "retention_expired"),
)


@lifecycle(RANK)
class Rank:
    """See the module's theory. ``place`` is the route key "dp,cp,tp" (R25)."""

    __slots__ = (
        "forgotten",
        "ignored",
        "in_route",
        "place",
        "registration",
        "replaced",
        "state",
    )

    registered: Event[RankRegistration]
    may_registered: Query[RankRegistration]
    deregistered: Event[str]
    lease_expired: Event[None]
    retention_expired: Event[None]

    def __init__(self, place: str) -> None:
        self.state: S = S.ABSENT
        self.ignored = 0
        self.place = place
        #: The registration that holds the place; None in Absent.
        self.registration: RankRegistration | None = None
        #: Incarnation last announced in the route; "" when out of it.
        self.in_route = ""
        self.replaced: deque[str] = deque(maxlen=REPLACED_CAP)
        #: Held the place last and was silent too long; "" when somebody holds it.
        self.forgotten = ""

    def __repr__(self) -> str:
        holder = self.registration.incarnation[:8] if self.registration is not None else "-"
        return f"Rank({self.place}, {self.state.value}, incarnation={holder})"

    def is_renewal(self, payload: RankRegistration) -> bool:
        return payload == self.registration

    def is_not_replaced(self, payload: RankRegistration) -> bool:
        return payload.incarnation not in self.replaced

    def is_holder(self, payload: str) -> bool:
        return self.registration is not None and self.registration.incarnation == payload

    def is_forgotten(self, payload: str) -> bool:
        return self.forgotten != "" and self.forgotten == payload

    def adopt(self, payload: RankRegistration) -> Sequence[Effect]:
        """Whoever held the place before is replaced for good, also if it was forgotten since."""
        held = self.registration
        former = self.forgotten if held is None else held.incarnation
        if former not in ("", payload.incarnation):
            self.replaced.append(former)
        self.registration, self.forgotten = payload, ""
        announced, self.in_route = self.in_route, payload.incarnation
        return (RouteChanged(self.place, announced, payload.incarnation),)

    def withdraw(self, payload: object) -> Sequence[Effect]:
        announced, self.in_route = self.in_route, ""
        return (RouteChanged(self.place, announced, ""),) if announced else ()

    def retire(self, payload: str) -> Sequence[Effect]:
        """A goodbye is final: a registration of that life that was still under way is late."""
        self.replaced.append(payload)
        self.registration, self.forgotten = None, ""
        return ()

    def forget(self, payload: object) -> Sequence[Effect]:
        """Silent too long. Should that process life still register, it is welcome, unless it
        says goodbye or another one takes the place before."""
        self.forgotten = "" if self.registration is None else self.registration.incarnation
        self.registration = None
        return ()
