"""Cutting a failing world down."""

from __future__ import annotations

from pdcore.sim.plan import Plan, make_plan
from pdcore.sim.shrink import replay_command, shrink


def test_what_is_not_needed_goes() -> None:
    plan = make_plan(2)
    tried: list[Plan] = []

    def fails(cut: Plan) -> bool:
        tried.append(cut)
        return {f.number for f in cut.faults} >= {1, 4} and {r.number for r in cut.requests} >= {
            3,
            30,
            31,
        }

    found = shrink(plan, fails)
    assert [f.number for f in found.plan.faults] == [1, 4]
    assert [r.number for r in found.plan.requests] == [3, 30, 31]
    assert found.num_tries == len(tried) < 100
    assert shrink(plan, fails).plan == found.plan


def test_a_world_that_fails_by_itself_is_left_empty() -> None:
    found = shrink(make_plan(2), lambda plan: True)
    assert not found.plan.faults
    assert not found.plan.requests


def test_the_budget_is_kept() -> None:
    num = 0

    def fails(plan: Plan) -> bool:
        nonlocal num
        num += 1
        return len(plan.requests) > 40

    found = shrink(make_plan(2), fails, max_tries=10)
    assert num == found.num_tries == 10
    assert len(found.plan.requests) > 40


def test_a_replay_command_names_what_is_left() -> None:
    plan = make_plan(2)
    assert replay_command(plan, plan) == "pdcore verify cluster --seed 2"
    cut = plan.only(faults=[1, 4], requests=[])
    assert replay_command(cut, plan, "free-on-abort") == (
        "pdcore verify cluster --seed 2 --only-faults 1,4 --only-requests none "
        "--mutant free-on-abort"
    )
