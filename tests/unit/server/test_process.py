"""Child processes: configuration in, reports out, and no orphan after any exit."""

from __future__ import annotations

import asyncio
import gc
import os
import select
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import msgspec
import pytest

from pdcore.server import process
from pdcore.server.process import Bound, Child, Failed, Health, Ready, Report, describe_exit, spawn

BOUND_S = 20.0

CHILD = """
    from __future__ import annotations
    import os, signal, sys
    from pdcore.server import process
    what = sys.argv[3] if len(sys.argv) > 3 else "{what}"
    if what == "no-prctl":
        process.die_with_parent = lambda pid: None
    me = process.enter_child(sys.argv)
    if what == "crash":
        print("words before the crash", flush=True)
        raise RuntimeError("boom")
    if what == "fail":
        me.report(process.Failed("the model is missing"))
        sys.exit(process.EXIT_USAGE)
    if what == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if what == "chain":
        below = process.spawn("below", "child_wait", b"deeper")
        print(below.pid, flush=True)
    me.report(process.Bound("127.0.0.1:1", me.config.decode()))
    os.write(me._report_fd, b"garbage\\n")
    me.report(process.Ready())
    signal.pause()
"""


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """child_<what> modules that a child process can run."""
    for what in ("wait", "crash", "fail", "stubborn", "chain", "no-prctl"):
        name = f"child_{what.replace('-', '_')}.py"
        (tmp_path / name).write_text(textwrap.dedent(CHILD).replace("{what}", what))
    paths = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    return tmp_path


def gone(pidfd: int) -> bool:
    """Whether the process of a pidfd ends within the bound."""
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(BOUND_S * 1000))


async def until_ready(child: Child) -> list[Report]:
    reports: list[Report] = []
    ready = asyncio.Event()

    def on_report(report: Report) -> None:
        reports.append(report)
        if isinstance(report, Ready | Failed):
            ready.set()

    exited = child.watch(on_report)
    waiter = asyncio.ensure_future(ready.wait())
    await asyncio.wait([waiter, exited], timeout=BOUND_S, return_when=asyncio.FIRST_COMPLETED)
    waiter.cancel()
    return reports


def test_configuration_in_reports_out_and_a_clean_stop(modules: Path) -> None:
    async def run() -> None:
        child = spawn("w", "child_wait", b'{"a": 1}')
        reports = await until_ready(child)
        assert reports == [Bound("127.0.0.1:1", '{"a": 1}'), Ready()]
        assert os.getpgid(child.pid) == child.pid, "Ctrl-C must reach the parent only"
        assert await child.stop(BOUND_S) == -signal.SIGTERM

    asyncio.run(run())


def test_a_child_that_ignores_sigterm_is_killed(modules: Path) -> None:
    async def run() -> None:
        child = spawn("w", "child_stubborn", b"x")
        await until_ready(child)
        assert await child.stop(0.05) == -signal.SIGKILL

    asyncio.run(run())


def test_a_crash_before_ready_leaves_its_words_in_the_log(modules: Path, tmp_path: Path) -> None:
    """R11, D49: both streams, in order. D60: an early death is a report, not a traceback."""

    async def run() -> None:
        log = tmp_path / "log_0.log"
        child = spawn("w", "child_crash", b"x", log=log)
        assert await until_ready(child) == []
        assert child.exited is not None
        assert await child.exited == 1
        text = log.read_text()
        assert text.index("words before the crash") < text.index("RuntimeError: boom")

    asyncio.run(run())


def test_d45_a_log_folder_that_a_cleaner_took_is_made_again(modules: Path, tmp_path: Path) -> None:
    """D45: what cleans temporary folders takes those of long runs too; then the next death
    could not be repaired ("No such file or directory"), and ended the whole cluster."""

    async def run() -> None:
        child = spawn("w", "child_crash", b"x", log=tmp_path / "gone" / "prefill-0" / "log_0.log")
        assert await until_ready(child) == []
        assert child.exited is not None
        assert await child.exited == 1
        assert child.log is not None
        assert "boom" in child.log.read_text()

    asyncio.run(run())


def test_a_failure_says_why(modules: Path) -> None:
    async def run() -> None:
        child = spawn("w", "child_fail", b"x")
        assert await until_ready(child) == [Failed("the model is missing")]
        assert child.failure == "the model is missing"
        assert child.exited is not None
        assert await child.exited == process.EXIT_USAGE

    asyncio.run(run())


PARENT = """
    from __future__ import annotations
    import signal, sys
    from pdcore.server.process import spawn
    child = spawn("chain", sys.argv[1], b"x")
    print(child.pid, flush=True)
    signal.pause()
"""


def start_parent(
    folder: Path, module: str, count: int
) -> tuple[subprocess.Popen[bytes], list[int]]:
    (folder / "parent.py").write_text(textwrap.dedent(PARENT))
    parent = subprocess.Popen(
        [sys.executable, str(folder / "parent.py"), module], stdout=subprocess.PIPE
    )
    return parent, first_numbers(parent, count)


def first_numbers(parent: subprocess.Popen[bytes], count: int) -> list[int]:
    assert parent.stdout is not None
    with parent.stdout as lines:
        return [int(lines.readline()) for _ in range(count)]


@pytest.mark.skipif(sys.platform != "linux", reason="pidfd and PR_SET_PDEATHSIG are Linux's")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_orphan_when_the_parent_of_a_chain_dies(modules: Path, number: signal.Signals) -> None:
    """Issue item 8: SIGKILL of the parent included; a grandchild goes too."""
    parent, pids = start_parent(modules, "child_chain", 2)
    fds = [os.pidfd_open(pid) for pid in pids]
    parent.send_signal(number)
    parent.wait(BOUND_S)
    assert all(gone(fd) for fd in fds)
    for fd in fds:
        os.close(fd)


@pytest.mark.skipif(sys.platform != "linux", reason="pidfd is Linux's")
def test_the_end_of_input_is_enough_where_the_kernel_does_not_help(modules: Path) -> None:
    parent, pids = start_parent(modules, "child_no_prctl", 1)
    fd = os.pidfd_open(pids[0])
    parent.kill()
    parent.wait(BOUND_S)
    assert gone(fd)
    os.close(fd)


@pytest.mark.skipif(sys.platform != "linux", reason="pidfd is Linux's")
def test_without_either_net_the_child_survives(modules: Path) -> None:
    """The check above can fail: a child of plain subprocess outlives its parent."""
    (modules / "plain.py").write_text(
        "import subprocess, sys, signal\n"
        "p = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'],"
        " stdin=subprocess.DEVNULL)\n"
        "print(p.pid, flush=True)\nsignal.pause()\n"
    )
    parent = subprocess.Popen([sys.executable, str(modules / "plain.py")], stdout=subprocess.PIPE)
    (pid,) = first_numbers(parent, 1)
    fd = os.pidfd_open(pid)
    parent.kill()
    parent.wait(BOUND_S)
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    assert not poller.poll(200)
    os.kill(pid, signal.SIGKILL)
    assert gone(fd)
    os.close(fd)


def test_a_child_whose_parent_died_before_it_looked_exits(modules: Path) -> None:
    """The race that PR_SET_PDEATHSIG alone would lose."""
    done = subprocess.run(
        [sys.executable, "-m", "child_wait", "1", "999999999"],
        stdin=subprocess.PIPE,
        timeout=BOUND_S,
        check=False,
    )
    assert done.returncode == process.EXIT_PARENT_GONE


def test_exits_in_words() -> None:
    assert describe_exit(3) == "exit status 3"
    assert describe_exit(-9) == "killed by SIGKILL"
    assert describe_exit(process.EXIT_PARENT_GONE) == "the parent was gone"
    assert describe_exit(-250) == "killed by signal 250"


def test_health_reports_round_trip() -> None:
    line = msgspec.json.encode(Health(["rank 0 is gone"]))
    assert msgspec.json.decode(line, type=Report) == Health(["rank 0 is gone"])


def test_the_collector_is_off_only_while_loading() -> None:
    before = gc.get_freeze_count()
    with process.loading():
        assert not gc.isenabled()
    assert gc.isenabled()
    assert gc.get_freeze_count() > before
    gc.unfreeze()
