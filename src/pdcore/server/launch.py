"""The worker processes of one instance: spawned, watched, restarted within bounds, stopped.

A worker that dies is told to the dispatcher at once, which fails what it had (D45), and is
started again after a pause that doubles. One that never becomes ready within its time is
ended. After ``max_restarts`` tries in a row without becoming ready, or when a worker says
that its configuration is wrong, the instance gives up: health says why, the process exits
with a status that is not 0, and an outer supervisor decides (D33, D45).

Everything runs on one event loop, in the thread that also spawns (see
:mod:`pdcore.server.process`).
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from pdcore.config import ServerConfig
from pdcore.server.process import (
    EXIT_USAGE,
    Child,
    Progress,
    Report,
    describe_exit,
)

_log: Final = logging.getLogger(__name__)


class GaveUp(NamedTuple):
    """Why, and the exit status of the last worker: EXIT_USAGE for a mistake of the user's."""

    reason: str
    status: int


#: Who ends sooner than this after it began to serve has hardly served.
STEADY_S: Final = 2.0


class Deaths:
    """How the processes in one place ended, in a row. Starts that never served have a bound;
    lives that hardly served only lengthen the pause, for a client's request may be what ends
    them, and that must neither end the instance nor start processes without a break (D45).
    ``now_s`` is monotonic time."""

    __slots__ = ("_served_s", "brief", "failures")

    def __init__(self) -> None:
        #: Starts that never served.
        self.failures = 0
        #: Lives that hardly served.
        self.brief = 0
        self._served_s: float | None = None

    def served(self, now_s: float) -> None:
        self.failures = 0
        self._served_s = now_s

    def died(self, now_s: float) -> None:
        if self._served_s is None:
            self.failures += 1
        else:
            self.brief = self.brief + 1 if now_s - self._served_s < STEADY_S else 0
        self._served_s = None

    def pause_s(self, config: ServerConfig) -> float:
        """Before the next start: doubled for every death but the first."""
        doublings = min(max(0, self.failures + self.brief - 1), 16)
        pause_s: float = config.restart_initial_s * 2**doublings
        return min(pause_s, config.restart_max_s)


class _Slot:
    """One rank's place: the process that fills it now, and how its former ones ended."""

    __slots__ = ("child", "deaths", "is_ready", "ready", "task")

    def __init__(self) -> None:
        self.child: Child | None = None
        self.task: asyncio.Task[None] | None = None
        self.deaths = Deaths()
        self.is_ready = False
        self.ready: asyncio.Future[int] = asyncio.get_running_loop().create_future()


class Supervisor:
    """``start(rank)`` spawns the process of a rank; it may raise OSError, which counts as a
    failed start. ``on_lost(rank, detail)`` is called for every death while serving, and for
    one that did not drain while others still do; ``on_progress(rank, text)`` for what a worker
    says it is busy with."""

    def __init__(
        self,
        start: Callable[[int], Child],
        ranks: Sequence[int],
        config: ServerConfig,
        *,
        on_lost: Callable[[int, str], None],
        on_progress: Callable[[int, str], None] | None = None,
    ) -> None:
        self._start = start
        self._config = config
        self._on_lost = on_lost
        self._on_progress = on_progress or (lambda rank, text: None)
        self._slots = {rank: _Slot() for rank in ranks}
        self._is_stopping = False
        #: Who is left is ended: no death is a loss any more.
        self._is_ending = False
        #: Resolves when the instance gives up.
        self.gave_up: asyncio.Future[GaveUp] = asyncio.get_running_loop().create_future()

    def run(self) -> None:
        """Start every worker and keep them running."""
        loop = asyncio.get_running_loop()
        for rank, slot in self._slots.items():
            slot.task = loop.create_task(self._keep_running(rank, slot), name=f"worker-{rank}")
            slot.task.add_done_callback(functools.partial(self._on_unwatched, rank))

    def mark_ready(self, rank: int) -> None:
        """The worker serves: its next death is a first one again."""
        slot = self._slots[rank]
        slot.is_ready = True
        slot.deaths.served(asyncio.get_running_loop().time())
        if not slot.ready.done():
            slot.ready.set_result(0)

    def end_stuck(self, rank: int, detail: str) -> None:
        """SIGKILL for a worker that hangs, which nothing else reaches; then as for any other
        death. Nothing if it is gone."""
        child = self._slots[rank].child
        if child is not None:
            child.failure = detail
            child.kill()

    def pids(self) -> dict[int, int]:
        """Rank -> process id of the workers that run now."""
        return {rank: s.child.pid for rank, s in self._slots.items() if s.child is not None}

    def kill(self) -> None:
        """End the workers that are left, now. They are not restarted."""
        self._is_stopping = self._is_ending = True
        for slot in self._slots.values():
            if slot.child is not None:
                slot.child.kill()

    async def stop(self, drain_s: float) -> None:
        """Let ready workers, who were told to drain, finish within ``drain_s``; end the
        others at once. SIGTERM then, and SIGKILL after ``stop_timeout_s``. Idempotent."""
        self._is_stopping = True
        for slot in self._slots.values():
            if slot.child is None and slot.task is not None:
                slot.task.cancel()  # it waits for its next try
            elif slot.child is not None and not slot.is_ready:
                slot.child.terminate()
        tasks = [slot.task for slot in self._slots.values() if slot.task is not None]
        if not tasks:
            return
        await asyncio.wait(tasks, timeout=drain_s)
        self._is_ending = True
        children = [slot.child for slot in self._slots.values() if slot.child is not None]
        await asyncio.gather(*(c.stop(self._config.stop_timeout_s) for c in children))
        await asyncio.wait(tasks)

    def _on_unwatched(self, rank: int, task: asyncio.Task[None]) -> None:
        """Nobody watches this worker any more. By a bug of ours, or of a callback: then the
        instance must not go on as if somebody did (D45)."""
        error = None if task.cancelled() else task.exception()
        if error is not None and not self.gave_up.done():
            _log.error("watching worker %d failed", rank, exc_info=error)
            why = f"worker {rank} cannot be watched: {type(error).__name__}: {error}"
            self.gave_up.set_result(GaveUp(why, 1))

    async def _keep_running(self, rank: int, slot: _Slot) -> None:
        while True:
            detail, log, status = await self._run_once(rank, slot)
            # Clients read ``detail`` in errors and /health: no path of this host is in it.
            told = f"{detail} (log: {log})" if log is not None else detail
            if self._is_stopping:
                if status != 0 and not self._is_ending:
                    # Those that cannot drain without it must not be waited for.
                    self._on_lost(rank, detail)
                return
            slot.is_ready = False
            slot.deaths.died(asyncio.get_running_loop().time())
            is_over = status == EXIT_USAGE or slot.deaths.failures > self._config.max_restarts
            if is_over and not self.gave_up.done():
                self.gave_up.set_result(GaveUp(f"worker {rank}: {told}", status))
            self._on_lost(rank, detail)
            if is_over:
                return
            _log.error("worker %d: %s; it is started again", rank, told)
            await asyncio.sleep(slot.deaths.pause_s(self._config))

    async def _run_once(self, rank: int, slot: _Slot) -> tuple[str, Path | None, int]:
        """One life of a worker: (how it ended, the log that says why, exit status)."""
        slot.ready = asyncio.get_running_loop().create_future()

        def on_report(report: Report) -> None:
            if isinstance(report, Progress):
                self._on_progress(rank, report.text)

        try:
            child = self._start(rank)
        except OSError as error:
            return f"cannot be started: {error.strerror or error}", None, 1
        slot.child = child
        exited = child.watch(on_report)
        try:
            status = await self._until_exit(child, exited, slot)
        finally:
            slot.child = None
        log = None if status == EXIT_USAGE else child.log
        return child.failure or describe_exit(status), log, status

    async def _until_exit(self, child: Child, exited: asyncio.Future[int], slot: _Slot) -> int:
        """Its exit status; a worker that is not ready in time is ended."""
        done, _ = await asyncio.wait(
            [slot.ready, exited],
            timeout=self._config.ready_timeout_s,
            return_when=asyncio.FIRST_COMPLETED,
        )
        if not done:
            child.failure = f"not ready within {self._config.ready_timeout_s:g} s"
            return await child.stop(self._config.stop_timeout_s)
        return await asyncio.shield(exited)


def cpu_slice(cores: Sequence[int], index: int, count: int) -> tuple[int, ...]:
    """The cores of worker ``index`` of ``count``: equal slices of what this process may use;
    empty ("do not pin") where there are fewer cores than workers (R11, D60). Two roles on
    one host share no core if their processes were given different ones (D49).
    """
    if not 0 <= index < count:
        raise ValueError(f"index must be below count ({count}), got {index}")
    share = len(cores) // count
    return tuple(sorted(cores)[index * share : (index + 1) * share])
