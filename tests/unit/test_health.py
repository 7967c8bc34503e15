"""What a worker says of itself: the ledger recounted at rest, peers by name, garbage summed."""

from __future__ import annotations

import logging

import pytest

from pdcore.config import CoreLimits
from pdcore.control.messages import WorkerHealth
from pdcore.errors import CodecError
from pdcore.health import GARBAGE_LOG_S, Watch
from pdcore.scheduler.ledger import SLOTS
from pdcore.testing.world import Rank, World, make_world
from pdcore.types import SamplingParams

PROMPT = list(range(10, 70))
FIVE = SamplingParams(max_tokens=5)


def reports(rank: Rank) -> list[WorkerHealth]:
    return [m for m in rank.said if isinstance(m, WorkerHealth)]


def pass_time(world: World, seconds: float) -> None:
    for _ in range(int(seconds * 4)):
        world.clock.advance(0.25)
        world.step()


def test_every_report_carries_the_ledger() -> None:
    world = make_world(num_blocks=40)
    world.run_request(PROMPT, FIVE)
    pass_time(world, 2.0)
    idle = {"free": 39, "reserved": 0, "held": 0, "leased": 0, "quarantined": 0}
    assert reports(world.prefill)[-1].ledger == {"full": idle}
    decode = reports(world.decode)[-1]
    assert decode.ledger == {"full": idle, SLOTS: {**idle, "free": 64}}
    assert decode.problems == []
    assert decode.refused_peers == {}
    assert decode.counters["audits"] >= 1


def check_a_leak_is_reported(world: World) -> None:
    """A block that nobody gave back."""
    world.decode.worker.core.blocks.allocate_slots(12345, 0, 1)
    world.run_request(PROMPT, FIVE)
    pass_time(world, 3.0)
    (problem,) = reports(world.decode)[-1].problems
    assert problem.startswith("the ledger of KV blocks does not add up: full: 22 free")
    assert "1 held" in problem
    assert problem.endswith("restart this worker")


def test_a_ledger_that_does_not_add_up_is_never_silent(caplog: pytest.LogCaptureFixture) -> None:
    """Sticky: what the blocks contain is not known any more, whatever a later count says."""
    world = make_world(num_blocks=40)
    check_a_leak_is_reported(world)
    assert [r.levelno for r in caplog.records if "ledger" in r.message] == [logging.CRITICAL]
    world.decode.worker.core.blocks.release(12345)
    world.run_request(PROMPT, FIVE)
    pass_time(world, 3.0)
    assert reports(world.decode)[-1].problems != []


def test_a_ledger_that_nobody_recounts_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Watch, "audit_at_rest", lambda self, core: None)
    with pytest.raises(ValueError, match="not enough values"):
        check_a_leak_is_reported(make_world(num_blocks=40))


def test_the_ledger_is_recounted_after_work_and_not_while_idle() -> None:
    world = make_world(num_blocks=40)
    world.run_request(PROMPT, FIVE)
    pass_time(world, 3.0)
    first = world.decode.worker.counters.audits
    pass_time(world, 50.0)
    assert world.decode.worker.counters.audits == first
    world.run_request(PROMPT, FIVE)
    pass_time(world, 3.0)
    assert world.decode.worker.counters.audits > first


@pytest.mark.parametrize(("stopped", "other"), [("prefill", "decode"), ("decode", "prefill")])
def test_rule_6_a_stuck_peer_is_named(
    stopped: str, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rule 6: not ready, and the reason names who does not acknowledge. It is ready again
    when the peer has."""
    world = make_world(stepped=True, limits=CoreLimits(drain_timeout_s=2.0))
    key = world.submit(PROMPT, sampling=FIVE)
    world.run(lambda: any(a.kind == "move" for a in world.fabric.pending()))
    world.fabric.faults(world.prefill.worker.core.setup.me.incarnation).late_landing = True
    # Prefill keeps its blocks for its own writes, which stand still; decode for prefill's.
    monkeypatch.setattr(world.ranks[stopped].worker, "step", lambda max_wait_s: False)
    world.abort(key, at=other)
    world.run(lambda: reports(world.ranks[other])[-1].problems != [], max_steps=5000)
    expected = f"1 room waits for {stopped} rank 0, which does not acknowledge"
    assert reports(world.ranks[other])[-1].problems == [expected]
    monkeypatch.undo()

    def recovered() -> bool:
        world.fabric.step()
        return reports(world.ranks[other])[-1].problems == []

    world.run(recovered)


def test_garbage_is_one_line_and_then_a_sum(caplog: pytest.LogCaptureFixture) -> None:
    """A peer that sends garbage for a minute must not fill the disk."""
    watch = Watch()
    for i in range(1000):
        watch.garbage_frame(CodecError("not a frame"), 0.05 * i)
    watch.garbage_frame(CodecError("the last"), GARBAGE_LOG_S)
    assert [r.message for r in caplog.records] == [
        "dropped 1 control frames, the last one: not a frame",
        "dropped 1000 control frames, the last one: the last",
    ]
    assert watch.counters.frames_garbage == 1001


def test_d45_a_question_that_raises_is_a_problem_and_not_the_end() -> None:
    """D45: whoever is asked for problems has one, then."""
    world = make_world()

    def broken() -> list[str]:
        raise RuntimeError("closed")

    world.decode.worker.problems = broken
    pass_time(world, 2.0)
    expected = "asking for its problems raised RuntimeError: closed"
    assert reports(world.decode)[-1].problems == [expected]
