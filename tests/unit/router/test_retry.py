"""Which losses are worth another attempt, and who is blamed for them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pdcore.errors import HTTP_STATUS, failure
from pdcore.fsm.routed import CancelLeg, DispatchLegs, Leg, LegFailure, Retry
from pdcore.router.events import LegAnswered, LegLost
from pdcore.router.fleet import Fleet, Member, Report
from pdcore.router.limits import OnPrefillLoss, RouterLimits
from pdcore.router.live import Budget, Live
from pdcore.router.policies import ClientFields, Target, choose_pair
from pdcore.router.retry import (
    PREFILL_EVICTED,
    choose,
    fallback_of,
    loss_of,
    named,
    needed_cancels,
    pair_after_pause,
    plan_retry,
)

P, D = Leg.PREFILL, Leg.DECODE
#: Codes that another instance may answer better, as decode reports them.
WORTH_IT = {
    "prefill_failed",
    "handshake_rejected",
    "transfer_failed",
    "corrupted",
    "bad_metadata",
    "peer_lost",
    "stale_route",
    "incompatible",
    "worker_lost",
    "unreachable",
    "unavailable",
    "shutting_down",
    "out_of_memory",
}


def fleet_of(num_prefill: int = 2, num_decode: int = 2) -> Fleet:
    fleet = Fleet(
        [Target(f"p{i}:1", f"p{i}", 1, 18800) for i in range(num_prefill)],
        [Target(f"d{i}:1", f"d{i}", 1) for i in range(num_decode)],
    )
    for _, member in fleet.members():
        fleet.report(member, Report(True, "Up", dp_size=2))
    return fleet


def live_in(fleet: Fleet, **fields: int) -> Live:
    live = Live(1, 5, ClientFields(**fields), 0, Budget.begin(10.0, 0.0, 1000.0))
    live.routed.dispatched(11)
    live.take((fleet.prefills[0], fleet.decodes[0]))
    return live


@pytest.mark.parametrize("code", sorted(HTTP_STATUS))
def test_only_what_another_instance_could_do_better_is_tried_again(code: str) -> None:
    """A mistake, a deadline, a cancel, the model's own error: they repeat anywhere."""
    loss = loss_of(LegAnswered(1, 11, D, HTTP_STATUS[code], code))
    assert (loss is not None) == (code in WORTH_IT)


@pytest.mark.parametrize("status", [400, 404, 409, 413, 429, 499, 500, 502, 504])
def test_an_error_without_a_known_code_is_tried_again_only_as_a_503(status: int) -> None:
    assert loss_of(LegAnswered(1, 11, D, status)) is None
    assert loss_of(LegAnswered(1, 11, P, status)) is None
    assert loss_of(LegAnswered(1, 11, D, 503)) is not None
    assert loss_of(LegAnswered(1, 11, P, 503)) is not None


def test_a_broken_connection_counts_for_decode_and_not_for_prefill() -> None:
    """Q5 UNK: decode decides, for the KV may be there. A refused one counts for both."""
    assert loss_of(LegLost(1, 11, P, True, "reset")) is None
    for event in (
        LegLost(1, 11, D, True, "reset"),
        LegLost(1, 11, D, False, "x"),
        LegLost(1, 11, P, False, "x"),
    ):
        loss = loss_of(event)
        assert loss is not None
        assert loss.avoid == (frozenset({event.leg}),)
        assert not loss.is_of_prefill


def test_a_decode_that_gives_up_for_an_evicted_prefill_has_not_its_kv() -> None:
    event = LegAnswered(1, 11, D, 499, "cancelled")
    assert loss_of(event) is None
    assert loss_of(event, is_prefill_evicted=True) == PREFILL_EVICTED


@pytest.mark.parametrize(
    ("num_prefill", "num_decode", "pair"),
    [(2, 2, ("p1:1", "d1:1")), (2, 1, ("p1:1", "d0:1")), (1, 2, ("p0:1", "d1:1")), (1, 1, None)],
)
def test_a_lost_peer_may_be_either_so_both_are_avoided_where_that_can_be(
    num_prefill: int, num_decode: int, pair: tuple[str, str] | None
) -> None:
    """Decode says peer_lost of a prefill rank that is gone, or that it cannot reach."""
    fleet = fleet_of(num_prefill, num_decode)
    live = live_in(fleet)
    plan = plan_retry(
        fleet, live, loss_of(LegAnswered(1, 11, D, 503, "peer_lost")), RouterLimits(), 0.0
    )
    assert (plan and tuple(m.target.netloc for m in plan.pair)) == pair


@pytest.mark.parametrize("policy", list(OnPrefillLoss))
def test_an_old_route_is_nobody_s_fault_and_the_same_pair_serves_again(
    policy: OnPrefillLoss,
) -> None:
    """Decode asks for the route anew: the only pair there is will do, under every policy."""
    fleet = fleet_of(1, 1)
    loss = loss_of(LegAnswered(1, 11, D, 503, "stale_route"))
    plan = plan_retry(fleet, live_in(fleet), loss, RouterLimits(on_prefill_loss=policy), 0.0)
    assert plan is not None
    assert (plan.blamed, plan.delay_s) == ([], 0.0)
    assert tuple(m.target.netloc for m in plan.pair if m) == ("p0:1", "d0:1")


@pytest.mark.parametrize(
    ("num_prefill", "num_decode", "pair"),
    [(2, 2, ("p1:1", "d1:1")), (2, 1, ("p1:1", "d0:1")), (1, 2, ("p0:1", "d1:1")), (1, 1, None)],
)
def test_a_pair_that_does_not_fit_is_left_for_another_one(
    num_prefill: int, num_decode: int, pair: tuple[str, str] | None
) -> None:
    """D14: in a fleet of two layouts a request does not fail for the pair that was drawn."""
    fleet = fleet_of(num_prefill, num_decode)
    loss = loss_of(LegAnswered(1, 11, D, 502, "incompatible"))
    for policy in OnPrefillLoss:
        limits = RouterLimits(on_prefill_loss=policy)
        plan = plan_retry(fleet, live_in(fleet), loss, limits, 0.0)
        found = plan and tuple(m.target.netloc for m in plan.pair if m)
        assert found == (pair or (("d0:1",) if policy is OnPrefillLoss.LOCAL_PREFILL else None))


def test_the_bounds_of_another_attempt() -> None:
    """Never after max_attempts, past the deadline, or against the policy."""
    fleet = fleet_of()
    loss = loss_of(LegAnswered(1, 11, D, 502, "prefill_failed"))
    for limits, now_s, allowed in (
        (RouterLimits(), 9.9, True),
        (RouterLimits(), 10.0, False),
        (RouterLimits(max_attempts=1), 0.0, False),
        (RouterLimits(on_prefill_loss=OnPrefillLoss.FAIL), 0.0, False),
    ):
        assert (plan_retry(fleet, live_in(fleet), loss, limits, now_s) is not None) == allowed
    streaming = live_in(fleet)
    streaming.routed.first_token(LegFailure(11, failure("internal", "")))
    assert plan_retry(fleet, streaming, loss, RouterLimits(), 0.0) is None
    refused = loss_of(LegLost(1, 11, P, False, "refused"))
    fail = RouterLimits(on_prefill_loss=OnPrefillLoss.FAIL)
    assert plan_retry(fleet, live_in(fleet), refused, fail, 0.0) is not None, (
        "what was not accepted was not lost"
    )


def test_pauses_grow_from_the_third_attempt_on_and_have_a_maximum() -> None:
    """D20: a retry without an interval burned its 15 attempts in 26 ms."""
    limits = RouterLimits(retry_initial_s=0.1, retry_max_s=0.5)
    assert [limits.retry_delay_s(n) for n in (1, 2, 3, 4, 5, 500)] == [0, 0.1, 0.2, 0.4, 0.5, 0.5]


def test_who_lost_an_attempt_is_taken_again_only_where_nobody_else_is_left() -> None:
    fleet = fleet_of(3, 1)
    p0, p1, p2 = fleet.prefills
    live = live_in(fleet)
    loss = loss_of(LegAnswered(1, 11, D, 502, "prefill_failed"))
    first = plan_retry(fleet, live, loss, RouterLimits(max_attempts=9), 0.0)
    assert first is not None
    assert first.blamed == [p0]
    why = fallback_of(live, LegAnswered(1, 11, D, 502, "prefill_failed"))
    live.recovery.lose_attempt([p0], why, 0.0)
    live.take((p1, fleet.decodes[0]))
    second = plan_retry(fleet, live, loss, RouterLimits(max_attempts=9), 0.0)
    assert second is not None
    assert second.pair[0] is p2
    live.recovery.lose_attempt([p1], why, 0.0)
    fleet.mark_down(p2, "gone")
    back = pair_after_pause(fleet, live, 0.0)
    assert back is not None
    assert back[0] is p0
    fleet.mark_down(p0, "gone")
    assert pair_after_pause(fleet, live, 0.0) is None


def test_a_retry_goes_where_the_clients_wishes_can_be_met_and_raises_for_none() -> None:
    """D21, D41: an instance that came back with another port or fewer dp ranks raised out of
    the event that asked for the retry."""
    fleet = fleet_of(2, 1)
    fleet.report(fleet.prefills[1], Report(True, dp_size=1))
    loss = loss_of(LegAnswered(1, 11, D, 502, "prefill_failed"))
    assert plan_retry(fleet, live_in(fleet, dp_rank=1), loss, RouterLimits(), 0.0) is None
    live = live_in(fleet, bootstrap_port=18800)
    assert plan_retry(fleet, live, loss, RouterLimits(), 0.0) is not None
    for member in fleet.prefills:
        member.bootstrap_port = 1
    assert plan_retry(fleet, live, loss, RouterLimits(), 0.0) is None


def test_a_leg_that_is_over_is_not_cancelled() -> None:
    effects = [CancelLeg(P, 11), CancelLeg(D, 11), DispatchLegs(12, 11)]
    assert needed_cancels(LegLost(1, 11, D, True, "reset"), effects) == effects
    for event in (LegLost(1, 11, D, False, "refused"), LegAnswered(1, 11, D, 503)):
        assert needed_cancels(event, effects) == [effects[0], effects[2]]


def test_without_another_attempt_the_legs_own_answer_is_passed_on() -> None:
    """D47b: verbatim. A decode that gave up for us is not quoted: the client cancelled
    nothing."""
    fleet = fleet_of()
    live = live_in(fleet)
    quoted = fallback_of(live, LegAnswered(1, 11, D, 502, "prefill_failed"))
    assert (quoted.leg, quoted.attempt, quoted.failure.http_status) == (D, 11, 502)
    lost = fallback_of(live, LegLost(1, 11, D, True, "reset by peer"))
    assert lost.leg is None
    assert lost.failure.detail == "the decode instance is unavailable: reset by peer"
    live.recovery.evicted = "p0:1 gave no answer to 10 probes"
    gone = fallback_of(live, LegAnswered(1, 11, D, 499, "cancelled"))
    assert (gone.leg, gone.failure.http_status) == (None, 503)
    assert "p0:1 gave no answer" in gone.failure.detail


def test_only_instances_that_are_up_and_not_avoided_are_chosen() -> None:
    fleet = fleet_of(2, 2)
    p0, p1 = fleet.prefills
    assert named(fleet, ClientFields(bootstrap_host="p1"))[0] == [p1]
    assert choose(5, fleet.prefills, fleet.decodes) == (p1, fleet.decodes[1])
    assert choose(5, fleet.prefills, fleet.decodes, [p1]) == (p0, fleet.decodes[1])
    fleet.mark_down(p0, "gone")
    assert choose(5, fleet.prefills, fleet.decodes, [p1]) is None


def check_a_broken_pair_is_left_out(choose_one: Callable[..., object]) -> None:
    fleet = fleet_of(2, 2)
    (p0, p1), (d0, d1) = fleet.prefills, fleet.decodes
    assert choose(5, fleet.prefills, fleet.decodes) == (p1, d1)
    d1.refused = frozenset({p1.instance})
    assert choose_one(5, fleet.prefills, fleet.decodes) == (p1, d0)
    p1.refused = frozenset({d0.instance})
    assert choose_one(5, fleet.prefills, fleet.decodes) == (p0, d1), "either end may say so"
    for prefill in (p0, p1):
        prefill.refused = frozenset({d0.instance, d1.instance})
    assert choose_one(5, fleet.prefills, fleet.decodes) == (p1, d1), "its legs say why"


def test_a_broken_pair_is_left_out_while_both_of_its_instances_serve_others() -> None:
    """vllm PR #55471: one path is broken, nobody is ill."""
    check_a_broken_pair_is_left_out(choose)

    def mutant(room: int, prefills: list[Member], decodes: list[Member]) -> tuple[Member, Member]:
        i, k = choose_pair(room, len(prefills), len(decodes))
        return prefills[i], decodes[k]

    with pytest.raises(AssertionError):
        check_a_broken_pair_is_left_out(mutant)


def test_a_lost_attempt_is_replaced_by_a_fresh_one() -> None:
    live = live_in(fleet_of())
    live.routed.attempt_lost(LegFailure(11, failure("peer_lost", "gone")))
    assert live.routed.retried(Retry(11, 12)) == (DispatchLegs(12, 11),)
