"""One child process, and no orphan of it after any exit of its parent.

A child is a fresh interpreter (spawn, never fork: threads, ZMQ contexts and CUDA do not
survive one). It reads its configuration as the first line of its standard input, and that
pipe stays open: its end means that the parent is gone. On Linux the kernel also kills the
child with the thread that started it (PR_SET_PDEATHSIG), so a SIGKILL of the parent leaves
nothing behind, in a chain of processes too. What the parent must know comes back as JSON
lines over an inherited pipe, whose end means that the child is gone.

Call :func:`spawn` from a thread that lives as long as the child may: the kernel counts the
death of the starting *thread*.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from pdcore.config_loader import child_environment

#: Exit statuses, beside 0: a mistake of the user's (as argparse), anything else that ended
#: a process early, and the parent's death.
EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
EXIT_PARENT_GONE: Final = 75
#: A configuration is a few KiB; a line longer than this is not one.
MAX_LINE_BYTES: Final = 1 << 20
_PR_SET_PDEATHSIG: Final = 1


class Bound(msgspec.Struct, frozen=True, tag="bound"):
    """Where a process listens, ``host:port`` each, known before it is ready (D44)."""

    http: str
    bootstrap: str = ""


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """What a process is busy with, in words for a human."""

    text: str


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """It serves."""


class Health(msgspec.Struct, frozen=True, tag="health"):
    """Changed: empty ``problems`` means it serves."""

    problems: list[str]


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """Why it is about to exit with a status that is not 0: one sentence (D60)."""

    message: str


Report = Bound | Progress | Ready | Health | Failed
_DECODER: Final = msgspec.json.Decoder(Report)


def describe_exit(code: int) -> str:
    """``exit status 3`` or ``killed by SIGKILL``."""
    if code >= 0:
        return "the parent was gone" if code == EXIT_PARENT_GONE else f"exit status {code}"
    with contextlib.suppress(ValueError):
        return f"killed by {signal.Signals(-code).name}"
    return f"killed by signal {-code}"


class Child:
    """The parent's end. Reports are delivered in the running loop until the child is gone;
    then :attr:`exited` holds its exit status (negative: the signal)."""

    def __init__(
        self, name: str, process: subprocess.Popen[bytes], report_fd: int, log: Path | None
    ) -> None:
        self.name = name
        self.log = log
        self.failure = ""
        self._process = process
        self._report_fd = report_fd
        self._partial = b""
        self._on_report: Callable[[Report], None] = lambda report: None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.exited: asyncio.Future[int] | None = None

    @property
    def pid(self) -> int:
        return self._process.pid

    def watch(self, on_report: Callable[[Report], None]) -> asyncio.Future[int]:
        """Begin to deliver reports; the future ends with the child."""
        self._loop = asyncio.get_running_loop()
        self._on_report = on_report
        self.exited = self._loop.create_future()
        os.set_blocking(self._report_fd, False)
        self._loop.add_reader(self._report_fd, self._read)
        return self.exited

    def terminate(self) -> None:
        """Ask it to drain and exit (SIGTERM); nothing if it is gone."""
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()

    async def stop(self, timeout_s: float) -> int:
        """SIGTERM, and SIGKILL after ``timeout_s``; returns the exit status."""
        if self.exited is None:
            raise RuntimeError(f"{self.name}: watch() it first")
        if not self.exited.done():
            self.terminate()
            _, late = await asyncio.wait([self.exited], timeout=timeout_s)
            if late:
                self.kill()
        return await asyncio.shield(self.exited)

    def _read(self) -> None:
        try:
            data = os.read(self._report_fd, 1 << 16)
        except BlockingIOError:
            return
        if not data:
            self._end()
            return
        *lines, self._partial = (self._partial + data).split(b"\n")
        if len(self._partial) > MAX_LINE_BYTES:
            self._partial = b""
        for line in lines:
            try:
                report = _DECODER.decode(line)
            except msgspec.DecodeError:
                continue  # not from us: a library of the child's that writes to any fd
            if isinstance(report, Failed):
                self.failure = report.message
            self._on_report(report)

    def _end(self) -> None:
        """The pipe ended, so the child is exiting: its memory is already gone."""
        if self._loop is None:
            return
        self._loop.remove_reader(self._report_fd)
        os.close(self._report_fd)
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        self._loop.run_in_executor(None, self._process.wait).add_done_callback(self._finish)

    def _finish(self, waited: asyncio.Future[int]) -> None:
        if self.exited is not None and not self.exited.done() and not waited.cancelled():
            self.exited.set_result(waited.result())

    def __repr__(self) -> str:
        return f"Child({self.name}, pid={self.pid})"


def spawn(
    name: str,
    module: str,
    config: bytes,
    *,
    log: Path | None = None,
    num_threads: int | None = None,
) -> Child:
    """Start ``python -m module`` with one line of configuration (no newline in it).

    With ``log`` both output streams are appended to that file before anything runs, so that
    a crash of the interpreter is in it too (R11, D49); otherwise they are ours. The child
    leads its own process group: Ctrl-C reaches only us, and we drain it (never a signal
    from the terminal). Raises OSError when the process cannot be started.
    """
    report_in, report_out = os.pipe()
    try:
        with contextlib.ExitStack() as stack:
            output = None
            if log is not None:
                # Cleaners of temporary folders take what is old, also of those who live (D45).
                log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                output = stack.enter_context(log.open("ab"))
            process = subprocess.Popen(
                [sys.executable, "-m", module, str(report_out), str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT if output is not None else None,
                pass_fds=(report_out,),
                process_group=0,
                env=child_environment(num_threads),
            )
    except OSError:
        os.close(report_in)
        raise
    finally:
        os.close(report_out)
    if process.stdin is not None:
        with contextlib.suppress(BrokenPipeError):  # it died already; `exited` will say so
            process.stdin.write(config + b"\n")
            process.stdin.flush()
    return Child(name, process, report_in, log)


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """While modules and a model are loaded, much is allocated and nothing is garbage: leave
    the collector off, and never look at those objects again."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


class Parent:
    """A child's end: its configuration, and the pipe that reports go to."""

    def __init__(self, config: bytes, report_fd: int) -> None:
        self.config = config
        self._report_fd = report_fd

    def report(self, report: Report) -> None:
        """Never blocks and never fails: a parent that does not read misses it."""
        with contextlib.suppress(OSError):
            os.write(self._report_fd, msgspec.json.encode(report) + b"\n")


def enter_child(argv: list[str]) -> Parent:
    """First thing in a child's ``main``, before heavy imports: tie our life to the parent's
    and read the configuration. Exits the process at once when the parent is gone."""
    report_fd, parent_pid = int(argv[1]), int(argv[2])
    os.set_inheritable(report_fd, False)
    os.set_blocking(report_fd, False)
    die_with_parent(parent_pid)
    line = bytearray()
    while not line.endswith(b"\n"):
        part = os.read(0, 1 << 16)
        if not part or len(line) > MAX_LINE_BYTES:
            os._exit(EXIT_PARENT_GONE)
        line += part
    threading.Thread(target=_exit_at_end_of_input, name="parent-watch", daemon=True).start()
    return Parent(bytes(line[:-1]), report_fd)


def die_with_parent(parent_pid: int) -> None:
    """Linux: SIGKILL us when the thread that started us dies. Without it, and for a parent
    that died before this call, there is the end of standard input."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(EXIT_PARENT_GONE)


def _exit_at_end_of_input() -> None:
    """Nobody is left to drain for: peers learn of our death by our fences, clients by the
    connections that close."""
    with contextlib.suppress(OSError):
        while os.read(0, 1 << 12):
            pass
    os._exit(EXIT_PARENT_GONE)
