"""One seed: its world from beginning to end, and what was wrong in it.

The requests and faults of the plan happen, then everything calms down: faults end, killed
processes are back. A few more requests must then succeed, whatever happened before, and
within a bounded time nothing may be left (:mod:`pdcore.sim.checks`).
"""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Final, TypeVar

import attrs

from pdcore.sim.checks import WriteWatch, not_ready, router_unrest, unrest
from pdcore.sim.clients import Outcome, ask, judge
from pdcore.sim.cluster import Cluster
from pdcore.sim.faults import LOAD, Faults
from pdcore.sim.plan import Plan, Request
from pdcore.sim.site import START_S, Parts, make_site

T = TypeVar("T")

#: From the start of the processes to the first request, in virtual seconds.
WARM_UP_S: Final = 0.3
#: Until then the router has asked every instance again.
KNOWN_S: Final = 1.5
#: After the last fault everything is at rest within this.
REST_S: Final = 40.0
#: How often it is looked.
LOOK_S: Final = 0.5
#: Requests that must succeed at the end.
NUM_LAST: Final = 4
#: Once a world is calm, its instances are ready and known within this.
RECOVERED_S: Final = 15.0
#: More of them say nothing new.
MAX_VIOLATIONS: Final = 20


@attrs.define
class WorldResult:
    """What one seed brought. ``violations`` is empty when everything held."""

    seed: int
    digest: str
    num_requests: int
    num_ok: int
    virtual_s: float
    cpu_s: float
    faults: dict[str, int]
    violations: list[str]
    outcomes: dict[str, int]
    trace: list[str] | None = attrs.field(default=None, repr=False)


def run_world(plan: Plan, parts: Parts | None = None, *, is_traced: bool = False) -> WorldResult:
    """Deterministic: the same plan gives the same result, in any process. ``parts``: what is
    not the product's own in it."""
    started_s = time.process_time()
    site = make_site(plan, parts)
    cluster = Cluster(site)
    life = _Life(cluster, plan)
    caught = _Caught()
    with _errors_heard(site.violations), _no_collections():
        with caught:
            site.loop.run(life.run())
        if caught.error is not None:
            site.violate(f"{type(caught.error).__name__}: {caught.error}")
        with _Caught():
            site.loop.run(unwind(cluster))
    site.violations += [f"an app raised: {text}" for text in site.wire.errors]
    site.violations += [f"nobody took an exception of {text}" for text in site.loop.errors]
    counts: dict[str, int] = {}
    for outcome in life.outcomes:
        what = outcome.code or ("lost" if outcome.lost else "left" if outcome.has_left else "ok")
        counts[what] = counts.get(what, 0) + 1
    return WorldResult(
        seed=plan.seed,
        digest=site.trace.digest(),
        num_requests=len(life.outcomes),
        num_ok=sum(outcome.is_ok for outcome in life.outcomes),
        virtual_s=site.loop.time() - START_S,
        cpu_s=time.process_time() - started_s,
        faults=dict(sorted(site.faults.items())),
        violations=site.violations[:MAX_VIOLATIONS],
        outcomes=dict(sorted(counts.items())),
        trace=site.trace.lines if is_traced else None,
    )


def in_world(
    plan: Plan, scenario: Callable[[Cluster], Awaitable[T]], parts: Parts | None = None
) -> T:
    """Run a scenario of one's own against the cluster of a plan: its processes are started,
    none of the plan's requests and faults happen. What the scenario raises is raised.

    Raises AssertionError for what no world may do (:func:`run_world`'s violations)."""
    site = make_site(plan, parts)
    cluster = Cluster(site)

    async def run() -> T:
        cluster.on_write = WriteWatch(cluster)
        cluster.start()
        await asyncio.sleep(KNOWN_S)
        return await scenario(cluster)

    with _errors_heard(site.violations), _no_collections():
        try:
            result = site.loop.run(run())
        finally:
            site.loop.run(unwind(cluster))
    wrong = [*site.violations, *site.wire.errors, *site.loop.errors]
    assert not wrong, "\n".join(wrong)
    return result


class _Life:
    """The order of things in one world."""

    def __init__(self, cluster: Cluster, plan: Plan) -> None:
        self.cluster = cluster
        self.site = cluster.site
        self.plan = plan
        self.faults = Faults(cluster)
        self.outcomes: list[Outcome] = []
        #: Until then nothing goes wrong.
        self.calm_until_s = math.inf

    async def run(self) -> None:
        cluster, site = self.cluster, self.site
        cluster.on_write = WriteWatch(cluster)
        cluster.start()
        await asyncio.sleep(WARM_UP_S)
        began_s = site.loop.time()
        self.calm_until_s = began_s + min(
            (f.at_s for f in self.plan.faults if f.kind not in LOAD), default=math.inf
        )
        for fault in self.plan.faults:
            site.later(fault.at_s, partial(self.faults.begin, fault))
        asked = [self._ask(began_s + r.at_s, r) for r in self.plan.requests]
        await asyncio.gather(*asked)
        over_s = max((f.at_s + f.duration_s for f in self.plan.faults), default=0.0)
        await asyncio.sleep(max(0.0, began_s + over_s - site.loop.time()))
        self.faults.calm()
        await self._last_requests()
        await self._rest()

    async def _ask(self, at_s: float, request: Request) -> None:
        await asyncio.sleep(at_s - self.site.loop.time())
        context = self.cluster.client.context
        task = self.site.loop.create_task(ask(self.cluster, request), context=context)
        outcome = await task
        self.outcomes.append(outcome)
        excused = self.cluster.router.outages
        now_s = self.site.loop.time()
        spare_s = self.faults.stood_still_s(outcome.asked_s, now_s)
        is_calm = now_s < self.calm_until_s
        for problem in judge(outcome, excused, spare_s, is_calm=is_calm):
            self.site.violate(problem)

    async def _last_requests(self) -> None:
        """It serves again, on every pair of instances that the router chooses."""
        first = 1 + max((r.number for r in self.plan.requests), default=0)
        until_s = self.site.loop.time() + RECOVERED_S
        while self.site.loop.time() < until_s and await not_ready(self.cluster):
            await asyncio.sleep(LOOK_S)
        for number in range(first, first + NUM_LAST):
            request = Request(
                number=number,
                at_s=0.0,
                path="/v1/completions",
                prompt=tuple(range(3, 8 + number % 5)),
                max_tokens=2,
                is_streamed=number % 2 == 0,
                timeout_s=8.0,
                seed=None,
                leaves_after_s=None,
            )
            await self._ask(self.site.loop.time(), request)
            if not self.outcomes[-1].is_ok:
                self.site.violate(f"{self.outcomes[-1]}: the world was calm")

    async def _rest(self) -> None:
        until_s = self.site.loop.time() + REST_S
        while True:
            found = unrest(self.cluster) or await router_unrest(self.cluster)
            if not found:
                return
            if self.site.loop.time() >= until_s:
                break
            await asyncio.sleep(LOOK_S)
        for text in found:
            self.site.violate(f"not at rest: {text}")


async def unwind(cluster: Cluster) -> None:
    """End every process in order, so that nothing depends on a garbage collection."""
    for process in cluster.processes():
        await cluster.site.loop.bury(process)


class _Caught:
    """Takes whatever ends a world: an exception out of a loop is what is looked for."""

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        self.error = error
        return isinstance(error, Exception)


class _Ears(logging.Handler):
    """What the product logs as an error is one: it is told to nobody else here."""

    def __init__(self, heard: list[str]) -> None:
        super().__init__(logging.ERROR)
        self._heard = heard

    def emit(self, record: logging.LogRecord) -> None:
        text = f"logged: {record.getMessage()}"
        if record.exc_info is not None and record.exc_info[1] is not None:
            text += f" ({record.exc_info[1]!r})"
        self._heard.append(text)


@contextmanager
def _errors_heard(heard: list[str]) -> Iterator[None]:
    log = logging.getLogger("pdcore")
    level, propagates = log.level, log.propagate
    ears = _Ears(heard)
    log.addHandler(ears)
    log.setLevel(logging.ERROR)
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(ears)
        log.setLevel(level)
        log.propagate = propagates


@contextmanager
def _no_collections() -> Iterator[None]:
    """A world is small and short: its cycles go when it is over."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
