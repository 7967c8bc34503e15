"""Many seeds and their sum."""

from __future__ import annotations

import gc
import re
import signal
import subprocess
import sys

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pdcore.scheduler.decode import DecodeCore
from pdcore.scheduler.prealloc import Preallocation
from pdcore.sim import seeds
from pdcore.sim.plan import Plan, make_plan
from pdcore.sim.seeds import SeedResult, few_collections, kind_of, run_seed, run_seeds
from pdcore.sim.site import Parts
from pdcore.sim.world import WorldResult, run_world
from pdcore.types import RoomKey
from pdcore.worker import Worker


def result_of(plan: Plan, *, wrong: bool = False) -> WorldResult:
    violations = ["it broke"] if wrong else []
    requests = len(plan.requests)
    return WorldResult(
        plan.seed, "d", requests, requests, 2.0, 0.1, {"drop": 1}, violations, {"ok": requests}
    )


def fake_world(plan: Plan, parts: Parts | None = None) -> WorldResult:
    """Seed 3 breaks whenever its fault 0 and request 5 are there."""
    is_there = any(f.number == 0 for f in plan.faults) and any(r.number == 5 for r in plan.requests)
    return result_of(plan, wrong=plan.seed == 3 and is_there)


def test_the_sum_of_many_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seeds, "run_world", fake_world)
    told: list[SeedResult] = []
    totals = run_seeds(range(5), on_result=told.append)
    report = totals.report()
    assert [found.result.seed for found in told] == [0, 1, 2, 3, 4]
    assert report["seeds"] == 5
    assert report["faults"] == {"drop": 5}
    assert report["virtual_seconds"] == 10.0
    assert report["violations"] == [
        {
            "seed": 3,
            "message": "it broke",
            "replay": "pdcore verify cluster --seed 3 --only-faults 0 --only-requests 5",
        }
    ]


def test_a_world_is_cut_down_to_the_failure_that_it_reports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without fault 1 this one fails in another way, with nothing left in it at all."""

    def two_ways(plan: Plan, parts: Parts | None = None) -> WorldResult:
        kept = {fault.number for fault in plan.faults}
        result = result_of(plan)
        result.violations = ["at 2.5 s: d0 has rooms" if 1 in kept else "at 0.3 s: no router"]
        return result

    monkeypatch.setattr(seeds, "run_world", two_ways)
    (violation,) = run_seed(3).violations
    assert violation.message == "at 2.5 s: d0 has rooms"
    assert "--only-faults 1 --only-requests none" in violation.replay


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("at 1.3 s: request 9: 503 x after 0.1 s", "at 7 s: request 12: 200 x after 3 s", True),
        ("at 1 s: got '1 2 ', expected '1 3 '", "at 2 s: got '', expected '5 '", True),
        ("p0.worker has rooms: Core(a={1: 2})", "p1.worker has rooms: Core(b=[])", True),
        ("request 9: the router lives", "request 9: has no end", False),
        ("not at rest: d0 has rooms", "not at rest: d0 is not back", False),
    ],
)
def test_violations_of_one_kind_differ_only_in_what_differs_between_worlds(
    one: str, other: str, is_same: bool
) -> None:
    assert (kind_of(one) == kind_of(other)) is is_same


def test_a_mutant_ends_the_run_where_it_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seeds, "run_world", fake_world)
    totals = run_seeds(range(10), mutant="free-on-abort")
    assert totals.num_seeds == 4
    assert totals.violations[0].replay.endswith("--mutant free-on-abort")


def test_a_real_seed_in_another_process_is_the_same() -> None:
    """Issue 3.9: the order and the outcome do not depend on how many processes run."""
    here = [run_seed(seed).result for seed in (11, 12)]
    told: list[SeedResult] = []
    run_seeds([11, 12], jobs=2, on_result=told.append)
    assert [found.result.digest for found in told] == [one.digest for one in here]
    assert all(found.violations == [] for found in told)


class ForgetfulQueue(Preallocation):
    """Who leaves while its route is looked for is forgotten; who leaves the line is not."""

    def leave(self, key: RoomKey) -> None:
        for rooms in self.pending.values():
            rooms.pop(key, None)


def with_forgetful_queue(worker: Worker) -> None:
    if isinstance(worker.core, DecodeCore):
        worker.core.prealloc = ForgetfulQueue(worker.core.rooms)


class NoErrorEvents:
    """A server's middleware that does not let a stream's error event out."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_on(message: Message) -> None:
            is_error = message.get("body", b"").startswith(b'data: {"error"')
            await send({**message, "body": b""} if is_error else message)

        await self.app(scope, receive, send_on)


def without_error_events(app: ASGIApp, name: str) -> ASGIApp:
    return NoErrorEvents(app) if name == "router" else app


@pytest.mark.parametrize(
    ("parts", "told"),
    [
        (Parts(on_worker=with_forgetful_queue), "504 deadline_exceeded .* the world was calm"),
        (Parts(wrap_app=without_error_events), r"without \[DONE\] and without an error event"),
    ],
    ids=["queue", "server"],
)
def test_a_bug_of_ones_own_shows_in_a_world_and_not_while_all_is_calm(
    parts: Parts, told: str
) -> None:
    """Issue 3.11: a user's parts are put through the same worlds."""
    calm = make_plan(3).only(faults=[], requests=[1])
    assert run_world(calm, parts).violations == []
    found = (run_seed(seed, parts=parts, is_shrunk=False) for seed in range(20))
    first = next(one for one in found if one.violations)
    assert re.search(told, first.violations[0].message), first.violations


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel tells of a parent's death")
def test_no_job_works_on_for_a_parent_that_was_killed() -> None:
    """Each went on with the seeds that it had; here one of them never ends. Standard output
    ends with the last process that holds it."""
    code = (
        "import os, signal\n"
        "from pdcore.sim.seeds import run_seeds\n"
        "class Endless:\n"
        "    def __reduce__(self): return signal.pause, ()\n"
        "def kill(found):\n"
        "    print('first', flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "run_seeds([11, 12, 13, 14] + [Endless()] * 12, jobs=2, on_result=kill)\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, stdout=subprocess.PIPE, timeout=100, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, b"first\n")


def test_the_collector_is_as_it_was_after_the_seeds() -> None:
    frozen = gc.get_freeze_count()
    assert gc.isenabled()
    with few_collections():
        assert not gc.isenabled()
        assert gc.get_freeze_count() > frozen
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
    gc.disable()
    try:
        with few_collections():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
