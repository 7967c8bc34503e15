"""Many seeds, one after the other or in several processes, and their sum.

A seed that fails is run again while it is cut down, so that its replay command is short.
"""

from __future__ import annotations

import gc
import multiprocessing
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from pdcore.sim.mutants import planted
from pdcore.sim.plan import make_plan
from pdcore.sim.shrink import MAX_TRIES, replay_command, shrink
from pdcore.sim.world import WorldResult, run_world

#: Worlds leave cycles behind; looking for them after each would cost more than it frees.
COLLECT_EVERY: Final = 8


#: Known-bad variants that a cluster of one rank per instance cannot show, and why. Worlds of
#: groups (``pdcore verify lifecycles``) catch them.
NOT_HERE: Final[Mapping[str, str]] = {
    "max-merged-status": "with one prefill rank there is nothing to merge",
    "min-over-states": "with one rank there is nothing to reduce",
    "no-release-vote": "with one rank there is nobody to ask",
}
#: Worlds tried when a seed that caught a known-bad variant is cut down.
MUTANT_TRIES: Final = 60


class SeedViolation(NamedTuple):
    """``replay`` is a command that shows it again, in a world cut down to what is needed."""

    seed: int
    message: str
    replay: str


class SeedResult(NamedTuple):
    result: WorldResult
    violations: list[SeedViolation]


def run_seed(seed: int, mutant: str = "", *, is_shrunk: bool = True) -> SeedResult:
    """One world, whole; cut down if anything was wrong in it."""
    with planted(mutant):
        plan = make_plan(seed)
        result = run_world(plan)
        if not result.violations:
            return SeedResult(result, [])
        cut = plan
        if is_shrunk:
            tries = MUTANT_TRIES if mutant else MAX_TRIES
            cut = shrink(plan, lambda p: bool(run_world(p).violations), max_tries=tries).plan
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
    on_result: Callable[[SeedResult], None] = lambda result: None,
) -> Totals:
    """All of them; the order of the results does not depend on ``jobs``. With a mutant the
    first seed that catches it is the last that runs."""
    totals = Totals()
    for found in _results(seeds, jobs, mutant):
        totals.add(found)
        on_result(found)
        if mutant and found.violations:
            break
    return totals


def _results(seeds: Sequence[int], jobs: int, mutant: str) -> Iterator[SeedResult]:
    if jobs <= 1 or len(seeds) < 2:
        yield from map(_run_one, ((seed, mutant) for seed in seeds))
        return
    # Fresh interpreters: nothing of this process, threads least of all, is inherited.
    context = multiprocessing.get_context("spawn")
    work: Iterable[tuple[int, str]] = [(seed, mutant) for seed in seeds]
    with context.Pool(jobs) as pool:
        yield from pool.imap(_run_one, work, chunksize=4)


def _run_one(work: tuple[int, str]) -> SeedResult:
    seed, mutant = work
    found = run_seed(seed, mutant)
    if seed % COLLECT_EVERY == 0:
        gc.collect()
    return found
