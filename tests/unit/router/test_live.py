"""One request in flight: its weight at the instances is one token, moved and given back once."""

from __future__ import annotations

import pytest

from pdcore.fsm.routed import DispatchLegs, Leg
from pdcore.router.fleet import Member
from pdcore.router.live import Budget, Live, dispatch, late
from pdcore.router.policies import ClientFields, Target

BUDGET = Budget(20.0, 20.0, 1020.0)


def members() -> list[Member]:
    return [Member(Target(f"{name}:1", name, 1, 2)) for name in ("p0", "p1", "d0")]


def check_the_weight_is_linear(cls: type[Live]) -> None:
    p0, p1, d0 = members()
    live = cls(1, 5, ClientFields(), 0, BUDGET)
    live.take((p0, d0))
    live.take((p1, d0))
    assert [m.num_live for m in (p0, p1, d0)] == [0, 1, 1]
    live.take((None, None))
    live.take((None, None))
    assert [m.num_live for m in (p0, p1, d0)] == [0, 0, 0], "released twice"


def test_the_weight_of_a_request_is_given_back_once() -> None:
    """Public report group G (vllm-ascend #14967, #16517): a double release on retry made a
    score negative, and that instance drew all traffic for ever."""
    check_the_weight_is_linear(Live)

    class ReleasesWhatItNoLongerHolds(Live):
        def take(self, pair: tuple[Member | None, Member | None]) -> None:
            former = (self.prefill, self.decode)
            super().take(pair)
            if pair == (None, None):
                self.prefill, self.decode = former

    with pytest.raises(AssertionError, match="released twice"):
        check_the_weight_is_linear(ReleasesWhatItNoLongerHolds)


def test_a_dispatch_carries_the_rest_of_the_time_and_what_it_replaces() -> None:
    """Rule 8: the absolute expiry stays, the remaining seconds shrink."""
    p0, _, d0 = members()
    live = Live(1, 6, ClientFields(dp_rank=3), 9, BUDGET)
    live.take((p0, d0))
    sent = dispatch(live, DispatchLegs(11, 9), now_s=5.0)
    assert (sent.prefill, sent.decode, sent.attempt) == (p0, d0, 11)
    assert (sent.remaining_s, sent.added["remaining_s"]) == (15.0, 15.0)
    assert sent.added["expires_at_s"] == 1020.0
    assert sent.added["replaces"] == 9
    assert sent.added["disagg_prefill_dp_rank"] == 3
    assert live.member(Leg.PREFILL) is p0


def test_a_late_request_says_what_it_waited_for_from_whom_and_since_when() -> None:
    """D23: "what is this room waiting for?" has an answer at any time."""
    p0, _, d0 = members()
    live = Live(1, 6, ClientFields(), 0, BUDGET)
    live.routed.dispatched(11)
    live.take((p0, d0))
    live.since_s = 4.0
    why = late(live, now_s=25.0)
    assert (why.code, why.http_status) == ("deadline_exceeded", 504)
    assert why.detail == (
        "no result within 20 s: waiting since 21.0 s for decode's first token or result, or a "
        "refusal by prefill (attempt 1, prefill p0:1, decode d0:1)"
    )
