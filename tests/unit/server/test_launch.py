"""Supervision of real child processes: told at once, restarted within bounds, stopped."""

from __future__ import annotations

import asyncio
import os
import signal
import textwrap
from collections.abc import Callable, Coroutine
from pathlib import Path

import attrs
import pytest

from pdcore.config import ServerConfig
from pdcore.server.launch import STEADY_S, Deaths, Supervisor, cpu_slice
from pdcore.server.process import EXIT_USAGE, Child, spawn

BOUND_S = 30.0
FAST = ServerConfig(
    ready_timeout_s=BOUND_S,
    restart_initial_s=0.01,
    restart_max_s=0.02,
    max_restarts=2,
    stop_timeout_s=BOUND_S,
)

WORKER = """
    from __future__ import annotations
    import signal, sys
    from pdcore.server import process
    me = process.enter_child(sys.argv)
    what = me.config.decode()
    if what == "misconfigured":
        me.report(process.Failed("the model is missing"))
        sys.exit(process.EXIT_USAGE)
    if what == "crash":
        sys.exit(3)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    me.report(process.Progress("serving"))
    signal.pause()
"""


class Rig:
    """A supervisor over worker processes whose behaviour is chosen per start."""

    def __init__(
        self, behaviours: list[str], config: ServerConfig = FAST, num_ranks: int = 1
    ) -> None:
        self.behaviours = behaviours
        self.num_serving = 0
        self.lost: list[tuple[int, str]] = []
        self.serving = asyncio.Event()
        self.was_lost = asyncio.Event()
        self.supervisor = Supervisor(
            self.start,
            range(num_ranks),
            config,
            on_lost=self._on_lost,
            on_progress=self._on_progress,
        )

    def start(self, rank: int) -> Child:
        behaviour = self.behaviours.pop(0) if len(self.behaviours) > 1 else self.behaviours[0]
        if behaviour == "unstartable":
            raise OSError("no memory for a process")
        return spawn(f"worker-{rank}", "worker_child", behaviour.encode())

    def _on_lost(self, rank: int, detail: str) -> None:
        self.lost.append((rank, detail))
        self.was_lost.set()

    def _on_progress(self, rank: int, text: str) -> None:
        assert text == "serving"
        self.num_serving += 1
        if self.num_serving >= len(self.supervisor.pids()):
            self.serving.set()


@pytest.fixture(autouse=True)
def worker_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "worker_child.py").write_text(textwrap.dedent(WORKER))
    paths = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))


def run(main: Callable[[], Coroutine[None, None, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(BOUND_S):
            await main()

    asyncio.run(bounded())


def test_a_dead_worker_is_told_and_restarted() -> None:
    """D45: the dispatcher hears of the death at once."""

    async def main() -> None:
        rig = Rig(["serve"])
        rig.supervisor.run()
        await rig.serving.wait()
        rig.supervisor.mark_ready(0)
        first = rig.supervisor.pids()[0]
        rig.serving.clear()
        os.kill(first, signal.SIGKILL)
        await rig.was_lost.wait()
        assert rig.lost == [(0, "killed by SIGKILL")]
        await rig.serving.wait()
        assert rig.supervisor.pids()[0] != first
        assert not rig.supervisor.gave_up.done()
        await rig.supervisor.stop(0)
        assert rig.supervisor.pids() == {}
        assert len(rig.lost) == 1, "an asked-for exit is no loss"

    run(main)


def test_d45_a_callback_that_raises_is_not_a_worker_that_nobody_watches() -> None:
    """D45: the instance gives up aloud instead of never starting that worker again."""

    async def main() -> None:
        rig = Rig(["crash"])

        def broken(rank: int, detail: str) -> None:
            raise RuntimeError("a bug")

        rig.supervisor._on_lost = broken
        rig.supervisor.run()
        over = await rig.supervisor.gave_up
        assert over == ("worker 0 cannot be watched: RuntimeError: a bug", 1)
        await rig.supervisor.stop(0)

    run(main)


def test_restarts_without_becoming_ready_are_bounded() -> None:
    """D33, D45: it gives up with the reason instead of looking healthy for ever."""

    async def main() -> None:
        rig = Rig(["crash"])
        rig.supervisor.run()
        assert await rig.supervisor.gave_up == ("worker 0: exit status 3", 3)
        assert len(rig.lost) == FAST.max_restarts + 1
        await rig.supervisor.stop(0)

    run(main)


def test_a_configuration_mistake_is_not_retried() -> None:
    async def main() -> None:
        rig = Rig(["misconfigured"])
        rig.supervisor.run()
        assert await rig.supervisor.gave_up == ("worker 0: the model is missing", EXIT_USAGE)
        assert len(rig.lost) == 1
        await rig.supervisor.stop(0)

    run(main)


def test_becoming_ready_forgives_earlier_failures() -> None:
    async def main() -> None:
        config = attrs.evolve(FAST, max_restarts=1)
        rig = Rig(["crash", "serve", "crash", "serve"], config)
        rig.supervisor.run()
        await rig.serving.wait()
        rig.supervisor.mark_ready(0)
        rig.serving.clear()
        os.kill(rig.supervisor.pids()[0], signal.SIGKILL)
        await rig.serving.wait()
        assert len(rig.lost) == 3
        assert not rig.supervisor.gave_up.done()
        await rig.supervisor.stop(0)

    run(main)


def pauses(deaths: Deaths, lives_s: list[float | None]) -> list[float]:
    """Of a place whose lives serve for so long; None: it never serves."""
    config, now_s, found = ServerConfig(restart_initial_s=0.5, restart_max_s=4.0), 0.0, []
    for life_s in lives_s:
        if life_s is not None:
            deaths.served(now_s)
            now_s += life_s
        deaths.died(now_s)
        found.append(deaths.pause_s(config))
    return found


def check_hardly_serving_is_no_reason_to_hurry(deaths: Deaths) -> None:
    assert pauses(deaths, [0.1] * 6) == [0.5, 1.0, 2.0, 4.0, 4.0, 4.0]
    assert deaths.failures == 0, "a client's request may be what ends them: no end of its own"


class ForgivesWhoeverWasReady(Deaths):
    """Ready once, and everything is forgotten."""

    def served(self, now_s: float) -> None:
        super().served(now_s)
        self.brief = 0


def test_d45_lives_that_hardly_serve_make_the_pause_longer() -> None:
    """D45: a worker that died at its first request was started twice a second, for ever."""
    check_hardly_serving_is_no_reason_to_hurry(Deaths())
    with pytest.raises(AssertionError):
        check_hardly_serving_is_no_reason_to_hurry(ForgivesWhoeverWasReady())
    assert pauses(Deaths(), [0.1, 0.1, STEADY_S, 0.1]) == [0.5, 1.0, 0.5, 0.5]
    assert pauses(Deaths(), [None, None, 0.1, None]) == [0.5, 1.0, 0.5, 1.0]
    deaths = Deaths()
    assert pauses(deaths, [None] * 20)[-1] == 4.0
    assert deaths.failures == 20


def test_a_process_that_cannot_start_counts_as_a_failure() -> None:
    async def main() -> None:
        rig = Rig(["unstartable", "serve"])
        rig.supervisor.run()
        await rig.serving.wait()
        assert rig.lost == [(0, "cannot be started: no memory for a process")]
        await rig.supervisor.stop(0)

    run(main)


def test_a_worker_that_is_never_ready_is_ended() -> None:
    async def main() -> None:
        config = ServerConfig(ready_timeout_s=0.1, max_restarts=0, stop_timeout_s=BOUND_S)
        rig = Rig(["serve"], config)
        rig.supervisor.run()
        gave_up = await rig.supervisor.gave_up
        assert gave_up.reason == "worker 0: not ready within 0.1 s"
        await rig.supervisor.stop(0)

    run(main)


def test_stop_while_waiting_for_the_next_try() -> None:
    async def main() -> None:
        config = ServerConfig(restart_initial_s=1000.0, restart_max_s=1000.0)
        rig = Rig(["crash"], config)
        rig.supervisor.run()
        await rig.was_lost.wait()
        await rig.supervisor.stop(0)
        assert rig.supervisor.pids() == {}

    run(main)


async def kill_while_draining(rig: Rig, patience_s: float = BOUND_S) -> None:
    """Two ranks of a group; the second is killed while both drain, and takes the first along."""
    rig.supervisor.run()
    await rig.serving.wait()
    for rank in range(2):
        rig.supervisor.mark_ready(rank)
    pids = rig.supervisor.pids()
    stopping = asyncio.ensure_future(rig.supervisor.stop(BOUND_S))
    await asyncio.sleep(0)
    os.kill(pids[1], signal.SIGKILL)
    lost = asyncio.ensure_future(rig.was_lost.wait())
    await asyncio.wait([lost, stopping], timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
    try:
        assert rig.lost[:1] == [(1, "killed by SIGKILL")]
        rig.supervisor.end_stuck(0, "rank 1 of its group was lost")
        await stopping
        assert rig.supervisor.pids() == {}
    finally:
        lost.cancel()
        rig.supervisor.kill()
        await stopping


def test_a_worker_that_dies_while_draining_is_told() -> None:
    """The others of its group stand in a round that nobody closes: without the word the whole
    drain time was waited for, and clients with it (D59)."""

    async def main() -> None:
        await kill_while_draining(Rig(["serve"], num_ranks=2))

    run(main)

    async def mutant() -> None:
        rig = Rig(["serve"], num_ranks=2)
        rig.supervisor._on_lost = lambda rank, detail: None  # as if only while serving
        await kill_while_draining(rig, patience_s=0.2)

    with pytest.raises(AssertionError):
        run(mutant)


def test_kill_is_immediate() -> None:
    async def main() -> None:
        rig = Rig(["serve"])
        rig.supervisor.run()
        await rig.serving.wait()
        rig.supervisor.kill()
        await rig.supervisor.stop(BOUND_S)
        assert rig.lost == []

    run(main)


@pytest.mark.parametrize(
    ("cores", "count", "slices"),
    [
        ([0, 1, 2, 3], 2, [(0, 1), (2, 3)]),
        ([8, 9, 10], 2, [(8,), (9,)]),
        ([0], 2, [(), ()]),
        ([3, 1, 2, 0], 1, [(0, 1, 2, 3)]),
    ],
)
def test_cores_are_sliced(cores: list[int], count: int, slices: list[tuple[int, ...]]) -> None:
    """R11, D49 (only what this process may use), D60 (fewer cores than workers is legal)."""
    assert [cpu_slice(cores, i, count) for i in range(count)] == slices


def test_d60_mutant_that_pins_to_nothing_is_caught() -> None:
    def check(cores: tuple[int, ...]) -> None:
        assert cores == () or len(cores) >= 1

    def mutant(cores: list[int], index: int, count: int) -> tuple[int, ...]:
        share = len(cores) // count
        return (cores[index * share],)  # IndexError, as in the seed: start fails

    check(cpu_slice([0], 1, 2))
    with pytest.raises(IndexError):
        check(mutant([], 1, 2))
    with pytest.raises(ValueError, match="index must be below count"):
        cpu_slice([0], 2, 2)


def test_paths_of_this_host_reach_the_log_and_not_the_clients(tmp_path: Path) -> None:
    """Clients read what ``on_lost`` hears: in errors of the API and in /health."""

    def check(lost: list[tuple[int, str]]) -> None:
        assert all(str(tmp_path) not in detail for _, detail in lost), "a client reads our paths"

    async def main() -> None:
        rig = Rig(["crash"])
        log = tmp_path / "log_0.log"
        rig.supervisor = Supervisor(
            lambda rank: spawn("worker-0", "worker_child", b"crash", log=log),
            [0],
            FAST,
            on_lost=rig._on_lost,
        )
        rig.supervisor.run()
        gave_up = await rig.supervisor.gave_up
        assert gave_up.reason == f"worker 0: exit status 3 (log: {log})"
        assert rig.lost[-1] == (0, "exit status 3")
        check(rig.lost)
        with pytest.raises(AssertionError, match="reads our paths"):
            check([(0, gave_up.reason.removeprefix("worker 0: "))])
        await rig.supervisor.stop(0)

    run(main)
