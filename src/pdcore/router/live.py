"""One client request in flight, and what its legs are sent."""

from __future__ import annotations

from pdcore.fsm.routed import DispatchLegs, Leg, Routed
from pdcore.router.events import Dispatch
from pdcore.router.fleet import Member
from pdcore.router.policies import ClientFields, choose_dp_rank


class Live:
    """One client request in flight."""

    __slots__ = (
        "answered",
        "deadline_s",
        "decode",
        "expires_at_s",
        "fields",
        "prefill",
        "replaces",
        "retries",
        "room",
        "routed",
        "ticket",
    )

    def __init__(self, ticket: int, room: int, fields: ClientFields, replaces: int) -> None:
        self.ticket = ticket
        self.room = room
        self.fields = fields
        self.replaces = replaces
        self.routed = Routed()
        self.prefill: Member | None = None
        self.decode: Member | None = None
        self.deadline_s = 0.0
        self.expires_at_s = 0.0
        self.retries = 0
        #: The leg whose answer is being passed on, while its event is handled.
        self.answered: Leg | None = None

    def member(self, leg: Leg) -> Member | None:
        return self.prefill if leg is Leg.PREFILL else self.decode

    def take(self, pair: tuple[Member | None, Member | None]) -> None:
        """Move this request's weight to another pair; (None, None) gives it back, once."""
        for member in (self.prefill, self.decode):
            if member is not None:
                member.num_live -= 1
        self.prefill, self.decode = pair
        for member in pair:
            if member is not None:
                member.num_live += 1


def dispatch(live: Live, legs: DispatchLegs, now_s: float) -> Dispatch:
    prefill, decode = live.prefill, live.decode
    assert prefill is not None
    assert decode is not None
    remaining_s = live.deadline_s - now_s
    added: dict[str, object] = {
        "bootstrap_room": live.room,
        "attempt": legs.attempt,
        "bootstrap_host": prefill.target.host,
        "bootstrap_port": prefill.bootstrap_port,
        "prefill_instance": prefill.instance,
        "decode_instance": decode.instance,
        "expires_at_s": live.expires_at_s,
        "remaining_s": remaining_s,
        "disagg_prefill_dp_rank": choose_dp_rank(live.room, prefill.dp_size, live.fields.dp_rank),
        "replaces": live.replaces or None,
    }
    return Dispatch(live.ticket, legs.attempt, prefill, decode, remaining_s, added)
