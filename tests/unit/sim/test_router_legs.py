"""The legs behind a router: when which answer leaves, and that cancels end them."""

from __future__ import annotations

import pytest

from pdcore.fsm.routed import Leg
from pdcore.sim.router_legs import (
    CANCEL_DECODE,
    CANCEL_PREFILL,
    CANCEL_UNLESS,
    HANDSHAKE,
    KV,
    PREFILL_FAILED,
    Attempt,
    known_cancels,
    leg_moves,
    settled,
)


def take(attempt: Attempt, label: str, *, clock: int = 0, is_lossy: bool = False) -> Attempt:
    offered = {move.label: move for move in leg_moves(attempt, clock, is_lossy=is_lossy)}
    assert label in offered, f"{label!r} is not among {list(offered)}"
    return settled(offered[label].after)


def way(*labels: str) -> Attempt:
    attempt = Attempt()
    for label in labels:
        attempt = take(attempt, label)
    return attempt


ARRIVED = ("prefill accepts", "decode accepts", "prefill gets the handshake", "prefill is done")


def test_both_halves_come_together_and_the_first_token_leaves() -> None:
    attempt = way(*ARRIVED)
    assert attempt == Attempt("D", "W", "A", "o", KV)
    assert take(attempt, "decode begins to stream").decode_http == "t"
    assert take(take(attempt, "decode has its KV"), "decode finishes").decode_http == "A"


def test_a_failed_prefill_answers_a_later_handshake() -> None:
    """D10: decode must hear of a prefill that failed before it came."""
    attempt = way("prefill rejects for good", "decode accepts")
    assert attempt.sent & PREFILL_FAILED
    over = take(attempt, "decode hears from prefill: failed")
    assert (over.decode, over.decode_http, over.is_quiet) == ("F", "E", True)


@pytest.mark.parametrize(
    ("leg", "bit"), [(Leg.PREFILL, CANCEL_PREFILL), (Leg.DECODE, CANCEL_DECODE)]
)
def test_a_cancel_waits_for_its_request(leg: Leg, bit: int) -> None:
    """Q5 RES: a cancel that overtakes its request must not vanish."""
    early = Attempt().cancelled(leg, unless_received=False)
    assert early.sent == bit
    assert list(known_cancels(early)) == []
    there = take(early, f"{leg.value} accepts")
    over = take(there, f"{leg.value} gets the cancel")
    assert [(its, weak) for its, weak, _ in known_cancels(over)] == [(leg, False)]


def test_a_decode_that_has_its_kv_ignores_the_weaker_cancel() -> None:
    """Section 10: a prefill that failed late cancels decode only unless it has received."""
    running = take(way(*ARRIVED), "decode has its KV")
    asked = running.cancelled(Leg.DECODE, unless_received=True)
    assert asked.sent & CANCEL_UNLESS
    assert all("cancel" not in move.label for move in leg_moves(asked, 0, is_lossy=False))
    assert [(its, weak) for its, weak, _ in known_cancels(asked)] == [(Leg.DECODE, True)]


def test_a_dropped_connection_reads_no_more_answers_but_what_it_had() -> None:
    attempt = way("prefill accepts", "decode accepts").dropped()
    assert (attempt.prefill_http, attempt.decode_http) == ("A", "f")
    assert Attempt().dropped() == Attempt(prefill_http="x", decode_http="x")


def test_a_request_after_its_deadline_is_rejected_on_arrival() -> None:
    """Q5 ABS: the deadline is an absolute budget."""
    labels = [move.label for move in leg_moves(Attempt(), 2, is_lossy=True)]
    assert labels == ["prefill rejects a late request", "decode rejects a late request"]


def test_only_a_lossy_world_breaks_connections() -> None:
    attempt = way("prefill accepts", "decode accepts")
    for is_lossy in (False, True):
        found = [m.label for m in leg_moves(attempt, 0, is_lossy=is_lossy) if "breaks" in m.label]
        assert bool(found) is is_lossy


def test_what_can_have_no_effect_any_more_is_forgotten() -> None:
    gone = Attempt("D", "D", "f", "f", HANDSHAKE | KV | CANCEL_PREFILL)
    assert settled(gone).sent == CANCEL_PREFILL
    assert settled(Attempt("N", "N", "f", "f", CANCEL_DECODE)).sent == 0
