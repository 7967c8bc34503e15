"""The two legs of an attempt as a router sees them: HTTP exchanges and what happens behind.

This half is a small model (the transfer itself is explored in the pair worlds): a leg accepts,
transfers, decodes, fails, is cancelled, meets its deadline, or its process dies. What matters
here is when which answer of it reaches the router, and that every leg ends.

A leg's own state:
  "-" not there   "W" waits   "X" transfers (prefill)   "S" has its KV, decodes (decode)
  "D" done   "F" failed   "N" never got the request
  "K" its process died   "k" and the router knows that
Its HTTP exchange:
  "q" the request is on its way   "x" it is, but the router has dropped the connection
  "o" open, no answer yet   "s" decode's stream has begun   "f" over
  capital letters and "t", "e", "b", "r": an answer on its way, see :data:`ANSWERS`.
  An answer stays readable after it was delivered ("A." and so on): it may be delivered twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from pdcore.fsm.routed import Leg

#: What is on its way -> (HTTP status, code of the error).
ANSWERS: Final[dict[str, tuple[int, str]]] = {
    "A": (200, ""),
    "R": (413, "prompt_too_long"),
    "U": (503, "overloaded"),
    "I": (500, "internal"),
    "E": (502, "prefill_failed"),
    "L": (503, "peer_lost"),
    "C": (499, "cancelled"),
    "X": (504, "deadline_exceeded"),
}
#: Control messages between the legs, and the cancels of the router, which are resent.
HANDSHAKE, KV, PREFILL_FAILED, DECODE_GONE = 1, 2, 4, 8
CANCEL_PREFILL, CANCEL_DECODE, CANCEL_UNLESS = 16, 32, 64
_CANCELS: Final = CANCEL_PREFILL | CANCEL_DECODE | CANCEL_UNLESS

LIVE_PREFILL: Final = "WX"
LIVE_DECODE: Final = "WS"
_LATE_CLOCK: Final = 2


class Attempt(NamedTuple):
    """One dispatch. ``sent`` are the bits above."""

    prefill: str = "-"
    decode: str = "-"
    prefill_http: str = "q"
    decode_http: str = "q"
    sent: int = 0

    @property
    def is_quiet(self) -> bool:
        """Both legs have ended or will never begin."""
        return (
            self.prefill not in LIVE_PREFILL
            and self.decode not in LIVE_DECODE
            and not (self.prefill == "-" and self.prefill_http in "qx")
            and not (self.decode == "-" and self.decode_http in "qx")
        )

    def says(self, leg: Leg, answer: str) -> Attempt:
        """An answer leaves, if its connection still is: nobody reads it otherwise."""
        if leg is Leg.PREFILL:
            return self._replace(prefill_http=answer if self.prefill_http in "qo" else "f")
        return self._replace(decode_http=answer if self.decode_http in "qos" else "f")

    def tells(self, bits: int) -> Attempt:
        return self._replace(sent=self.sent | bits)

    def prefill_fails(self, answer: str = "") -> Attempt:
        """It tells decode (STATUS Failed), and the router only if it has not accepted."""
        failed = self._replace(prefill="F").tells(PREFILL_FAILED)
        return failed.says(Leg.PREFILL, answer) if answer else failed

    def decode_fails(self, answer: str) -> Attempt:
        return self._replace(decode="F").tells(DECODE_GONE).says(Leg.DECODE, answer)

    def dropped(self) -> Attempt:
        """The router closes what is left of its connections. What it had read may still be
        handled, so an answer on its way stays."""
        prefill = {"q": "x", "o": "f"}.get(self.prefill_http, self.prefill_http)
        decode = {"q": "x", "o": "f", "s": "f"}.get(self.decode_http, self.decode_http)
        return self._replace(prefill_http=prefill, decode_http=decode)

    def cancelled(self, leg: Leg, *, unless_received: bool) -> Attempt:
        if leg is Leg.PREFILL:
            return self.tells(CANCEL_PREFILL)
        return self.tells(CANCEL_UNLESS if unless_received else CANCEL_DECODE)


#: Decode computes the prompt itself: there is no prefill leg, and its KV does not travel.
LOCAL: Final = Attempt(prefill="N", prefill_http="f", sent=KV)


class LegMove(NamedTuple):
    label: str
    is_fault: bool
    after: Attempt


def leg_moves(a: Attempt, clock: int, *, is_lossy: bool) -> Iterator[LegMove]:
    """What the legs of one attempt may do next. ``is_lossy``: connections break and requests
    get lost (and the world then counts on no delivery at all)."""
    yield from _prefill_arrives(a, clock, is_lossy)
    yield from _decode_arrives(a, clock, is_lossy)
    yield from _prefill_runs(a)
    yield from _decode_runs(a)
    yield from _cancels(a)
    if clock >= _LATE_CLOCK:
        if a.prefill in LIVE_PREFILL:
            yield LegMove("prefill meets its deadline", False, a.prefill_fails())
        if a.decode in LIVE_DECODE:
            answer = "b" if a.decode_http == "s" else "X"
            yield LegMove("decode meets its deadline", False, a.decode_fails(answer))
    if is_lossy:
        yield from _breaks(a)


def _prefill_arrives(a: Attempt, clock: int, is_lossy: bool) -> Iterator[LegMove]:
    if a.prefill != "-" or a.prefill_http not in "qx":
        return
    if clock >= _LATE_CLOCK:  # the expiry in the request is absolute
        yield LegMove("prefill rejects a late request", False, a.prefill_fails("X"))
        return
    accepted = a._replace(prefill="W").says(Leg.PREFILL, "A")
    yield LegMove("prefill accepts", False, accepted)
    yield LegMove("prefill rejects for good", True, a.prefill_fails("R"))
    yield LegMove("prefill is overloaded", True, a.prefill_fails("U"))
    never = a._replace(prefill="N")
    if a.prefill_http == "q":
        yield LegMove("prefill's port refuses", True, never.says(Leg.PREFILL, "r"))
    if is_lossy:
        lost = "b" if a.prefill_http == "q" else "f"
        yield LegMove("prefill's request is lost", True, never._replace(prefill_http=lost))


def _decode_arrives(a: Attempt, clock: int, is_lossy: bool) -> Iterator[LegMove]:
    if a.decode != "-" or a.decode_http not in "qx":
        return
    if clock >= _LATE_CLOCK:
        yield LegMove("decode rejects a late request", False, a.decode_fails("X"))
        return
    accepted = a._replace(decode="W").tells(HANDSHAKE).says(Leg.DECODE, "o")
    yield LegMove("decode accepts", False, accepted)
    yield LegMove("decode rejects for good", True, a.decode_fails("R"))
    yield LegMove("decode is overloaded", True, a.decode_fails("U"))
    never = a._replace(decode="N")
    if a.decode_http == "q":
        yield LegMove("decode's port refuses", True, never.says(Leg.DECODE, "r"))
    if is_lossy:
        lost = "b" if a.decode_http == "q" else "f"
        yield LegMove("decode's request is lost", True, never._replace(decode_http=lost))


def _prefill_runs(a: Attempt) -> Iterator[LegMove]:
    if a.sent & HANDSHAKE and a.prefill == "W":
        yield LegMove("prefill gets the handshake", False, a._replace(prefill="X"))
    if a.prefill == "X":
        yield LegMove("prefill is done", False, a._replace(prefill="D").tells(KV))
    if a.prefill in LIVE_PREFILL:
        yield LegMove("prefill fails", True, a.prefill_fails())
        if a.sent & DECODE_GONE:
            yield LegMove("prefill hears from decode: over", False, a.prefill_fails())
        if a.decode in "Kk":
            yield LegMove("prefill loses its peer", False, a.prefill_fails())
    if a.prefill in "WXD":
        broken = "b" if a.prefill_http == "A" else a.prefill_http
        dead = a._replace(prefill="K", prefill_http=broken)
        yield LegMove("prefill's process dies", True, dead)


def _decode_runs(a: Attempt) -> Iterator[LegMove]:
    if a.decode == "W":
        if a.sent & KV:
            ready = a._replace(decode="S")
            yield LegMove("decode has its KV", False, ready)
            if a.decode_http == "o":
                yield LegMove("decode begins to stream", False, ready.says(Leg.DECODE, "t"))
        if a.sent & PREFILL_FAILED:
            yield LegMove("decode hears from prefill: failed", False, a.decode_fails("E"))
        if a.prefill in "Kk":
            yield LegMove("decode loses its peer", False, a.decode_fails("L"))
        yield LegMove("decode fails", True, a.decode_fails("I"))
    elif a.decode == "S" and a.decode_http != "t":
        ends = {"s": "e", "o": "A"}.get(a.decode_http, "f")
        yield LegMove("decode finishes", False, a._replace(decode="D").says(Leg.DECODE, ends))
        yield LegMove("decode fails", True, a.decode_fails("I"))
        if a.decode_http == "s":
            yield LegMove("decode fails, its stream breaks", True, a.decode_fails("b"))
    if a.decode in LIVE_DECODE:
        dead = a._replace(decode="K").says(Leg.DECODE, "b")
        yield LegMove("decode's process dies", True, dead)


def _cancels(a: Attempt) -> Iterator[LegMove]:
    """A cancel of what is not there yet says so and is sent again: it changes nothing."""
    if a.sent & CANCEL_PREFILL and a.prefill in LIVE_PREFILL:
        yield LegMove("prefill gets the cancel", False, a.prefill_fails())
    stops = LIVE_DECODE if a.sent & CANCEL_DECODE else "W" if a.sent & CANCEL_UNLESS else ""
    if a.decode in LIVE_DECODE and a.decode in stops:
        answer = "b" if a.decode_http == "s" else "C"
        yield LegMove("decode gets the cancel", False, a.decode_fails(answer))


def _breaks(a: Attempt) -> Iterator[LegMove]:
    if a.prefill_http in "ARUX":
        after = a._replace(prefill_http="b")
        yield LegMove("prefill's connection breaks", True, after)
    if a.decode_http in "ostAIELCXRUe":
        yield LegMove("decode's connection breaks", True, a._replace(decode_http="b"))


def known_cancels(a: Attempt) -> Iterator[tuple[Leg, bool, Attempt]]:
    """Answers of legs that know what a cancel is about, and are over or need not end: (leg, to
    the weaker cancel, after it). The answer to a weaker one may come when a stronger one has
    taken its place."""
    if a.sent & CANCEL_PREFILL and a.prefill in "DF":
        yield Leg.PREFILL, False, a._replace(sent=a.sent & ~CANCEL_PREFILL)
    if a.sent & CANCEL_DECODE and a.decode in "DF":
        yield Leg.DECODE, False, a._replace(sent=a.sent & ~CANCEL_DECODE)
    if a.sent & CANCEL_UNLESS and a.decode in "SDF":
        yield Leg.DECODE, True, a._replace(sent=a.sent & ~CANCEL_UNLESS)


def settled(a: Attempt) -> Attempt:
    """Forget what can have no effect any more, so that equal futures are one state."""
    sent = a.sent
    if a.prefill == "F" and sent & HANDSHAKE:
        sent |= PREFILL_FAILED  # its answer to the handshake is as good as sent
    if a.prefill not in "-W":
        sent &= ~HANDSHAKE
    if a.prefill not in "-WX":
        sent &= ~DECODE_GONE
    if a.decode not in "-W":
        sent &= ~(KV | PREFILL_FAILED)
    if not a.is_quiet or a.prefill_http in "qxARUXbr" or a.decode_http in "qxostAIELCXRUebr":
        return a._replace(sent=sent)
    return a._replace(sent=sent & _CANCELS if a.prefill in "DF" or a.decode in "DF" else 0)


def unsent(a: Attempt, number: int, resent: set[tuple[int, Leg, bool]]) -> Iterator[str]:
    """What was cancelled and lives is told again until it answers (Q5 RES)."""
    its = (number, Leg.PREFILL, False)
    if a.sent & CANCEL_PREFILL and a.prefill in LIVE_PREFILL + "-" and its not in resent:
        yield f"the cancel of prefill's attempt {number} is not sent again"
    its = (number, Leg.DECODE, False)
    if a.sent & CANCEL_DECODE and a.decode in LIVE_DECODE + "-" and its not in resent:
        yield f"the cancel of decode's attempt {number} is not sent again"


def uncancelled(a: Attempt, number: int) -> Iterator[str]:
    """A leg of a replaced attempt that nobody has told to stop."""
    on_way = a.prefill == "-" and a.prefill_http in "qx"
    if (a.prefill in LIVE_PREFILL or on_way) and not a.sent & CANCEL_PREFILL:
        yield f"prefill of the replaced attempt {number} goes on uncancelled"
    on_way = a.decode == "-" and a.decode_http in "qx"
    if (a.decode in LIVE_DECODE or on_way) and not a.sent & (CANCEL_DECODE | CANCEL_UNLESS):
        yield f"decode of the replaced attempt {number} goes on uncancelled"
