"""A cluster in the foreground: its status on the terminal, Ctrl-C drains, twice ends it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Final

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pdcore.cli.options import complain
from pdcore.cli.workplace import Workplace
from pdcore.errors import ConfigError
from pdcore.server.cluster import Cluster, ClusterConfig, ClusterFailed
from pdcore.server.members import Member

EXIT_FAILED: Final = 1
#: Exit status after a second Ctrl-C (128 + SIGINT).
EXIT_FORCED: Final = 130


class PipeConsole(Console):
    """A console whose reader may go away (``pdcore up | head -1``), or whose file may be on a
    full disk: it falls silent, and says so once instead of raising wherever a line was printed.
    Without a reader the command ends; for want of a line nobody's request does."""

    def __init__(self) -> None:
        super().__init__()
        self.on_cut: Callable[[], None] = lambda: None

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            super().__exit__(kind, error, trace)
        except OSError as failed:
            self._fall_silent()
            complain(f"nothing more is printed here: {failed.strerror or failed}")

    def on_broken_pipe(self) -> None:
        self._fall_silent()
        self.on_cut()

    def _fall_silent(self) -> None:
        self.quiet = True
        # What is still buffered must not raise when the interpreter ends.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


class StatusView:
    """One line per process: redrawn on a terminal, printed when it changes elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._shown: dict[str, str] = {}
        #: What follows is expected, or said once in words.
        self.is_quiet = False

    def __enter__(self) -> StatusView:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.stop()

    def settle(self, members: list[Member]) -> None:
        """Everything is up: from now on a change is a line of its own."""
        self._live.stop()
        self._shown = {member.name: _line(member) for member in members}

    def show(self, members: list[Member]) -> None:
        if self.is_quiet:
            return
        if self._live.is_started:
            self._live.update(_table(members), refresh=True)
            return
        for member in members:
            line = _line(member)
            if self._shown.get(member.name) != line and not member.has_ended:
                self._shown[member.name] = line
                self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def _line(member: Member) -> str:
    return f"{member.name:<10} {member.status}{_address(member)}"


def _address(member: Member) -> str:
    return f"  http://{member.bound.http}" if member.bound is not None and member.is_ready else ""


def _table(members: list[Member]) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    for member in members:
        good = member.is_ready and not member.problems
        status = Text(member.status, "green" if good else "yellow")
        table.add_row(member.name, status, Text(_address(member).strip()))
    return table


async def run_cluster(
    config: ClusterConfig,
    place: Workplace,
    console: PipeConsole,
    serve: Callable[[Cluster, asyncio.Event], Awaitable[int]],
) -> int:
    """Start, hand over to ``serve(cluster, stopping)``, drain; returns the exit status.

    ``stopping`` is set by the first SIGINT or SIGTERM, or when nobody reads what is printed
    any more. Raises ConfigError for a mistake in
    the configuration that only a process could find.
    """
    stopping = asyncio.Event()
    console.on_cut = stopping.set
    with StatusView(console) as view:
        cluster = Cluster(
            config, place.cache_dir, place.run_dir, lambda: view.show(cluster.members)
        )
        forced = asyncio.Event()
        _handle_signals(cluster, stopping, forced)
        status = EXIT_FAILED
        mistake: ConfigError | None = None
        try:
            if await _until_started(cluster, stopping):
                view.settle(cluster.members)
                status = await serve(cluster, stopping)
            else:
                status = 0
        except ClusterFailed as error:
            complain(str(error))
        except ConfigError as error:
            mistake = error
        finally:
            view.is_quiet = True
            await cluster.stop()
    if mistake is not None:  # its message says it all
        place.remove()
        raise mistake
    if forced.is_set():
        status = EXIT_FORCED
    if status in (0, EXIT_FORCED):
        place.remove()
    else:
        place.keep()
        complain(f"the logs are in {place.run_dir}")
    return status


async def _until_started(cluster: Cluster, stopping: asyncio.Event) -> bool:
    """False when it was told to stop before it was ready."""
    starting = asyncio.ensure_future(cluster.start())
    told = asyncio.ensure_future(_told(stopping))
    done, _ = await asyncio.wait([starting, told], return_when=asyncio.FIRST_COMPLETED)
    told.cancel()
    if starting in done:
        starting.result()
        return True
    starting.cancel()
    return False


async def _told(stopping: asyncio.Event) -> None:
    await stopping.wait()


async def until_told(cluster: Cluster, stopping: asyncio.Event) -> int:
    """Wait for Ctrl-C, or for a member that ends by itself; returns the exit status."""
    told = asyncio.ensure_future(_told(stopping))
    failing = asyncio.ensure_future(cluster.failed())
    await asyncio.wait([told, failing], return_when=asyncio.FIRST_COMPLETED)
    status = 0
    if failing.done() and not stopping.is_set():
        complain(failing.result())
        status = EXIT_FAILED
    for waiting in (told, failing):
        waiting.cancel()
    return status


def _handle_signals(cluster: Cluster, stopping: asyncio.Event, forced: asyncio.Event) -> None:
    def on_signal() -> None:
        if not stopping.is_set():
            stopping.set()
            complain("draining; press Ctrl-C again to end at once")
        else:
            forced.set()
            cluster.kill()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
