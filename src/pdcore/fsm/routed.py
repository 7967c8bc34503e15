"""Routed request: one client request at the router.

Theory
------
  Received    parsed and admitted; no pair of instances chosen yet;
  Dispatched  both legs of the current attempt are on their way; nothing has been answered,
              so another attempt may still replace this one;
  Retrying    the attempt was lost before anything was answered: both its legs are cancelled
              and drain beside us, and another attempt will replace it, at once or after a
              back-off. No leg of ours is current, so no outcome of one counts;
  Streaming   decode's first token is out, the response has begun: nothing can be retried,
              and only decode and the client matter;
  Done        decode's result was passed on completely;
  Failed      the client got, or its stream ended with, one failure;
  Cancelled   the client went away.

The response is *taken* once, by the first of: decode's first token or result, a decisive
error of either leg, the router's deadline, the client's departure. Rules (architecture,
section 10; each has a counterexample in the protocol models, Q5):
  - answer when the first leg decides, never gather both (D10);
  - a decode failure before the first token cancels prefill; a client that is gone cancels
    both; a refusal by prefill (413 and the like) is answered at once and cancels decode,
    unless decode already has its KV (D10, D11);
  - a broken connection to prefill is not a failure of prefill: decode decides. A broken
    connection to decode ends the request, and cancels both legs, for decode may be alive;
  - a prefill instance that is gone for good may have written its KV before: decode is asked
    to give up unless it has it, and its answer decides;
  - after the first token prefill's outcome changes nothing;
  - only the current attempt's outcomes count, once; those of another attempt are ignored
    and counted.

Who moves it: the router core, for what its HTTP legs report, for the client's connection,
and for its timer, which is later than the legs' own (rule 8).

Not modelled here: choosing instances, whether a failure is worth another attempt (the core
decides and feeds ``attempt_lost`` instead of the failure, then ``retried`` when the back-off
is over, or ``rejected`` when there is nothing to send it to), resending cancels until answered
(the core owns an outbox that outlives this entity), bytes.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import msgspec

from pdcore.fsm.effects import Effect
from pdcore.fsm.machine import Event, lifecycle
from pdcore.fsm.states import RoutedState as S
from pdcore.fsm.table import Lifecycle, Row, StateInfo
from pdcore.types import Failure


class Leg(enum.Enum):
    PREFILL = "prefill"
    DECODE = "decode"


class LegReport(msgspec.Struct, frozen=True):
    """Good news of a leg: accepted, first token, finished."""

    attempt: int

    @property
    def failure(self) -> None:
        return None


class LegFailure(msgspec.Struct, frozen=True):
    """A leg failed, or its connection to us did."""

    attempt: int
    failure: Failure


class RouterFailure(msgspec.Struct, frozen=True):
    """The router itself ends the request: nothing healthy to send it to, or its deadline."""

    failure: Failure


class Retry(msgspec.Struct, frozen=True):
    """Replace the lost attempt ``replaces`` by the fresh ``attempt``."""

    replaces: int
    attempt: int


class DispatchLegs(Effect, frozen=True):
    """Send both legs under this attempt; ``replaces`` is 0 for the first one."""

    attempt: int
    replaces: int


class Answer(Effect, frozen=True):
    """Take the response, the only one: ``failure`` None relays decode's."""

    failure: Failure | None


class EndStream(Effect, frozen=True):
    """End a response that has begun, with an error event if ``failure`` is set."""

    failure: Failure | None


class CancelLeg(Effect, frozen=True):
    """Resent until answered. ``unless_received``: a decode that has its KV ignores it."""

    leg: Leg
    attempt: int
    unless_received: bool = False


ROUTED = Lifecycle(
    name="routed request",
    states=S,
    initial=S.RECEIVED,
    terminal=frozenset({S.DONE, S.FAILED, S.CANCELLED}),
    events=(
        "dispatched",
        "rejected",
        "attempt_lost",
        "retried",
        "prefill_accepted",
        "prefill_failed",
        "prefill_unknown",
        "prefill_evicted",
        "first_token",
        "decode_finished",
        "decode_failed",
        "decode_lost",
        "client_gone",
        "deadline_expired",
    ),
    rows=(
        Row(S.RECEIVED, "dispatched", S.DISPATCHED, ("begin_attempt",)),
        Row(S.RECEIVED, "rejected", S.FAILED, ("answer",)),
        Row(S.RECEIVED, "client_gone", S.CANCELLED),
        Row(S.RECEIVED, "deadline_expired", S.FAILED, ("answer",)),
        Row(S.DISPATCHED, "attempt_lost", S.RETRYING, ("cancel_both",), "is_current"),
        Row(S.DISPATCHED, "prefill_accepted", S.DISPATCHED, ("note_accepted",), "is_current"),
        Row(S.DISPATCHED, "prefill_unknown", S.DISPATCHED, ("note_unknown",), "is_current"),
        Row(
            S.DISPATCHED,
            "prefill_evicted",
            S.DISPATCHED,
            ("note_unknown", "cancel_decode_unless_received"),
            "is_current",
        ),
        Row(
            S.DISPATCHED,
            "prefill_failed",
            S.FAILED,
            ("answer", "cancel_decode_unless_received"),
            "is_current",
        ),
        Row(S.DISPATCHED, "first_token", S.STREAMING, ("answer",), "is_current"),
        Row(S.DISPATCHED, "decode_finished", S.DONE, ("answer",), "is_current"),
        Row(
            S.DISPATCHED,
            "decode_failed",
            S.FAILED,
            ("answer", "cancel_prefill"),
            "is_current",
        ),
        Row(S.DISPATCHED, "decode_lost", S.FAILED, ("answer", "cancel_both"), "is_current"),
        Row(S.DISPATCHED, "client_gone", S.CANCELLED, ("cancel_both",)),
        Row(S.DISPATCHED, "deadline_expired", S.FAILED, ("answer", "cancel_both")),
        Row(S.RETRYING, "retried", S.DISPATCHED, ("replace_attempt",), "is_fresh_retry"),
        Row(S.RETRYING, "rejected", S.FAILED, ("answer",)),
        Row(S.RETRYING, "client_gone", S.CANCELLED),
        Row(S.RETRYING, "deadline_expired", S.FAILED, ("answer",)),
        Row(S.STREAMING, "decode_finished", S.DONE, ("end_stream",), "is_current"),
        Row(S.STREAMING, "decode_failed", S.FAILED, ("end_stream",), "is_current"),
        Row(S.STREAMING, "decode_lost", S.FAILED, ("end_stream", "cancel_decode"), "is_current"),
        Row(S.STREAMING, "client_gone", S.CANCELLED, ("cancel_both",)),
        Row(S.STREAMING, "deadline_expired", S.FAILED, ("end_stream", "cancel_decode")),
    ),
    info={
        S.RECEIVED: StateInfo(
            "admitted; no instances chosen yet",
            awaits="a healthy prefill and decode instance",
            deadline="router request deadline",
        ),
        S.DISPATCHED: StateInfo(
            "both legs sent; nothing answered",
            awaits="decode's first token or result, or a refusal by prefill",
            deadline="router request deadline",
        ),
        S.RETRYING: StateInfo(
            "an attempt was lost; another one follows",
            awaits="the back-off, then another healthy instance",
            deadline="router request deadline",
        ),
        S.STREAMING: StateInfo(
            "the response has begun",
            awaits="decode's next token or end",
            deadline="router request deadline",
        ),
        S.DONE: StateInfo("decode's result was passed on"),
        S.FAILED: StateInfo("one failure was passed on"),
        S.CANCELLED: StateInfo("the client went away"),
    },
)


@lifecycle(ROUTED)
class Routed:
    """See the module's theory. ``attempts`` are those minted so far, the last is current.

    A prefill that refused the request before it was accepted is ``prefill_failed`` (also: its
    port refused the connection, nothing was sent); a response that never came is
    ``prefill_unknown``.
    """

    __slots__ = ("attempts", "ignored", "is_prefill_accepted", "is_prefill_unknown", "state")

    dispatched: Event[int]
    rejected: Event[RouterFailure]
    attempt_lost: Event[LegFailure]
    retried: Event[Retry]
    prefill_accepted: Event[LegReport]
    prefill_failed: Event[LegFailure]
    prefill_unknown: Event[LegFailure]
    prefill_evicted: Event[LegFailure]
    first_token: Event[LegReport]
    decode_finished: Event[LegReport]
    decode_failed: Event[LegFailure]
    decode_lost: Event[LegFailure]
    client_gone: Event[None]
    deadline_expired: Event[RouterFailure]

    def __init__(self) -> None:
        self.state: S = S.RECEIVED
        self.ignored = 0
        self.attempts: tuple[int, ...] = ()
        self.is_prefill_accepted = False
        self.is_prefill_unknown = False

    def __repr__(self) -> str:
        return f"Routed({self.state.value}, attempts={list(self.attempts)})"

    @property
    def attempt(self) -> int:
        """The current attempt; 0 before the first dispatch."""
        return self.attempts[-1] if self.attempts else 0

    # --- guards -------------------------------------------------------------------------

    def is_current(self, payload: LegReport | LegFailure) -> bool:
        return payload.attempt == self.attempts[-1]

    def is_fresh_retry(self, payload: Retry) -> bool:
        return payload.replaces == self.attempts[-1] and payload.attempt not in self.attempts

    # --- actions ------------------------------------------------------------------------

    def begin_attempt(self, payload: int) -> Sequence[Effect]:
        self.attempts = (payload,)
        return (DispatchLegs(payload, 0),)

    def replace_attempt(self, payload: Retry) -> Sequence[Effect]:
        self.attempts = (*self.attempts, payload.attempt)
        self.is_prefill_accepted = self.is_prefill_unknown = False
        return (DispatchLegs(payload.attempt, payload.replaces),)

    def note_accepted(self, payload: LegReport) -> Sequence[Effect]:
        self.is_prefill_accepted = True
        return ()

    def note_unknown(self, payload: LegFailure) -> Sequence[Effect]:
        self.is_prefill_unknown = True
        return ()

    def answer(self, payload: LegReport | LegFailure | RouterFailure) -> Sequence[Effect]:
        return (Answer(payload.failure),)

    def end_stream(self, payload: LegReport | LegFailure | RouterFailure) -> Sequence[Effect]:
        return (EndStream(payload.failure),)

    def cancel_prefill(self, payload: object) -> Sequence[Effect]:
        return (CancelLeg(Leg.PREFILL, self.attempt),)

    def cancel_decode(self, payload: object) -> Sequence[Effect]:
        return (CancelLeg(Leg.DECODE, self.attempt),)

    def cancel_decode_unless_received(self, payload: object) -> Sequence[Effect]:
        return (CancelLeg(Leg.DECODE, self.attempt, unless_received=True),)

    def cancel_both(self, payload: object) -> Sequence[Effect]:
        return (CancelLeg(Leg.PREFILL, self.attempt), CancelLeg(Leg.DECODE, self.attempt))
