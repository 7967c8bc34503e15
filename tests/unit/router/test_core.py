"""The router's core: who answers, who is cancelled, what counts (architecture, section 10).

Time and randomness are the test's; the last test is a state machine over any order of
anything.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pdcore.errors import InvalidRequest, Overloaded, RoomInUse
from pdcore.fsm.routed import Leg
from pdcore.fsm.states import RoutedState
from pdcore.router.core import RouterCore, RouterLimits
from pdcore.router.events import (
    Answer,
    CancelAnswered,
    ClientLeft,
    Dispatch,
    DropLegs,
    EndStream,
    InstanceEvicted,
    LegAnswered,
    LegLost,
    RouterEffect,
    StreamBegan,
    StreamEnded,
)
from pdcore.router.fleet import Fleet, Health, Report
from pdcore.router.limits import OnPrefillLoss
from pdcore.router.outbox import SendCancel
from pdcore.router.policies import ClientFields, parse_targets
from pdcore.types import Role

P, D = Leg.PREFILL, Leg.DECODE


class Router:
    """A core whose instances are up, with its effects sorted by kind."""

    def __init__(self, num_prefill: int = 1, num_decode: int = 1, **limits: Any) -> None:
        prefills = [f"p{i}:1" for i in range(num_prefill)]
        decodes = [f"d{i}:1" for i in range(num_decode)]
        self.fleet = Fleet(*parse_targets(prefills, decodes))
        for _, member in self.fleet.members():
            self.fleet.report(member, Report(True, "Up", dp_size=4))
        values = {"request_timeout_s": 100.0, "grace_s": 5.0, **limits}
        self.core = RouterCore(self.fleet, RouterLimits(**values), random.Random(1))
        self.now_s = 0.0
        self.effects: list[RouterEffect] = []

    def submit(self, **fields: Any) -> tuple[int, Dispatch]:
        ticket = self.core.submit(ClientFields(**fields), self.now_s, 1000.0 + self.now_s)
        self.poll()
        return ticket, self.of(Dispatch)[-1]

    def poll(self) -> None:
        self.effects.extend(self.core.poll_effects())

    def event(self, event: Any) -> None:
        self.core.handle_event(event, self.now_s)
        self.poll()

    def at(self, now_s: float) -> None:
        self.now_s = now_s
        self.core.handle_timeout(now_s)
        self.poll()

    def of(self, kind: type[Any]) -> list[Any]:
        return [e for e in self.effects if type(e) is kind]

    def cancels(self) -> list[tuple[Leg, int, bool]]:
        return [(e.key.leg, e.key.attempt, e.unless_received) for e in self.of(SendCancel)]


# --- dispatch -------------------------------------------------------------------------------


def test_both_legs_get_one_attempt_with_everything_they_need() -> None:
    """R31, R32, rule 8: room, bootstrap, instances, dp rank, absolute and remaining time."""
    router = Router()
    router.now_s = 3.0
    _, dispatch = router.submit(room=6, timeout_s=10.0)
    assert (dispatch.prefill.target.netloc, dispatch.decode.target.netloc) == ("p0:1", "d0:1")
    assert dispatch.remaining_s == 10.0
    assert dispatch.added == {
        "bootstrap_room": 6,
        "attempt": dispatch.attempt,
        "bootstrap_host": "p0",
        "bootstrap_port": 18800,
        "prefill_instance": "p0:1",
        "decode_instance": "d0:1",
        "expires_at_s": 1013.0,
        "remaining_s": 10.0,
        # Of the room alone: a room that comes again finds the rank that had it.
        "disagg_prefill_dp_rank": 0,
        "replaces": None,
    }
    assert router.core.poll_deadline() == 18.0, "later than the legs' (DLR)"


def test_every_dp_rank_of_every_prefill_instance_gets_its_share() -> None:
    """D21. Room modulo instances, then room modulo ranks, would leave half of them idle."""
    router = Router(num_prefill=2)
    used: Counter[tuple[str, object]] = Counter()
    for room in range(1, 801):
        ticket, dispatch = router.submit(room=room)
        used[dispatch.prefill.target.netloc, dispatch.added["disagg_prefill_dp_rank"]] += 1
        router.event(ClientLeft(ticket))
    assert used.keys() == {(f"p{i}:1", rank) for i in range(2) for rank in range(4)}
    assert min(used.values()) > 80


def test_rooms_and_attempts_are_fresh_and_a_client_cannot_have_more_time() -> None:
    router = Router()
    dispatches = [router.submit(timeout_s=1e6)[1] for _ in range(50)]
    assert len({d.attempt for d in dispatches}) == 50
    assert len({d.added["bootstrap_room"] for d in dispatches}) == 50
    assert {d.remaining_s for d in dispatches} == {100.0}


def test_only_instances_that_are_up_get_requests() -> None:
    """D47b: health-aware selection."""
    router = Router(num_prefill=2, num_decode=2)
    router.fleet.mark_down(router.fleet.prefills[1], "gone")
    used = {
        (d.prefill.target.netloc, d.decode.target.netloc)
        for d in (router.submit(room=room)[1] for room in range(1, 20))
    }
    assert used == {("p0:1", "d0:1"), ("p0:1", "d1:1")}


def test_without_instances_the_answer_is_503() -> None:
    """R9."""
    router = Router()
    router.fleet.mark_down(router.fleet.decodes[0], "cannot connect")
    router.core.submit(ClientFields(), 0.0, 0.0)
    router.poll()
    (answer,) = router.of(Answer)
    assert answer.failure.http_status == 503
    assert "d0:1: cannot connect" in answer.failure.detail
    assert router.of(Dispatch) == []
    assert router.core.snapshot()["in_flight"] == 0


def test_what_a_client_asks_for_must_be_configured() -> None:
    """D41, D21; a request that was refused leaves nothing behind."""
    router = Router(num_prefill=2)
    for fields in ({"bootstrap_host": "evil"}, {"bootstrap_port": 1}, {"dp_rank": 4}):
        with pytest.raises(InvalidRequest):
            router.core.submit(ClientFields(room=5, **fields), 0.0, 0.0)
    for room in range(1, 9):
        _, dispatch = router.submit(room=room, bootstrap_host="p1", dp_rank=3)
        assert dispatch.added["bootstrap_host"] == "p1"
        assert dispatch.added["disagg_prefill_dp_rank"] == 3
    assert router.core.snapshot()["in_flight"] == 8


def test_the_number_of_requests_in_flight_is_bounded() -> None:
    """D60: 429."""
    router = Router(max_in_flight=1)
    ticket, _ = router.submit()
    with pytest.raises(Overloaded):
        router.submit()
    router.event(ClientLeft(ticket))
    router.submit()


# --- who answers (D10, D11) -------------------------------------------------------------------


def first_answer(make: Callable[[], Any], events: Callable[[int, int], list[Any]]) -> Answer | None:
    """The first answer while these events come in, None if none of them decided."""
    router = make()
    ticket, dispatch = router.submit(room=5)
    for event in events(ticket, dispatch.attempt):
        router.event(event)
        if found := router.of(Answer):
            return found[0]
    return None


class Gathering(Router):
    """Mutant: the seed posts to both and waits for both; prefill's answer is discarded."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: dict[Leg, Any] = {}

    def event(self, event: Any) -> None:
        if isinstance(event, LegAnswered):
            self.waiting[event.leg] = event
            if len(self.waiting) == 2:
                super().event(self.waiting[D])
        else:
            super().event(event)


def check_a_prefill_refusal_is_answered(make: Callable[[], Any]) -> None:
    answer = first_answer(make, lambda t, a: [LegAnswered(t, a, P, 413)])
    assert answer is not None, "the refusal was withheld"
    assert (answer.leg, answer.failure is not None) == (P, True)


def check_a_decode_failure_is_answered(make: Callable[[], Any]) -> None:
    answer = first_answer(make, lambda t, a: [LegAnswered(t, a, D, 502)])
    assert answer is not None, "the failure was withheld"
    assert answer.leg is D


@pytest.mark.parametrize(
    "check", [check_a_prefill_refusal_is_answered, check_a_decode_failure_is_answered]
)
def test_the_first_leg_that_decides_is_the_answer(check: Callable[[Any], None]) -> None:
    """D10: prefill's 413 was dropped, and a fast decode failure waited for prefill."""
    check(Router)
    with pytest.raises(AssertionError, match="withheld"):
        check(Gathering)


def test_a_prefill_refusal_cancels_decode_unless_it_has_its_kv() -> None:
    """D11: nobody told decode, which waited 60 s with KV and slot pinned."""
    router = Router()
    ticket, dispatch = router.submit()
    router.event(LegAnswered(ticket, dispatch.attempt, P, 413))
    assert router.cancels() == [(D, dispatch.attempt, True)]
    assert router.of(DropLegs) == [DropLegs(ticket, dispatch.attempt)]


def test_a_decode_failure_before_the_first_token_cancels_prefill() -> None:
    """Q5 CD."""
    router = Router()
    ticket, dispatch = router.submit()
    router.event(LegAnswered(ticket, dispatch.attempt, P, 202))
    assert router.of(Answer) == []
    router.event(LegAnswered(ticket, dispatch.attempt, D, 502))
    assert router.cancels() == [(P, dispatch.attempt, False)]


def test_decodes_result_is_the_answer() -> None:
    router = Router()
    ticket, dispatch = router.submit()
    router.event(LegAnswered(ticket, dispatch.attempt, D, 200))
    assert router.of(Answer) == [Answer(ticket, dispatch.attempt, None, D)]
    assert router.cancels() == []


def test_a_stream_is_answered_at_its_beginning_and_ended_once() -> None:
    router = Router()
    ticket, dispatch = router.submit()
    router.event(StreamBegan(ticket, dispatch.attempt))
    assert router.of(Answer) == [Answer(ticket, dispatch.attempt, None, None)]
    router.event(StreamEnded(ticket, dispatch.attempt))
    router.event(StreamEnded(ticket, dispatch.attempt))
    assert router.of(EndStream) == [EndStream(ticket, None)]
    assert router.core.counters["done"] == 1


def test_a_broken_connection_to_prefill_is_not_its_failure() -> None:
    """Q5 UNK: the KV may already be there; decode decides."""
    router = Router()
    ticket, dispatch = router.submit()
    router.event(LegLost(ticket, dispatch.attempt, P, True, "reset"))
    assert router.of(Answer) == []
    router.event(LegAnswered(ticket, dispatch.attempt, D, 200))
    assert router.of(Answer)[0].failure is None


def test_after_the_first_token_prefill_changes_nothing() -> None:
    """Q5 IGN."""
    for event in (
        LegAnswered(0, 0, P, 500),
        LegLost(0, 0, P, True, "x"),
        LegLost(0, 0, P, False, "x"),
    ):
        router = Router()
        ticket, dispatch = router.submit()
        router.event(StreamBegan(ticket, dispatch.attempt))
        router.event(event._replace(ticket=ticket, attempt=dispatch.attempt))
        assert router.of(EndStream) == []
        assert router.cancels() == []
        router.event(StreamEnded(ticket, dispatch.attempt))
        assert router.of(EndStream) == [EndStream(ticket, None)]


def test_a_lost_decode_ends_the_request_and_cancels_both() -> None:
    router = Router()
    ticket, dispatch = router.submit()
    router.event(LegLost(ticket, dispatch.attempt, D, True, "reset"))
    assert router.of(Answer)[0].failure.http_status == 503
    assert router.cancels() == [(P, dispatch.attempt, False), (D, dispatch.attempt, False)]


def test_decode_lost_in_mid_stream_ends_the_stream_with_its_failure() -> None:
    router = Router()
    ticket, dispatch = router.submit()
    router.event(StreamBegan(ticket, dispatch.attempt))
    router.event(LegLost(ticket, dispatch.attempt, D, True, "reset"))
    assert router.of(EndStream)[0].failure.http_status == 503
    assert router.cancels() == [(D, dispatch.attempt, False)]


def test_a_client_that_is_gone_cancels_both_legs() -> None:
    """Q5 CC, D47a."""
    for begin in (False, True):
        router = Router()
        ticket, dispatch = router.submit()
        if begin:
            router.event(StreamBegan(ticket, dispatch.attempt))
        router.event(ClientLeft(ticket))
        assert router.cancels() == [(P, dispatch.attempt, False), (D, dispatch.attempt, False)]
        assert router.of(DropLegs) == [DropLegs(ticket, dispatch.attempt)]
        router.event(ClientLeft(ticket))
        assert router.core.counters["late"] == 1


def test_the_routers_own_deadline_is_the_last_resort() -> None:
    """Q5 DLR: all answers were lost."""
    router = Router()
    ticket, dispatch = router.submit(timeout_s=10.0)
    router.at(14.9)
    assert router.of(Answer) == []
    router.at(15.0)
    assert router.of(Answer)[0].failure.http_status == 504
    assert [leg for leg, _, _ in router.cancels()] == [P, D]
    router.event(LegAnswered(ticket, dispatch.attempt, D, 200))
    assert len(router.of(Answer)) == 1


def test_a_deadline_in_mid_stream_ends_it_with_an_error() -> None:
    router = Router()
    ticket, dispatch = router.submit(timeout_s=10.0)
    router.event(StreamBegan(ticket, dispatch.attempt))
    router.at(15.0)
    assert router.of(EndStream)[0].failure.http_status == 504


# --- cancels ----------------------------------------------------------------------------------


def test_a_cancel_is_resent_until_the_leg_knows_of_it() -> None:
    """Q5 RES: a cancel that overtakes its request must not vanish."""
    router = Router()
    ticket, dispatch = router.submit()
    router.event(LegAnswered(ticket, dispatch.attempt, D, 502))
    (first,) = router.of(SendCancel)
    router.event(CancelAnswered(first.key, False))
    assert router.core.poll_deadline() == 0.05
    router.at(0.05)
    assert router.of(SendCancel) == [first, first]
    router.event(CancelAnswered(first.key, True))
    router.at(50.0)
    assert len(router.of(SendCancel)) == 2
    assert router.core.poll_deadline() is None
    assert router.core.snapshot()["cancels"] == 0


def test_the_answer_to_a_weaker_cancel_is_none_to_the_stronger_one() -> None:
    """Prefill was evicted: decode was asked to give up unless it has its KV, and has it. Then
    the client leaves, and what decode is told then gets lost: it would go on for nobody."""
    router = Router()
    ticket, first = router.submit()
    router.event(InstanceEvicted(first.prefill, "gone"))
    router.event(ClientLeft(ticket))
    weak, strong = [e for e in router.of(SendCancel) if e.key.leg is D]
    assert (weak.unless_received, strong.unless_received) == (True, False)
    router.event(CancelAnswered(weak.key, True, True))
    router.event(CancelAnswered(strong.key, None))
    router.at(1.0)
    assert router.of(SendCancel)[-1] == strong, "asked again"


@pytest.mark.parametrize("unknown_s", [30.0, 1e9])
def test_requests_that_both_legs_refuse_leave_no_cancels(unknown_s: float) -> None:
    """D11: each left one cancel that was resent until the request's deadline; the mutant is
    a router that never gives up."""

    def check() -> None:
        router = Router(request_timeout_s=1800.0, cancel_unknown_s=unknown_s)
        for _ in range(20):
            ticket, dispatch = router.submit()
            router.event(LegAnswered(ticket, dispatch.attempt, D, 413))
            router.event(LegAnswered(ticket, dispatch.attempt, P, 413))
        assert router.core.snapshot()["cancels"] == 20
        while router.now_s < 60.0 and (cancels := router.of(SendCancel)):
            router.effects.clear()
            for cancel in cancels:
                router.event(CancelAnswered(cancel.key, False))
            router.at(router.core.poll_deadline() or router.now_s)
        assert router.core.snapshot()["cancels"] == 0, "cancels of what nobody knows are kept"

    if unknown_s == 30.0:
        check()
    else:
        with pytest.raises(AssertionError, match="are kept"):
            check()


# --- rooms ------------------------------------------------------------------------------------


def test_a_live_room_is_a_409_unless_its_attempt_is_replaced() -> None:
    """D7."""
    router = Router()
    ticket, dispatch = router.submit(room=5)
    for replaces in (None, dispatch.attempt + 1):
        with pytest.raises(RoomInUse):
            router.submit(room=5, replaces=replaces)
    second, again = router.submit(room=5, replaces=dispatch.attempt)
    assert again.added["replaces"] == dispatch.attempt
    assert router.of(Answer) == [router.of(Answer)[0]]
    assert (router.of(Answer)[0].ticket, router.of(Answer)[0].failure.http_status) == (ticket, 409)
    assert [leg for leg, attempt, _ in router.cancels() if attempt == dispatch.attempt] == [P, D]
    router.event(LegAnswered(second, again.attempt, D, 200))
    assert router.of(Answer)[-1] == Answer(second, again.attempt, None, D)


def test_a_retry_after_a_failure_names_what_it_replaces_by_itself() -> None:
    """R31: a client's room is kept for idempotent retry; the former attempt may still drain."""
    router = Router()
    ticket, dispatch = router.submit(room=5)
    router.event(ClientLeft(ticket))
    _, again = router.submit(room=5)
    assert again.added["replaces"] == dispatch.attempt
    assert again.attempt != dispatch.attempt


def test_d7_a_request_that_was_never_dispatched_does_not_forget_what_its_room_lost() -> None:
    """D7: lost, asked again while no instance is ready (503), asked once more: the dispatch
    still names the attempt that may drain somewhere, or that instance would answer 409."""
    router = Router()
    ticket, dispatch = router.submit(room=5)
    router.event(ClientLeft(ticket))
    decode = router.fleet.decodes[0]
    router.fleet.mark_down(decode, "no answer")
    router.core.submit(ClientFields(room=5), 1.0, 1001.0)
    router.poll()
    refused = router.of(Answer)[-1].failure
    assert refused is not None
    assert refused.code == "unavailable"
    router.fleet.report(decode, Report(True, "Up", dp_size=4))
    assert router.submit(room=5)[1].added["replaces"] == dispatch.attempt


def test_a_room_that_was_served_is_known_to_be_finished() -> None:
    """D7: its result is given again or its room refused (:mod:`pdcore.router.rooms`); rooms of
    the router's own making are forgotten."""
    router = Router(result_ttl_s=10.0)
    for fields in ({"room": 5}, {}):
        ticket, dispatch = router.submit(**fields)
        router.event(LegAnswered(ticket, dispatch.attempt, D, 200))
    assert router.core.rooms.snapshot()["results"] == 1
    with pytest.raises(RoomInUse):
        router.core.rooms.recall(5, b"digest", 9.0)
    assert router.core.rooms.recall(5, b"digest", 10.0) is None
    assert router.submit(room=5)[1].added["replaces"] is None


# --- another attempt --------------------------------------------------------------------------


def refused(ticket: int, attempt: int, leg: Leg) -> LegLost:
    return LegLost(ticket, attempt, leg, False, "cannot connect")


def test_a_refused_connection_goes_to_another_instance() -> None:
    """D47b: no retry at all in the seed. The new attempt names the old one, which is
    cancelled at the instance that got it."""
    for leg in Leg:
        router = Router(num_prefill=2, num_decode=2)
        ticket, first = router.submit(room=5)
        router.event(refused(ticket, first.attempt, leg))
        second = router.of(Dispatch)[-1]
        assert second.added["replaces"] == first.attempt
        assert second.added["attempt"] == second.attempt != first.attempt
        former = first.prefill if leg is P else first.decode
        assert former not in (second.prefill, second.decode)
        assert former.health is Health.DOWN
        other = D if leg is P else P
        assert router.cancels() == [(other, first.attempt, False)]
        assert router.of(DropLegs) == [DropLegs(ticket, first.attempt)]
        router.event(LegAnswered(ticket, first.attempt, D, 200))
        assert router.of(Answer) == [], "only the current attempt's outcomes count"
        router.event(LegAnswered(ticket, second.attempt, D, 200))
        assert router.of(Answer) == [Answer(ticket, second.attempt, None, D)]
        assert all(member.num_live == 0 for _, member in router.fleet.members())


def test_for_want_of_a_connection_nobody_is_down() -> None:
    """2048 requests at one decode took every connection to it; the next one found none within
    5 s, and the instance that served them all got no request any more."""
    router = Router(num_decode=2)
    ticket, first = router.submit()
    router.event(LegLost(ticket, first.attempt, D, False, "all connections are busy", True))
    assert first.decode.health is Health.UP
    assert router.of(Dispatch)[-1].decode is not first.decode


def test_a_busy_instance_is_tried_elsewhere_once() -> None:
    router = Router(num_decode=3, max_attempts=2)
    ticket, first = router.submit()
    router.event(LegAnswered(ticket, first.attempt, D, 503))
    second = router.of(Dispatch)[-1]
    assert second.attempt != first.attempt
    router.event(LegAnswered(ticket, second.attempt, D, 503))
    assert len(router.of(Dispatch)) == 2
    assert router.of(Answer)[0].leg is D


@pytest.mark.parametrize("code", ["peer_lost", "prefill_failed", "transfer_failed", "unreachable"])
def test_a_prefill_that_is_lost_before_the_first_token_is_replaced(code: str) -> None:
    """Decode reports it; the new attempt goes to another prefill, names the old one, and
    both legs of the old one but the one that answered are cancelled and drain beside it."""
    router = Router(num_prefill=2)
    ticket, first = router.submit()
    router.event(LegAnswered(ticket, first.attempt, P, 202))
    router.event(LegLost(ticket, first.attempt, P, True, "reset"))
    assert len(router.of(Dispatch)) == 1, "a broken connection alone decides nothing (Q5 UNK)"
    router.event(LegAnswered(ticket, first.attempt, D, 503, code))
    second = router.of(Dispatch)[-1]
    assert second.prefill is not first.prefill
    assert second.added["replaces"] == first.attempt
    assert router.cancels() == [(P, first.attempt, False)]
    assert router.of(Answer) == []
    router.event(LegAnswered(ticket, second.attempt, D, 200))
    assert router.of(Answer) == [Answer(ticket, second.attempt, None, D)]


def test_on_prefill_loss_fail_answers_the_failure() -> None:
    router = Router(num_prefill=2, on_prefill_loss=OnPrefillLoss.FAIL)
    ticket, first = router.submit()
    router.event(LegAnswered(ticket, first.attempt, D, 503, "peer_lost"))
    assert router.of(Answer)[0].leg is D
    assert len(router.of(Dispatch)) == 1


def test_a_decode_that_loses_its_own_worker_is_replaced_under_every_policy() -> None:
    """Decode is lost and nothing streamed; prefill is not to blame."""
    router = Router(num_decode=2, on_prefill_loss=OnPrefillLoss.FAIL)
    ticket, first = router.submit()
    router.event(LegAnswered(ticket, first.attempt, D, 503, "worker_lost"))
    second = router.of(Dispatch)[-1]
    assert second.decode is not first.decode
    assert router.of(Answer) == []


def test_on_prefill_loss_local_prefill_decode_computes_the_prompt() -> None:
    """One leg only, at the decode that reported the loss; it names no bootstrap server, and
    nothing is ever cancelled at a prefill that has no part in it."""
    router = Router(num_prefill=2, num_decode=2, on_prefill_loss=OnPrefillLoss.LOCAL_PREFILL)
    ticket, first = router.submit(bootstrap_host="p1")
    router.event(LegAnswered(ticket, first.attempt, D, 503, "peer_lost"))
    second = router.of(Dispatch)[-1]
    assert (second.prefill, second.decode) == (None, first.decode)
    assert second.added["local_prefill"] is True
    assert second.added["replaces"] == first.attempt
    for name in ("bootstrap_host", "bootstrap_port", "prefill_instance"):
        assert second.added[name] is None
    assert [m.num_live for _, m in router.fleet.members()].count(1) == 1
    router.event(ClientLeft(ticket))
    assert router.cancels() == [(P, first.attempt, False), (D, second.attempt, False)]
    assert {m.num_live for _, m in router.fleet.members()} == {0}


def test_a_local_prefill_that_is_lost_goes_to_a_pair_again() -> None:
    """peer_lost may have been that decode's own connection."""
    router = Router(num_decode=2, on_prefill_loss=OnPrefillLoss.LOCAL_PREFILL, retry_initial_s=0.5)
    ticket, first = router.submit()
    router.event(LegAnswered(ticket, first.attempt, D, 503, "peer_lost"))
    local = router.of(Dispatch)[-1]
    router.event(LegAnswered(ticket, local.attempt, D, 503, "unavailable"))
    router.at(0.5)
    third = router.of(Dispatch)[-1]
    assert third.prefill is first.prefill
    assert third.decode is not local.decode


def test_local_prefill_also_where_no_other_prefill_takes_the_connection() -> None:
    router = Router(on_prefill_loss=OnPrefillLoss.LOCAL_PREFILL)
    ticket, first = router.submit()
    router.event(refused(ticket, first.attempt, P))
    assert router.of(Dispatch)[-1].prefill is None
    assert router.of(Answer) == []
    # Decode never got the first attempt's KV: that one is cancelled there.
    assert router.cancels() == [(D, first.attempt, False)]


def test_a_local_prefill_may_be_after_a_pause() -> None:
    router = Router(num_decode=2, on_prefill_loss=OnPrefillLoss.LOCAL_PREFILL, retry_initial_s=0.5)
    ticket, first = router.submit()
    router.event(LegLost(ticket, first.attempt, D, True, "reset"))
    second = router.of(Dispatch)[-1]
    router.event(LegAnswered(ticket, second.attempt, D, 502, "prefill_failed"))
    assert len(router.of(Dispatch)) == 2
    router.at(0.5)
    assert router.of(Dispatch)[-1].prefill is None


def test_a_lost_decode_is_replaced_if_nothing_was_streamed() -> None:
    """It may be alive: it is cancelled, and so is prefill."""
    router = Router(num_decode=2)
    ticket, first = router.submit()
    router.event(LegLost(ticket, first.attempt, D, True, "reset"))
    second = router.of(Dispatch)[-1]
    assert second.decode is not first.decode
    assert router.cancels() == [(P, first.attempt, False), (D, first.attempt, False)]
    router.event(StreamBegan(ticket, second.attempt))
    router.event(LegLost(ticket, second.attempt, D, True, "reset"))
    assert len(router.of(Dispatch)) == 2, "a token was sent"
    assert router.of(EndStream)[0].failure.http_status == 503


def third_attempt() -> tuple[Router, int, list[Dispatch]]:
    """A request whose first two attempts were lost; it pauses."""
    router = Router(num_prefill=3, num_decode=3, max_attempts=3, retry_initial_s=0.5)
    ticket, _ = router.submit(timeout_s=10.0)
    for _ in range(2):
        attempt = router.of(Dispatch)[-1].attempt
        router.event(LegAnswered(ticket, attempt, D, 502, "transfer_failed"))
    assert len(router.of(Dispatch)) == 2
    assert sum(m.num_live for _, m in router.fleet.members()) == 0, "the weight is given back"
    return router, ticket, router.of(Dispatch)


def test_the_third_attempt_waits_and_there_is_no_fourth() -> None:
    router, ticket, (first, second) = third_attempt()
    assert router.core.poll_deadline() == 0.5
    router.at(0.4)
    assert len(router.of(Dispatch)) == 2
    router.at(0.5)
    third = router.of(Dispatch)[-1]
    assert third.added["replaces"] == second.attempt
    assert third.remaining_s == 9.5, "the deadline is the request's, not the attempt's"
    assert len({d.prefill.target.netloc for d in (first, second, third)}) == 3
    router.event(LegAnswered(ticket, third.attempt, D, 502, "transfer_failed"))
    assert len(router.of(Dispatch)) == 3
    assert router.of(Answer) == [Answer(ticket, third.attempt, router.of(Answer)[0].failure, D)]


@pytest.mark.parametrize("leg", [P, D])
@pytest.mark.parametrize("max_attempts", [3, 4])
def test_an_attempt_that_meets_one_of_ours_is_no_conflict_of_the_clients(
    leg: Leg, max_attempts: int
) -> None:
    """The third attempt is back at the instance of the first one, which has not ended it yet:
    replaces names the second. The client would have been told to choose another room."""
    router = Router(num_prefill=2, num_decode=2, max_attempts=max_attempts)
    ticket, first = router.submit()
    router.event(LegAnswered(ticket, first.attempt, D, 502, "transfer_failed"))
    second = router.of(Dispatch)[-1]
    router.event(LegAnswered(ticket, second.attempt, D, 502, "transfer_failed"))
    router.at(1.0)
    third = router.of(Dispatch)[-1]
    assert third.prefill is first.prefill
    router.event(LegAnswered(ticket, third.attempt, leg, 409, "room_in_use"))
    if max_attempts == 4:
        router.at(3.0)
        assert len(router.of(Dispatch)) == 4
        return
    (answer,) = router.of(Answer)
    assert (answer.failure.http_status, answer.leg) == (503, None)
    assert "still ends an earlier attempt" in answer.failure.detail


def test_a_room_that_is_in_use_at_the_first_attempt_is_the_clients_conflict() -> None:
    """By another router, perhaps."""
    router = Router(num_prefill=2, num_decode=2)
    ticket, first = router.submit()
    router.event(LegAnswered(ticket, first.attempt, P, 409, "room_in_use"))
    assert router.of(Answer)[0].failure.http_status == 409


def test_a_pause_that_lasts_beyond_the_deadline_ends_in_the_loss() -> None:
    """A stopped router goes on after the deadline: no attempt goes out that has no time."""
    router, ticket, (_, second) = third_attempt()
    router.at(12.0)
    assert len(router.of(Dispatch)) == 2
    (answer,) = router.of(Answer)
    assert (answer.ticket, answer.attempt, answer.leg) == (ticket, second.attempt, D)


def test_events_of_the_lost_attempt_change_nothing_during_the_pause() -> None:
    router, ticket, (_, second) = third_attempt()
    before = list(router.effects)
    for event in (
        LegAnswered(ticket, second.attempt, P, 503),
        LegLost(ticket, second.attempt, D, False, "refused"),
        StreamBegan(ticket, second.attempt),
        LegAnswered(ticket, second.attempt, D, 200),
    ):
        router.event(event)
    assert router.effects == before
    assert all(member.health is Health.UP for _, member in router.fleet.members())


def test_a_client_that_leaves_during_the_pause_ends_it() -> None:
    router, ticket, _ = third_attempt()
    num_cancels = len(router.cancels())
    router.event(ClientLeft(ticket))
    router.at(5.0)
    assert len(router.of(Dispatch)) == 2
    assert len(router.cancels()) >= num_cancels
    assert router.core.snapshot()["in_flight"] == 0


def test_with_nobody_left_after_the_pause_the_loss_is_the_answer() -> None:
    """Verbatim: the answer of the attempt that was lost."""
    router, ticket, (_, second) = third_attempt()
    for _, member in router.fleet.members():
        router.fleet.mark_down(member, "gone")
    router.at(0.5)
    (answer,) = router.of(Answer)
    assert (answer.ticket, answer.attempt, answer.leg) == (ticket, second.attempt, D)


def test_nothing_is_tried_past_the_deadline() -> None:
    for now_s, attempts in ((9.9, 2), (10.0, 1)):
        router = Router(num_decode=2)
        ticket, first = router.submit(timeout_s=10.0)
        router.now_s = now_s
        router.event(LegAnswered(ticket, first.attempt, D, 503, "unavailable"))
        assert len(router.of(Dispatch)) == attempts


def test_a_mistake_is_not_tried_again_and_is_no_failure_of_ours() -> None:
    """A 400 repeats anywhere. In /stats it is refused: failed is what an operator looks at."""
    router = Router(num_prefill=2, num_decode=2)
    for leg, status in ((D, 400), (P, 413), (D, 404)):
        ticket, first = router.submit()
        router.event(LegAnswered(ticket, first.attempt, leg, status, "invalid_request"))
    ticket, first = router.submit()
    router.event(LegAnswered(ticket, first.attempt, D, 500, "internal"))
    assert len(router.of(Dispatch)) == 4
    counters = router.core.counters
    assert (counters["refused"], counters["failed"]) == (3, 1)


# --- evicted instances ----------------------------------------------------------------------


def test_an_evicted_decode_fails_exactly_what_it_had() -> None:
    """Its host is gone without a word, so that no connection breaks: a stream waited for its
    deadline."""
    router = Router(num_prefill=1, num_decode=2)
    waiting, at_0 = router.submit(room=2)
    streaming, also_0 = router.submit(room=6)
    others, at_1 = router.submit(room=4)
    assert at_0.decode is also_0.decode is not at_1.decode
    router.event(StreamBegan(streaming, also_0.attempt))
    router.fleet.report(at_0.decode, Report(False, is_reached=False))
    router.event(InstanceEvicted(at_0.decode, "no answer"))
    assert [e.ticket for e in router.of(EndStream)] == [streaming]
    again = router.of(Dispatch)[-1]
    assert (again.ticket, again.decode) == (waiting, at_1.decode)
    router.event(LegAnswered(others, at_1.attempt, D, 200))
    assert router.of(Answer)[-1].ticket == others


@pytest.mark.parametrize("has_kv", [True, False])
def test_an_evicted_prefill_may_have_done_its_half(has_kv: bool) -> None:
    """Q5 UNK: decode is asked to give up unless it has its KV, and its answer decides."""
    router = Router(num_prefill=2)
    ticket, first = router.submit()
    router.event(InstanceEvicted(first.prefill, "no answer to 10 probes"))
    router.event(InstanceEvicted(first.prefill, "no answer to 10 probes"))
    assert router.cancels() == [(D, first.attempt, True)]
    assert router.of(Answer) == []
    if has_kv:
        router.event(LegAnswered(ticket, first.attempt, D, 200))
        assert len(router.of(Dispatch)) == 1
    else:
        router.event(LegAnswered(ticket, first.attempt, D, 499, "cancelled"))
        assert router.of(Dispatch)[-1].prefill is not first.prefill


def test_a_request_whose_prefill_is_gone_is_a_503_where_there_is_no_other() -> None:
    router = Router()
    ticket, first = router.submit()
    router.event(InstanceEvicted(first.prefill, "no answer to 10 probes"))
    router.event(LegAnswered(ticket, first.attempt, D, 499, "cancelled"))
    (answer,) = router.of(Answer)
    assert (answer.leg, answer.failure.http_status) == (None, 503)
    assert "no answer to 10 probes" in answer.failure.detail


def test_without_another_instance_the_failure_is_the_answer() -> None:
    router = Router()
    ticket, first = router.submit()
    router.event(refused(ticket, first.attempt, P))
    assert router.of(Answer)[0].failure.http_status == 503
    assert router.cancels() == [(D, first.attempt, True)]


def test_nothing_is_retried_once_the_response_has_begun() -> None:
    router = Router(num_prefill=2, num_decode=2)
    ticket, first = router.submit()
    router.event(StreamBegan(ticket, first.attempt))
    router.event(LegAnswered(ticket, first.attempt, P, 503))
    assert len(router.of(Dispatch)) == 1


# --- anything in any order ----------------------------------------------------------------------


CODES = ["", "peer_lost", "prefill_failed", "cancelled", "internal", "out_of_memory"]


class AnyOrder(RuleBasedStateMachine):
    """Invariant 1 at the router: one answer, at most one end of a stream, books that balance.
    Public report group G: an instance's load is released once, whatever happens between."""

    def __init__(self) -> None:
        super().__init__()
        self.router = Router(2, 2, max_in_flight=4, max_attempts=3, retry_initial_s=0.5)
        self.tickets: list[int] = []
        self.attempts: list[int] = [1]

    @rule(room=st.sampled_from([1, 2, 3, None]), replace=st.booleans())
    def submit(self, room: int | None, replace: bool) -> None:
        fields = ClientFields(room=room, replaces=self.attempts[-1] if replace else None)
        try:
            ticket = self.router.core.submit(fields, self.router.now_s, self.router.now_s)
        except (RoomInUse, Overloaded):
            return
        self.tickets.append(ticket)
        self.router.poll()
        self.attempts = [e.attempt for e in self.router.of(Dispatch)] or [1]

    def pick(self, data: st.DataObject) -> tuple[int, int]:
        """An attempt with its ticket, mostly the latest one of it; sometimes a mixture."""
        sent = self.router.of(Dispatch)
        if not sent or data.draw(st.integers(0, 9)) == 0:
            ticket = data.draw(st.sampled_from([*self.tickets, 0]))
            return ticket, data.draw(st.sampled_from(self.attempts))
        latest = {e.ticket: e for e in sent}
        chosen = data.draw(st.sampled_from([*latest.values(), *sent]))
        return chosen.ticket, chosen.attempt

    @rule(
        data=st.data(),
        leg=st.sampled_from(Leg),
        kind=st.sampled_from(["answer", "lost", "refused", "began", "ended", "left"]),
        status=st.sampled_from([200, 202, 400, 413, 502, 503]),
        code=st.sampled_from(CODES),
    )
    def event(self, data: st.DataObject, leg: Leg, kind: str, status: int, code: str) -> None:
        ticket, attempt = self.pick(data)
        self.router.event(
            {
                "answer": LegAnswered(ticket, attempt, leg, status, code),
                "lost": LegLost(ticket, attempt, leg, True, "x"),
                "refused": LegLost(ticket, attempt, leg, False, "x"),
                "began": StreamBegan(ticket, attempt),
                "ended": StreamEnded(ticket, attempt),
                "left": ClientLeft(ticket),
            }[kind]
        )
        self.attempts = [e.attempt for e in self.router.of(Dispatch)] or [1]

    @rule(data=st.data(), code=st.sampled_from(["peer_lost", "transfer_failed"]))
    def lose(self, data: st.DataObject, code: str) -> None:
        """The latest attempt of a request is lost: the way to a pause."""
        sent = {e.ticket: e.attempt for e in self.router.of(Dispatch)}
        if sent:
            ticket, attempt = data.draw(st.sampled_from(sorted(sent.items())))
            self.router.event(LegAnswered(ticket, attempt, D, 503, code))
            self.attempts = [e.attempt for e in self.router.of(Dispatch)]

    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        _, member = data.draw(st.sampled_from(self.router.fleet.members()))
        self.router.fleet.report(member, Report(False, is_reached=False))
        self.router.event(InstanceEvicted(member, "no answer"))

    @rule(data=st.data(), known=st.sampled_from([True, False, None]))
    def cancel_answered(self, data: st.DataObject, known: bool | None) -> None:
        sent = self.router.of(SendCancel)
        if sent:
            self.router.event(CancelAnswered(data.draw(st.sampled_from(sent)).key, known))

    @rule(seconds=st.sampled_from([0.01, 1.0, 50.0, 200.0]))
    def pass_time(self, seconds: float) -> None:
        self.router.at(self.router.now_s + seconds)

    @rule(data=st.data(), is_up=st.booleans())
    def probe(self, data: st.DataObject, is_up: bool) -> None:
        _, member = data.draw(st.sampled_from(self.router.fleet.members()))
        self.router.fleet.report(member, Report(is_up))

    @invariant()
    def one_answer_and_one_end(self) -> None:
        for kind in (Answer, EndStream):
            tickets = [e.ticket for e in self.router.of(kind)]
            assert len(tickets) == len(set(tickets))
        attempts = [e.attempt for e in self.router.of(Dispatch)]
        assert len(attempts) == len(set(attempts))

    @invariant()
    def the_books_balance(self) -> None:
        lives = list(self.router.core._live.values())
        for role, member in self.router.fleet.members():
            holders = [r.prefill if role is Role.PREFILL else r.decode for r in lives]
            assert member.num_live == holders.count(member) >= 0
        for one in lives:
            is_paused = one.routed.state is RoutedState.RETRYING
            assert (one.decode is None) is is_paused
            assert one.prefill is None or not is_paused
        ended = ("done", "failed", "refused", "cancelled")
        counters = self.router.core.counters
        assert counters["received"] == len(lives) + sum(counters[name] for name in ended)

    @invariant()
    def attempts_are_few_and_follow_one_another(self) -> None:
        """Each names the one before it; none after an answer, or past the deadline."""
        former: dict[int, list[int]] = {}
        answered: set[int] = set()
        for effect in self.router.effects:
            if isinstance(effect, Answer):
                answered.add(effect.ticket)
            if not isinstance(effect, Dispatch):
                continue
            assert effect.ticket not in answered
            assert effect.remaining_s > 0
            attempts = former.setdefault(effect.ticket, [])
            assert not attempts or effect.added["replaces"] == attempts[-1]
            attempts.append(effect.attempt)
            assert len(attempts) <= 3

    @invariant()
    def there_is_always_a_next_deadline(self) -> None:
        if self.router.core.snapshot()["in_flight"]:
            assert self.router.core.poll_deadline() is not None

    def teardown(self) -> None:
        self.router.at(self.router.now_s + 1000.0)
        assert self.router.core.snapshot()["in_flight"] == 0
        answered = {e.ticket for e in self.router.of(Answer)}
        gone = self.router.core.counters["cancelled"]
        assert len(answered) + gone >= len(self.tickets)
        assert [m.num_live for _, m in self.router.fleet.members()] == [0] * 4


class AnyOrderLocally(AnyOrder):
    """The same where decode takes over what prefill lost."""

    def __init__(self) -> None:
        super().__init__()
        self.router = Router(
            2,
            2,
            max_in_flight=4,
            max_attempts=3,
            retry_initial_s=0.5,
            on_prefill_loss=OnPrefillLoss.LOCAL_PREFILL,
        )


TestAnyOrderLocally = AnyOrderLocally.TestCase
TestAnyOrderLocally.settings = settings(max_examples=30, stateful_step_count=30)
TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=40, stateful_step_count=30)
