"""The production router core by numbers: what it decides, and which rows it takes."""

from __future__ import annotations

import pytest

from pdcore.fsm.routed import Leg
from pdcore.fsm.states import RoutedState
from pdcore.router.events import ClientLeft, LegAnswered, LegLost, StreamBegan, StreamEnded
from pdcore.sim.router_steps import GRACE_S, TIMEOUT_S, RouterSteps, freeze


@pytest.fixture
def steps() -> RouterSteps:
    return RouterSteps(2)


def test_the_request_is_dispatched_at_once(steps: RouterSteps) -> None:
    assert steps.start.dispatched == ((1, False),)
    assert steps.start.rows == ("routed request: row Received --dispatched--> Dispatched",)
    assert steps.state(steps.start.core) is RoutedState.DISPATCHED
    assert sorted(steps.loads(steps.start.core)) == [0, 0, 1, 1]


def test_a_stream_is_one_answer_and_one_end(steps: RouterSteps) -> None:
    began = steps.step(steps.start.core, StreamBegan(1, 1), 0.0)
    assert began.answers == ((False, None),)
    ended = steps.step(began.core, StreamEnded(1, 1), 0.0)
    assert (ended.ends, ended.dropped) == ((False,), (1,))
    assert steps.state(ended.core) is None
    assert steps.loads(ended.core) == [0, 0, 0, 0]


def test_a_lost_attempt_is_cancelled_and_replaced_elsewhere(steps: RouterSteps) -> None:
    """D47b: the second attempt goes to another instance, the first is cancelled beside it."""
    lost = steps.step(steps.start.core, LegLost(1, 1, Leg.DECODE, False, "refused"), 0.0)
    assert lost.dispatched == ((2, False),)
    assert lost.cancels == ((1, Leg.PREFILL, False),)
    first, second = steps.places(lost.core)
    assert first[1] != second[1]
    assert steps.attempt(lost.core) == 2
    assert any("attempt_lost" in row for row in lost.rows)


def test_a_step_is_made_once_and_leaves_the_core_alone(steps: RouterSteps) -> None:
    gone = steps.step(steps.start.core, ClientLeft(1), 0.0)
    assert steps.step(steps.start.core, ClientLeft(1), 0.0) is gone
    assert steps.state(steps.start.core) is RoutedState.DISPATCHED
    assert len(gone.cancels) == 2


def test_an_answered_cancel_is_forgotten(steps: RouterSteps) -> None:
    gone = steps.step(steps.start.core, ClientLeft(1), 0.0)
    once = steps.answered(gone.core, 1, Leg.PREFILL, 0.0)
    again = steps.answered(once.core, 1, Leg.PREFILL, 0.0)
    assert once.core != gone.core
    assert steps.resent(gone.core) == {(1, Leg.PREFILL, False), (1, Leg.DECODE, False)}
    assert steps.resent(once.core) == {(1, Leg.DECODE, False)}
    assert again.core == once.core


def test_the_routers_own_deadline_answers(steps: RouterSteps) -> None:
    late = steps.expire(steps.start.core, TIMEOUT_S + GRACE_S)
    assert late.answers == ((True, None),)
    assert steps.expire(steps.start.core, TIMEOUT_S).answers == ()


def test_evicting_and_losing_the_fleet_go_by_instances(steps: RouterSteps) -> None:
    evicted = steps.evict(steps.start.core, Leg.PREFILL, 1, 0.0)
    assert evicted.cancels == ((1, Leg.DECODE, True),)
    nobody = steps.lose_fleet(steps.start.core)
    refused = steps.step(nobody.core, LegAnswered(1, 1, Leg.PREFILL, 503, ""), 0.0)
    assert refused.answers == ((True, Leg.PREFILL),)


def test_freezing_tells_apart_what_differs() -> None:
    assert freeze({"a": [1, 2], "b": {3}}) == freeze({"a": [1, 2], "b": {3}})
    assert freeze({"a": [1, 2]}) != freeze({"a": [2, 1]})


def test_the_answer_to_a_weaker_cancel_is_none_to_the_stronger_one(steps: RouterSteps) -> None:
    """Q5 RES: found by the simulated cluster; a lost stronger cancel was not sent again."""
    evicted = steps.evict(steps.start.core, Leg.PREFILL, 1, 0.0)
    assert steps.resent(evicted.core) == {(1, Leg.DECODE, True)}
    gone = steps.step(evicted.core, ClientLeft(1), 0.0)
    late = steps.answered(gone.core, 1, Leg.DECODE, 0.0, unless_received=True)
    assert (1, Leg.DECODE, False) in steps.resent(late.core)
