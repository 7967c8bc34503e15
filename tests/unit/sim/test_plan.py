"""Plans: data that follows from a seed, and can be cut down."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

from pdcore.sim.plan import (
    FAULT_KINDS,
    MIN_FAULTS,
    MIN_REQUESTS,
    STRUCK_EVERY,
    Request,
    make_plan,
    names,
)


def test_the_fixed_mix() -> None:
    """Issue 3.9: 50 requests and 5 faults at least; outputs of 1 to 8 tokens, half streamed."""
    kinds: Counter[str] = Counter()
    for seed in range(200):
        plan = make_plan(seed)
        assert len(plan.requests) >= MIN_REQUESTS >= 50
        assert len(plan.faults) >= MIN_FAULTS >= 5
        assert all(1 <= r.max_tokens <= 8 for r in plan.requests)
        streamed = sum(r.is_streamed for r in plan.requests)
        assert 0.4 < streamed / len(plan.requests) < 0.6
        assert min(plan.options.num_prefill, plan.options.num_decode) >= 2
        assert [r.number for r in plan.requests] == list(range(len(plan.requests)))
        kinds.update(f.kind for f in plan.faults)
    assert kinds.keys() == FAULT_KINDS.keys() | {"crash_writer"}


def test_some_worlds_kill_who_writes() -> None:
    """Rule 2, D32: only prefill writes, and its successor has its address while it still lands."""
    struck = 0
    for seed in range(210):
        plan = make_plan(seed)
        found = [f for f in plan.faults if f.kind == "crash_writer"]
        if found:
            struck += 1
            assert len(found) >= 2
            assert all(f.target in names(plan.options)[0] for f in found)
            assert plan.options.same_address
            assert plan.options.late_writes
    assert struck == 210 // STRUCK_EVERY


def test_a_plan_is_the_same_in_every_process() -> None:
    code = "from pdcore.sim.plan import make_plan; print(make_plan(7))"
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for seed in ("1", "2")
    }
    assert found == {f"{make_plan(7)}\n"}


def test_cutting_down_leaves_the_rest_as_it_was() -> None:
    plan = make_plan(3)
    cut = plan.only(faults={0, 2}, requests={5, 7})
    assert cut.faults == (plan.faults[0], plan.faults[2])
    assert cut.requests == (plan.requests[5], plan.requests[7])
    assert cut.options == plan.options
    assert plan.only() == plan


def test_a_target_and_its_other_have_different_roles() -> None:
    for seed in range(50):
        plan = make_plan(seed)
        prefills, decodes = names(plan.options)
        for fault in plan.faults:
            assert (fault.target in prefills) != (fault.other in prefills)
            assert {fault.target, fault.other} <= {*prefills, *decodes}


def test_a_named_room_is_asked_for_twice() -> None:
    """D7: the same room, live or finished."""
    found = 0
    for seed in range(20):
        rooms: dict[int, list[Request]] = {}
        for request in make_plan(seed).requests:
            if request.room is not None:
                rooms.setdefault(request.room, []).append(request)
        for first, second in rooms.values():
            assert first.prompt == second.prompt
            assert first.at_s <= second.at_s
            found += 1
    assert found > 20
