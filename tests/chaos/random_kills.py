"""Random parts of a cluster are killed and stopped for as long as you like, under load.

``python -m tests.chaos.random_kills --seconds 1800 --seed 7 --json`` starts two prefill and
two decode instances and a router on the simulated engine, keeps 16 requests in flight (half
of them streams), and every one to three seconds kills a process or stops it for a while.
Dead workers are started again by their leader, dead leaders and routers by this driver. In
the end it counts what became of every request and what is left over: exit status 0 only when
no request is lost (neither answered nor disconnected), none is wrong or fails with a code that
a death does not explain, each is counted once, and nothing leaked.

A prefill leader has the bootstrap server in its process: killing or stopping "prefill-0" is
killing or stopping that server, too, and a router or worker that knows it must do without it.

The same seed makes the same choices; when each takes effect is up to the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import attrs

from pdcore.server.client import HttpClient
from pdcore.sim.clients import ALLOWED_CODES
from tests.chaos.leaks import Holding, belonging_to
from tests.chaos.parts import INSTANCES, WORKERS, Parts
from tests.scenarios.processes import children
from tests.scenarios.soak_client import GRACE_S, Outcome, ask

LANES = 16
REQUEST_S = 4.0
#: Between two requests of a lane: load, but not all that the machine can do.
PAUSE_S = 0.15
MIN_GAP_S, MAX_GAP_S = 1.0, 3.0
#: Tries to start a part again.
STARTS = 5
MIN_STOP_S, MAX_STOP_S = 0.1, 3.0
#: Workers hold the blocks: they are hit twice as often. A prefill leader (an instance's name
#: alone) takes its bootstrap server with it.
VICTIMS = (*WORKERS, *WORKERS, *INSTANCES, "router")


@attrs.define
class Tally:
    """What became of the requests."""

    sent: int = 0
    ok: int = 0
    errors: Counter[str] = attrs.field(factory=Counter)
    #: Connections that closed while the router was dead, or died.
    disconnected: int = 0
    #: Connections that closed although the router lived.
    cut_off: int = 0
    #: Neither answered nor disconnected within their time and a grace.
    lost: int = 0
    wrong: int = 0
    #: Failed as nothing in this storm may be called (a bug of ours, a valid request refused).
    unexpected: int = 0
    longest_s: float = 0.0
    #: The first few of what must not be, in words.
    examples: list[str] = attrs.field(factory=list)

    def count(self, outcome: Outcome, router_died: bool) -> None:
        self.longest_s = max(self.longest_s, outcome.seconds)
        if outcome.kind == "ok":
            self.ok += 1
        elif outcome.kind == "lost" and router_died:
            self.disconnected += 1
        elif outcome.kind == "lost":
            self.cut_off += 1
            self._remember(outcome)
        elif outcome.kind == "wrong":
            if outcome.seconds >= REQUEST_S + GRACE_S:
                self.lost += 1
            else:
                self.wrong += 1
            self._remember(outcome)
        else:
            self.errors[outcome.kind] += 1
            if outcome.kind not in ALLOWED_CODES:
                self.unexpected += 1
                self._remember(outcome)

    def _remember(self, outcome: Outcome) -> None:
        if len(self.examples) < 20:
            self.examples.append(f"after {outcome.seconds:.2f} s: {outcome.problem}"[:400])

    @property
    def is_clean(self) -> bool:
        return not (self.cut_off or self.lost or self.wrong or self.unexpected) and (
            self.sent == self.num_ended
        )

    @property
    def num_ended(self) -> int:
        """Each request that was sent, once."""
        broken = self.disconnected + self.cut_off + self.lost + self.wrong
        return self.ok + self.errors.total() + broken


@attrs.define
class RouterLives:
    """When the router was dead: those requests may end with their connection."""

    spans: list[tuple[float, float]] = attrs.field(factory=list)
    died_s: float | None = None

    def died(self) -> None:
        self.died_s = time.monotonic()

    def is_back(self) -> None:
        assert self.died_s is not None
        self.spans.append((self.died_s, time.monotonic()))
        self.died_s = None

    def was_dead(self, start_s: float, end_s: float) -> bool:
        if self.died_s is not None and end_s >= self.died_s:
            return True
        return any(start_s <= up and end_s >= down for down, up in reversed(self.spans))


class Storm:
    """The load and the faults on one cluster."""

    def __init__(self, parts: Parts, seed: int) -> None:
        self.tally = Tally()
        self.faults: Counter[str] = Counter()
        self.restarts: Counter[str] = Counter()
        #: Parts that could not be started again, and why.
        self.broken: list[str] = []
        self._parts = parts
        self._seed = seed
        self._rng = random.Random(seed)
        self._router = RouterLives()
        #: Being restarted by us: not there to be hit.
        self._busy: set[str] = set()
        self._is_over = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, seconds: float) -> None:
        """Load all the while; faults for ``seconds``; then everything is started again and
        must serve."""
        client = HttpClient()
        lanes = [asyncio.create_task(self._lane(client, lane)) for lane in range(LANES)]
        try:
            await self._throw_faults(time.monotonic() + seconds)
            await asyncio.to_thread(self._parts.expect_up)
            await self._serve_again()
        finally:
            self._is_over.set()
            await asyncio.gather(*lanes)
            await client.aclose()

    async def _serve_again(self) -> None:
        """A hundred more right answers, within a minute."""
        wanted, end_s = self.tally.ok + 100, time.monotonic() + 60
        while self.tally.ok < wanted and time.monotonic() < end_s:
            await self._pause(0.2)
        if self.tally.ok < wanted:
            self.tally.examples.append("it did not serve again within 60 s after the storm")
            self.tally.lost += 1

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._is_over.wait(), seconds)

    async def _lane(self, client: HttpClient, lane: int) -> None:
        rng = random.Random(f"{self._seed} {lane}")
        while not self._is_over.is_set():
            self.tally.sent += 1
            start_s = time.monotonic()
            outcome = await ask(
                client,
                self._parts.router,
                rng,
                timeout_s=REQUEST_S,
                is_stream=rng.random() < 0.5,
            )
            dead = self._router.was_dead(start_s, time.monotonic())
            self.tally.count(outcome, dead)
            await self._pause(PAUSE_S if outcome.kind == "ok" else 2 * PAUSE_S)

    async def _throw_faults(self, end_s: float) -> None:
        while time.monotonic() < end_s:
            await self._pause(self._rng.uniform(MIN_GAP_S, MAX_GAP_S))
            await self._revive()
            victim, is_kill = self._rng.choice(VICTIMS), self._rng.random() < 0.5
            stop_s = self._rng.uniform(MIN_STOP_S, MAX_STOP_S)
            if victim.removesuffix(" worker") in self._busy:
                continue
            pid = self._pid(victim)
            if pid is None:  # its leader has not started it again yet
                continue
            kind = "worker" if victim in WORKERS else victim.partition("-")[0]
            self.faults[f"{'kill' if is_kill else 'stop'} {kind}"] += 1
            self._start(self._kill(victim, pid) if is_kill else self._stop(victim, pid, stop_s))
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._revive()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _start(self, fault: Iterable[object]) -> None:
        task = asyncio.ensure_future(fault)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.broken.append(f"{type(error).__name__}: {error}"[:1000])

    def _pid(self, victim: str) -> int | None:
        name, _, worker = victim.partition(" ")
        leader = self._parts.programs[name].pid
        if not worker:
            return leader
        workers = sorted(children().get(leader, ()))
        return self._rng.choice(workers) if len(workers) > 1 else next(iter(workers), None)

    async def _kill(self, victim: str, pid: int) -> None:
        name, _, worker = victim.partition(" ")
        if worker:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            self.restarts["supervisor"] += 1
            return
        self._busy.add(name)
        if name == "router":
            self._router.died()
        os.kill(pid, signal.SIGKILL)
        await self._restart(name)

    async def _restart(self, name: str) -> None:
        self._busy.add(name)
        for left in reversed(range(STARTS)):
            try:
                await asyncio.to_thread(self._parts.restart, name)
                break
            except AssertionError as error:
                self.faults[f"{name.partition('-')[0]} did not start"] += 1
                print(f"{name} did not start: {error}", file=sys.stderr, flush=True)
                if not left:
                    raise
                await self._pause(MAX_GAP_S)
        self.restarts["driver"] += 1
        if name == "router":
            self._router.is_back()
        self._busy.discard(name)

    async def _stop(self, victim: str, pid: int, seconds: float) -> None:
        name = victim.removesuffix(" worker")
        # A restart beside it would kill the wrong process when the pid is used again.
        self._busy.add(name)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            try:
                await self._pause(seconds)
            finally:
                os.kill(pid, signal.SIGCONT)
        self._busy.discard(name)

    async def _revive(self) -> None:
        """Leaders that gave up, as they do after too many deaths in a row."""
        for name, program in self._parts.programs.items():
            if name not in self._busy and program.process.poll() is not None:
                self.faults[f"{name.partition('-')[0]} gave up"] += 1
                if name == "router":
                    self._router.died()
                self._start(self._restart(name))
                self._busy.add(name)


def told(before: Mapping[str, Holding], after: Mapping[str, Holding]) -> dict[str, object]:
    """Of every process by name: what it had open when all was calm at the start, and what it,
    or whoever took its place, has in the end."""
    return {
        part: {"start": held.as_json(), "end": after[part].as_json()}
        for part, held in before.items()
    }


def run(
    seconds: float, seed: int, folder: Path, transport: str = "auto", tp_size: int = 1
) -> dict[str, object]:
    """The report, as ``--json`` prints it."""
    start_s = time.monotonic()
    parts = Parts(folder, transport, tp_size)
    try:
        storm = Storm(parts, seed)
        asyncio.run(storm.run(seconds))
        left = parts.left_over()
        holdings = told(parts.before, parts.holdings())
    finally:
        gone = parts.close()
    left += [f"process {pid} did not end" for pid in gone]
    left += [f"process {pid} outlived all" for pid in sorted(belonging_to(folder))]
    tally = storm.tally
    return {
        "seconds": round(time.monotonic() - start_s, 1),
        "seed": seed,
        "transport": transport,
        "tp_size": tp_size,
        "faults": dict(sorted(storm.faults.items())),
        "num_faults": sum(storm.faults.values()),
        "restarts": dict(storm.restarts),
        "requests": {
            "sent": tally.sent,
            "ok": tally.ok,
            "errors": dict(tally.errors.most_common()),
            "disconnected": tally.disconnected,
            "cut_off_by_a_living_router": tally.cut_off,
            "lost": tally.lost,
            "wrong": tally.wrong,
            "unexpected": tally.unexpected,
            "ended": tally.num_ended,
            "longest_s": round(tally.longest_s, 2),
        },
        "holdings": holdings,
        "leaks": left,
        "violations": [*tally.examples, *storm.broken, *left],
        "is_clean": tally.is_clean and not left and not storm.broken,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.random_kills", description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0, help="how long faults are thrown")
    parser.add_argument("--seed", type=int, default=None, help="default: a fresh one, printed")
    parser.add_argument("--transport", default="auto", help="how KV moves; default auto")
    parser.add_argument("--tp-size", type=int, default=1, help="ranks of each instance; default 1")
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    given = parser.parse_args(argv)
    seed = random.SystemRandom().randrange(1 << 31) if given.seed is None else given.seed
    with tempfile.TemporaryDirectory(prefix="pdcore-chaos-") as folder:
        report = run(given.seconds, seed, Path(folder), given.transport, given.tp_size)
    print(json.dumps(report, indent=None if given.json else 2), flush=True)
    return 0 if report["is_clean"] else 1


if __name__ == "__main__":
    sys.exit(main())
