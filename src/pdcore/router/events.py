"""What goes into the router's core and what comes out of it: values, no behaviour."""

from __future__ import annotations

from typing import NamedTuple

from pdcore.fsm.routed import Leg
from pdcore.router.fleet import Member
from pdcore.router.outbox import CancelKey, SendCancel
from pdcore.types import Failure

# --- events ------------------------------------------------------------------------------


class LegAnswered(NamedTuple):
    """A complete HTTP answer of a leg; prefill's 2xx means accepted, decode's 200 finished.
    ``code`` is that of an error, empty where the answer has none."""

    ticket: int
    attempt: int
    leg: Leg
    status: int
    code: str = ""


class LegLost(NamedTuple):
    """No complete answer. ``sent`` False: the leg certainly did not get the request.
    ``is_busy``: for want of a free connection, which says nothing against the instance."""

    ticket: int
    attempt: int
    leg: Leg
    sent: bool
    detail: str
    is_busy: bool = False

    @property
    def is_refused(self) -> bool:
        """Nobody took the connection."""
        return not self.sent and not self.is_busy


class StreamBegan(NamedTuple):
    """Decode's 200 with an event stream: the first token is out (D9)."""

    ticket: int
    attempt: int


class StreamEnded(NamedTuple):
    """The event stream is complete."""

    ticket: int
    attempt: int


class ClientLeft(NamedTuple):
    ticket: int


class InstanceEvicted(NamedTuple):
    """An instance gave no answer at all to so many probes that nobody is there any more."""

    member: Member
    detail: str


class DrainOver(NamedTuple):
    """The router must stop: everything in flight ends with ``failure`` (D59)."""

    failure: Failure


class CancelAnswered(NamedTuple):
    """``is_known`` False: the leg says that it never heard of it; None: no answer came.
    ``unless_received`` is the cancel's: its answer is none to a stronger one."""

    key: CancelKey
    is_known: bool | None
    unless_received: bool = False


RouterEvent = (
    LegAnswered
    | LegLost
    | StreamBegan
    | StreamEnded
    | ClientLeft
    | InstanceEvicted
    | DrainOver
    | CancelAnswered
)


# --- effects -----------------------------------------------------------------------------


class Dispatch(NamedTuple):
    """POST the request to both legs at once (R32). ``added`` goes over the client's fields.
    ``prefill`` None: local prefill, there is only decode's leg."""

    ticket: int
    attempt: int
    prefill: Member | None
    decode: Member
    remaining_s: float
    added: dict[str, object]


class DropLegs(NamedTuple):
    """Close what is left of an attempt's HTTP exchanges; its outcome no longer counts."""

    ticket: int
    attempt: int


class Answer(NamedTuple):
    """Take the response. ``failure`` None: pass on decode's. ``leg``: pass on that leg's own
    answer, status and body verbatim (R32); None: its stream, or the router's own words."""

    ticket: int
    attempt: int
    failure: Failure | None
    leg: Leg | None


class EndStream(NamedTuple):
    """End a stream that has begun, with an error event if ``failure`` is set."""

    ticket: int
    failure: Failure | None


RouterEffect = Dispatch | DropLegs | Answer | EndStream | SendCancel
