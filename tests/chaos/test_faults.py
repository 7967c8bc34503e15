"""Parts of a running cluster are killed or stopped under load, and it comes back whole.

Every request ends in its own time with the right tokens or with an error that says why; what
was not hit goes on; health tells the truth; afterwards all blocks are back and nothing is left
of the dead. One cluster goes through all of it, so that each fault meets what the former left.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Iterator

import pytest

from pdcore.server.client import HttpClient
from tests.chaos.parts import (
    INSTANCES,
    LOST,
    REQUEST_S,
    SETTLE_S,
    SILENT,
    Load,
    Parts,
    expect_only,
)
from tests.scenarios.processes import Cluster, children, segments, until, wait_gone
from tests.scenarios.soak_client import Outcome, ask

pytestmark = pytest.mark.slow

#: What is left of a broken cluster may drain for 30 s before it ends.
GONE_S = 90.0


@pytest.mark.parametrize("victim", ["prefill-0", "decode-1"])
def test_a_killed_worker(parts: Parts, victim: str) -> None:
    """D45, D48, D3, D4: its requests fail at once with a reason, those elsewhere are served,
    its leader says so and starts another, and nobody keeps blocks for the dead."""

    async def kill(load: Load) -> None:
        os.kill(parts.pid(f"{victim} worker"), signal.SIGKILL)
        await asyncio.to_thread(parts.expect_unready, victim)
        await load.some_ok(20)

    outcomes = asyncio.run(Load(parts.router, seed=1).run(kill))
    expect_only(outcomes, LOST)
    parts.expect_whole()


@pytest.mark.parametrize("victim", ["prefill-1", "decode-0"])
def test_a_stopped_worker(parts: Parts, victim: str) -> None:
    """D3, D23, D59: silence frees nothing and holds nobody longer than its own time; when
    the worker goes on, what it still writes harms nobody and every block comes back."""

    async def stop(load: Load) -> None:
        pid = parts.pid(f"{victim} worker")
        os.kill(pid, signal.SIGSTOP)
        try:
            await load.some(lambda one: one.kind == "deadline_exceeded")
            await load.some_ok(10)
        finally:
            os.kill(pid, signal.SIGCONT)

    outcomes = asyncio.run(Load(parts.router, seed=2, timeout_s=REQUEST_S).run(stop))
    expect_only(outcomes, SILENT)
    parts.expect_whole()


@pytest.mark.parametrize("victim", ["prefill-1", "decode-0"])
def test_a_killed_leader(parts: Parts, victim: str) -> None:
    """D48, D60: its worker dies with it, and prefill's bootstrap server, which it runs; the router
    takes it out of the rotation, and back when the same command is started again."""
    worker = parts.pid(f"{victim} worker")

    async def kill(load: Load) -> None:
        os.kill(parts.pid(victim), signal.SIGKILL)
        assert not await asyncio.to_thread(wait_gone, [worker])
        await asyncio.to_thread(parts.expect_seen, victim, "Down")
        await load.some_ok(20)
        await asyncio.to_thread(parts.restart, victim)

    outcomes = asyncio.run(Load(parts.router, seed=3).run(kill))
    expect_only(outcomes, LOST)
    parts.expect_whole()


@pytest.mark.parametrize("victim", ["prefill-0", "decode-1"])
def test_a_stopped_leader(parts: Parts, victim: str) -> None:
    """D48: a leader that does not answer gets no more requests; those that it had end in
    their own time. Prefill's bootstrap server stands still with it."""

    async def stop(load: Load) -> None:
        pid = parts.pid(victim)
        os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.to_thread(parts.expect_seen, victim, "Down")
            await load.some_ok(20)
        finally:
            os.kill(pid, signal.SIGCONT)

    outcomes = asyncio.run(Load(parts.router, seed=4, timeout_s=REQUEST_S).run(stop))
    expect_only(outcomes, SILENT)
    parts.expect_whole()


def test_a_killed_router(parts: Parts) -> None:
    """D47: clients see their connection end, the instances end what nobody waits for any
    more, and another router serves at once."""

    async def kill(load: Load) -> None:
        os.kill(parts.pid("router"), signal.SIGKILL)
        await load.some(lambda one: one.kind == "lost")
        await asyncio.to_thread(parts.restart, "router")

    outcomes = asyncio.run(Load(parts.router, seed=5).run(kill))
    expect_only(outcomes, LOST | {"lost"})
    parts.expect_whole()


def test_a_killed_router_leaves_nothing_in_the_queues(parts: Parts) -> None:
    """Decision 26: prefill had its half of requests that decode had not come to; nobody but
    decode can tell it that they are over, and their own deadline is ten minutes away."""
    prefills = [name for name in INSTANCES if name.startswith("prefill")]
    workers = [parts.pid(f"{name} worker") for name in INSTANCES if name.startswith("decode")]

    def queued() -> float:
        return sum(parts.ledger(name).get("bootstrap", 0.0) for name in prefills)

    async def kill() -> list[Outcome]:
        rng, client = random.Random(6), HttpClient()
        asked = [
            asyncio.create_task(ask(client, parts.router, rng, timeout_s=600.0, is_stream=False))
            for _ in range(12)
        ]
        watched, until_s = parts.pid("router"), SETTLE_S
        try:
            what = "prefill has its halves"
            await asyncio.to_thread(until, lambda: queued() == 12, watched, until_s, what)
            os.kill(watched, signal.SIGKILL)
            return await asyncio.gather(*asked)
        finally:
            await client.aclose()

    for pid in workers:
        os.kill(pid, signal.SIGSTOP)
    try:
        outcomes = asyncio.run(kill())
    finally:
        for pid in workers:
            os.kill(pid, signal.SIGCONT)
    assert {one.kind for one in outcomes} == {"lost"}
    until(lambda: queued() == 0, workers[0], SETTLE_S, "prefill's queues are empty")
    parts.restart("router")
    parts.expect_whole()


def test_a_stopped_router(parts: Parts) -> None:
    """Nothing is answered while it is stopped; everything afterwards."""

    async def stop(load: Load) -> None:
        pid = parts.pid("router")
        os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(TimeoutError):
                await load.some(lambda one: True, 100, timeout_s=1.0)
        finally:
            os.kill(pid, signal.SIGCONT)

    outcomes = asyncio.run(Load(parts.router, seed=6).run(stop))
    expect_only(outcomes, frozenset({"ok"}))
    parts.expect_whole()


def test_everything_ends_when_it_is_told(parts: Parts) -> None:
    """D59: after all of that every part drains, exits with 0 and leaves no process."""
    pids = parts.pids()
    for name in ("router", *(name for name in parts.programs if name != "router")):
        assert parts.programs[name].stop() == 0
    assert not wait_gone(pids, 0)


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = str(tmp_path_factory.mktemp("up"))
    arguments = ("--prefill", "2", "--decode", "2", "--num-blocks", "2000")
    running = Cluster(*arguments, env={"PDCORE_RUN_DIR": folder})
    yield running
    running.close()


def test_a_stopped_and_a_killed_parent(cluster: Cluster) -> None:
    """R7, D48: the parent of all is not in the way of requests: they are served while it is
    stopped. When it is killed under load no process, and with the last of them no segment,
    outlives it, and every client hears of it."""
    pids = cluster.pids()
    assert len(pids) == 10
    assert len(segments(pids)) >= 4

    async def stop(load: Load) -> None:
        os.kill(cluster.pid, signal.SIGSTOP)
        try:
            await load.some_ok(20)
        finally:
            os.kill(cluster.pid, signal.SIGCONT)

    async def kill(load: Load) -> None:
        os.kill(cluster.pid, signal.SIGKILL)
        assert not await asyncio.to_thread(wait_gone, pids, GONE_S)

    served = asyncio.run(Load(cluster.origin, seed=7).run(stop))
    expect_only(served, frozenset({"ok"}))
    outcomes = asyncio.run(Load(cluster.origin, seed=8).run(kill, num_after=0))
    expect_only(outcomes, frozenset({"ok", "lost"}))


@pytest.mark.parametrize("index", [0, -1])
def test_a_killed_part_of_one_command_is_started_again(cluster: Cluster, index: int) -> None:
    """D33, D45: the first and the last part of `pdcore up` (an instance, the router): it says
    which one ended and how, starts it again at its address, serves, and leaves nothing."""
    leader = children()[cluster.pid][index]

    async def kill(load: Load) -> None:
        os.kill(leader, signal.SIGKILL)
        await asyncio.to_thread(cluster.wait_for, r"\S+ +starting again")

    outcomes = asyncio.run(Load(cluster.origin, seed=10).run(kill))
    expect_only(outcomes, LOST | {"lost"})
    cluster.wait_for(r"\S+ ended: killed by SIGKILL")
    until(lambda: len(cluster.pids()) == 10, cluster.pid, GONE_S, "all parts have started")
    pids = cluster.pids()
    assert cluster.stop() == 0
    assert not wait_gone(pids, GONE_S)
