"""Many seeds, one after the other or in several processes, and their sum.

A seed that fails is run again while it is cut down, so that its replay command is short.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple

from pdcore.server.process import die_with_parent
from pdcore.sim.mutants import planted
from pdcore.sim.plan import Plan, make_plan
from pdcore.sim.shrink import MAX_TRIES, replay_command, shrink
from pdcore.sim.site import Parts
from pdcore.sim.world import WorldResult, run_world

#: Worlds leave cycles behind; looking for them after each would cost more than it frees.
COLLECT_EVERY: Final = 8


#: Known-bad variants that simulated clusters must catch within 500 seeds (``--mutant all``).
#: Not among them are those that need an order which is rare among random ones (one-live-claim,
#: free-while-computing, deaf). The explorer has them.
CAUGHT_HERE: Final = (
    "free-on-abort",
    "no-incarnation",
    "no-claim-tombstones",
    "claim-without-lease",
    "ack-between-chunks",
    "restart-acks-for-predecessor",
    "failed-is-ack",
    "done-when-posted",
    "send-once",
    "max-merged-status",
    "min-over-states",
)
#: What a violation says of this world alone: moments, ids, tokens, and states in angle
#: brackets or quotes.
_VARYING: Final = re.compile(r"'[^']*'|<.*>|\(.*\)|\{.*\}|\[.*\]|\b\w*\d[\w.]*")
#: Worlds tried when what a seed caught was planted: nobody will read it as long.
QUICK_TRIES: Final = 40


class SeedViolation(NamedTuple):
    """``replay`` is a command that shows it again, in a world cut down to what is needed."""

    seed: int
    message: str
    replay: str


class SeedResult(NamedTuple):
    result: WorldResult
    violations: list[SeedViolation]


def kind_of(message: str) -> str:
    """A violation without what differs from one world to the next: a world is cut down to one
    that fails like this, not to the smallest that fails somehow."""
    return _VARYING.sub("#", message)


def run_seed(
    seed: int, mutant: str = "", parts: Parts | None = None, *, is_shrunk: bool = True
) -> SeedResult:
    """One world, whole; cut down if anything was wrong in it. ``parts``: somebody's own
    engine, transport or queue to be tried."""
    with planted(mutant):
        plan = make_plan(seed)
        result = run_world(plan, parts)
        if not result.violations:
            return SeedResult(result, [])
        cut = plan
        if is_shrunk:
            tries = MAX_TRIES if parts is None and not mutant else QUICK_TRIES
            wanted = kind_of(result.violations[0])

            def fails(tried: Plan) -> bool:
                found = run_world(tried, parts).violations
                gc.collect(0)
                return any(kind_of(v) == wanted for v in found)

            cut = shrink(plan, fails, max_tries=tries).plan
        command = replay_command(cut, plan, mutant)
    found = [SeedViolation(seed, message, command) for message in result.violations]
    return SeedResult(result, found)


class Totals:
    """The sum of many seeds, as ``--json`` prints it."""

    def __init__(self) -> None:
        self.num_seeds = 0
        self.num_requests = 0
        self.virtual_s = 0.0
        self.cpu_s = 0.0
        self.faults: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()
        self.violations: list[SeedViolation] = []
        self._started_s = time.perf_counter()

    def add(self, seed: SeedResult) -> None:
        result = seed.result
        self.num_seeds += 1
        self.num_requests += result.num_requests
        self.virtual_s += result.virtual_s
        self.cpu_s += result.cpu_s
        self.faults.update(result.faults)
        self.outcomes.update(result.outcomes)
        self.violations += seed.violations

    def report(self) -> dict[str, object]:
        wall_s = time.perf_counter() - self._started_s
        return {
            "seeds": self.num_seeds,
            "requests": self.num_requests,
            "virtual_seconds": round(self.virtual_s, 3),
            "wall_seconds": round(wall_s, 3),
            "cpu_seconds": round(self.cpu_s, 3),
            "requests_per_cpu_second": round(self.num_requests / max(self.cpu_s, 1e-9), 1),
            "faults": dict(sorted(self.faults.items())),
            "outcomes": dict(sorted(self.outcomes.items())),
            "violations": [violation._asdict() for violation in self.violations],
        }


def run_seeds(
    seeds: Sequence[int],
    *,
    jobs: int = 1,
    mutant: str = "",
    parts: Parts | None = None,
    on_result: Callable[[SeedResult], None] = lambda result: None,
) -> Totals:
    """All of them; the order of the results does not depend on ``jobs``. With a mutant, or
    ``parts`` that are tried (in this process only), the first seed that finds something is
    the last that runs."""
    totals = Totals()
    if parts is None:
        results = _results(seeds, jobs, mutant)
    else:
        results = (run_seed(seed, mutant, parts) for seed in seeds)
    for found in results:
        totals.add(found)
        on_result(found)
        if found.violations and (mutant or parts is not None):
            break
    return totals


def _results(seeds: Sequence[int], jobs: int, mutant: str) -> Iterator[SeedResult]:
    if jobs <= 1 or len(seeds) < 2:
        with few_collections():
            yield from map(_run_one, ((seed, mutant) for seed in seeds))
        return
    # Fresh interpreters: nothing of this process, threads least of all, is inherited.
    context = multiprocessing.get_context("spawn")
    work: Iterable[tuple[int, str]] = [(seed, mutant) for seed in seeds]
    # None of them works on when this process is killed.
    with context.Pool(jobs, initializer=_begin, initargs=(os.getpid(),)) as pool:
        yield from pool.imap(_run_one, work, chunksize=4)


def _begin(parent: int) -> None:
    """In a process that does nothing else."""
    die_with_parent(parent)
    gc.collect()
    gc.freeze()
    gc.disable()


@contextmanager
def few_collections() -> Iterator[None]:
    """Modules, classes and tables are not looked through again and again for what worlds left
    behind; who uses this collects now and then."""
    was_on = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_on:
            gc.enable()


def _run_one(work: tuple[int, str]) -> SeedResult:
    seed, mutant = work
    found = run_seed(seed, mutant)
    if seed % COLLECT_EVERY == 0:
        started_s = time.process_time()
        gc.collect()
        found.result.cpu_s += time.process_time() - started_s
    return found
