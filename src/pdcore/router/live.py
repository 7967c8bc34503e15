"""One client request in flight, and what its legs are sent."""

from __future__ import annotations

from typing import Final, NamedTuple

from pdcore.errors import failure
from pdcore.fsm.routed import ROUTED, CancelLeg, DispatchLegs, Leg, Routed
from pdcore.fsm.states import RoutedState
from pdcore.router.events import Dispatch
from pdcore.router.fleet import Member
from pdcore.router.outbox import CancelKey, SendCancel
from pdcore.router.policies import ClientFields, name_dp_rank
from pdcore.types import Failure

#: 2^64 divided by the golden ratio.
_GOLDEN: Final = 0x9E3779B97F4A7C15
_MASK: Final = (1 << 64) - 1


class Fallback(NamedTuple):
    """The loss that another attempt was to make good. ``leg``: it was that leg's answer to
    ``attempt``; None: in the router's words."""

    failure: Failure
    attempt: int
    leg: Leg | None


class Budget(NamedTuple):
    """The time of one request: seconds in all, its end on our clock and as Unix time."""

    total_s: float
    deadline_s: float
    expires_at_s: float

    @classmethod
    def begin(cls, total_s: float, now_s: float, unix_s: float) -> Budget:
        return cls(total_s, now_s + total_s, unix_s + total_s)


class Recovery:
    """What a request remembers of its lost attempts."""

    __slots__ = ("avoided", "blamed", "evicted", "fallback", "is_local", "retry_at_s")

    def __init__(self) -> None:
        #: Instances that lost an attempt, and those of them that lost the last one.
        self.avoided: list[Member] = []
        self.blamed: list[Member] = []
        #: The attempt after the back-off is one with local prefill.
        self.is_local = False
        #: The end of the back-off, in Retrying.
        self.retry_at_s = 0.0
        #: What the client gets if the next attempt cannot be made.
        self.fallback: Fallback | None = None
        #: Why the current attempt's prefill is thought to be gone; empty: it is not.
        self.evicted = ""

    def lose_attempt(self, blamed: list[Member], fallback: Fallback, retry_at_s: float) -> None:
        self.blamed = blamed
        self.avoided.extend(m for m in blamed if m not in self.avoided)
        self.fallback = fallback
        self.retry_at_s = retry_at_s
        self.evicted = ""


class Live:
    """One client request in flight."""

    __slots__ = (
        "answered",
        "budget",
        "decode",
        "fields",
        "prefill",
        "recovery",
        "replaces",
        "room",
        "routed",
        "since_s",
        "status",
        "ticket",
    )

    def __init__(
        self,
        ticket: int,
        room: int,
        fields: ClientFields,
        replaces: int,
        budget: Budget,
    ) -> None:
        self.ticket = ticket
        self.room = room
        self.fields = fields
        self.replaces = replaces
        self.budget = budget
        self.routed = Routed()
        self.recovery = Recovery()
        self.prefill: Member | None = None
        self.decode: Member | None = None
        #: When it began to wait for what it waits for now.
        self.since_s = budget.deadline_s - budget.total_s
        #: The leg whose answer is being passed on, while its event is handled.
        self.answered: Leg | None = None
        #: The HTTP status of what was answered.
        self.status = 0

    def member(self, leg: Leg) -> Member | None:
        return self.prefill if leg is Leg.PREFILL else self.decode

    @property
    def outcome(self) -> str:
        """How it ended, for the counters. A 4xx is the request's own fault, which no operator
        should hear an alarm for."""
        is_refused = self.routed.state is RoutedState.FAILED and 400 <= self.status < 500
        return "refused" if is_refused else self.routed.state.value.lower()

    def cancel(self, effect: CancelLeg) -> SendCancel | None:
        """None: its attempt is at no instance."""
        member = self.member(effect.leg)
        if member is None:
            return None
        key = CancelKey(self.room, effect.attempt, effect.leg)
        return SendCancel(key, member.target, effect.unless_received)

    def take(self, pair: tuple[Member | None, Member | None]) -> None:
        """Move this request's weight to another pair; (None, None) gives it back, once."""
        for member in (self.prefill, self.decode):
            if member is not None:
                member.num_live -= 1
        self.prefill, self.decode = pair
        for member in pair:
            if member is not None:
                member.num_live += 1


def late(live: Live, now_s: float) -> Failure:
    """The failure of a request whose time is over: what it waited for, from whom, since when."""
    where = ", ".join(
        f"{leg.value} {member.target.netloc}"
        for leg in Leg
        if (member := live.member(leg)) is not None
    )
    waited_s = now_s - live.since_s
    return failure(
        "deadline_exceeded",
        f"no result within {live.budget.total_s:g} s: waiting since {waited_s:.1f} s for "
        f"{ROUTED.info[live.routed.state].awaits} (attempt {len(live.routed.attempts)}"
        f"{', ' if where else ''}{where})",
    )


def dispatch(live: Live, legs: DispatchLegs, now_s: float) -> Dispatch:
    """What the legs of an attempt get. Without a prefill decode computes the prompt itself."""
    prefill, decode = live.prefill, live.decode
    assert decode is not None
    remaining_s = live.budget.deadline_s - now_s
    added: dict[str, object] = {
        "bootstrap_room": live.room,
        "attempt": legs.attempt,
        "bootstrap_host": prefill and prefill.target.host,
        "bootstrap_port": prefill and prefill.bootstrap_port,
        "prefill_instance": prefill and prefill.instance,
        "decode_instance": decode.instance,
        "expires_at_s": live.budget.expires_at_s,
        "remaining_s": remaining_s,
        "disagg_prefill_dp_rank": prefill
        and name_dp_rank(_stirred(live.room), prefill.dp_size, live.fields.dp_rank),
        "replaces": live.replaces or None,
    }
    if prefill is None:
        added["local_prefill"] = True
    return Dispatch(live.ticket, legs.attempt, prefill, decode, remaining_s, added)


def _stirred(room: int) -> int:
    """Another number of that room, evenly spread also for rooms that follow each other. The room
    modulo the instances has chosen one of them: its rank by the room modulo as many ranks would
    be the same one always, and the others idle."""
    return (room * _GOLDEN & _MASK) >> 32
