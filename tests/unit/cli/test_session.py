"""Status lines: once per change, quiet when it ends."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from rich.console import Console

from pdcore.cli import main
from pdcore.cli.session import StatusView
from pdcore.server.members import Member
from pdcore.server.process import Bound, Child


class Rig:
    """A member whose process is not needed, and a console that is a string."""

    def __init__(self, *, is_terminal: bool = False) -> None:
        self.out = io.StringIO()
        console = Console(file=self.out, force_terminal=is_terminal, width=100)
        self.view = StatusView(console)
        # The child is only asked for its exit, which a watched one has not had.
        self.member = Member("prefill-0", "prefill", Child.__new__(Child))
        self.member.child.exited = None
        self.member.child.log = Path("x")

    def lines(self) -> list[str]:
        return self.out.getvalue().splitlines()


def test_a_line_per_change_where_there_is_no_terminal() -> None:
    rig = Rig()
    with rig.view as view:
        view.show([rig.member])
        view.show([rig.member])
        rig.member.progress = "worker 0: loading the model"
        view.show([rig.member])
        rig.member.bound = Bound("127.0.0.1:1")
        rig.member.is_ready = True
        view.show([rig.member])
    assert rig.lines() == [
        "prefill-0  starting",
        "prefill-0  worker 0: loading the model",
        "prefill-0  ready  http://127.0.0.1:1",
    ]


def test_after_settling_only_changes_are_printed() -> None:
    rig = Rig(is_terminal=True)
    with rig.view as view:
        view.show([rig.member])
        rig.member.is_ready = True
        view.settle([rig.member])
        before = len(rig.lines())
        view.show([rig.member])
        assert len(rig.lines()) == before
        rig.member.problems = ["rank 0: process is gone"]
        view.show([rig.member])
        assert "not ready any more: rank 0" in rig.lines()[-1]


def test_a_quiet_view_says_nothing() -> None:
    rig = Rig()
    rig.view.is_quiet = True
    rig.view.show([rig.member])
    assert rig.lines() == []


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where commands make their own folders, as nobody chose another."""
    monkeypatch.delenv("PDCORE_RUN_DIR", raising=False)
    monkeypatch.setenv("PDCORE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


@pytest.mark.parametrize(
    "arguments",
    [
        ["up", "--set", "model_config.next_n=3"],
        ["up", "--prefill", "0"],
        ["demo", "--transport", "pigeon"],
        ["demo", "--decode", "65"],
        ["serve", "--role", "prefill", "--batch-size", "0"],
        ["serve", "--role", "router", "--prefill-addrs", "a", "--decode-addrs", "b:1"],
    ],
)
def test_a_mistake_leaves_nothing_behind(arguments: list[str], temporary: Path) -> None:
    is_router = "router" in arguments
    assert main([*arguments, *([] if is_router else ["--simulated"])]) == 2
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("command", [["up", "--port=0"], ["serve", "--role=decode", "--port=0"]])
def test_nor_does_one_that_only_a_process_finds(
    command: list[str], temporary: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The KV pool is sized by the worker; ``start`` raises ConfigError, and cleans up."""
    assert main([*command, "--simulated", "--kv-cache-bytes=1", "--log-level=error"]) == 2
    assert "the KV pool holds 0 tokens" in capfd.readouterr().err
    assert [path.name for path in temporary.iterdir()] == ["cache"]


def test_a_console_whose_reader_left_falls_silent_and_says_so_once() -> None:
    """``pdcore up | head -1`` drains instead of dying of a traceback in a callback. In a
    process of its own, because its standard output is given up."""
    code = (
        "import sys\n"
        "from pdcore.cli.session import PipeConsole\n"
        "console = PipeConsole()\n"
        "console.on_cut = lambda: print('cut', file=sys.stderr)\n"
        "sys.stdin.read()\n"
        "for _ in range(3): console.print('line')\n"
    )
    reader, writer = os.pipe()
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=writer, stderr=subprocess.PIPE
    )
    os.close(writer)
    os.close(reader)
    _, said = child.communicate(b"", timeout=60)
    assert (child.returncode, said) == (0, b"cut\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_d45_a_full_disk_costs_lines_and_nothing_else() -> None:
    """D45: ``pdcore up > log`` on a disk that is full: the first line that could not be written
    raised in the callback that watches a member, and one death ended the whole cluster. It is
    no reader who left either, so nothing is cut. The same for what a role says of itself."""
    code = (
        "import sys\n"
        "from pdcore.cli.serve import _say\n"
        "from pdcore.cli.session import PipeConsole\n"
        "console = PipeConsole()\n"
        "console.on_cut = lambda: print('cut', file=sys.stderr)\n"
        "_say('ready')\n"
        "for _ in range(3): console.print('line')\n"
    )
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, timeout=60
        )
    told = b"pdcore: nothing more is printed here: No space left on device\n"
    assert (done.returncode, done.stderr) == (0, told)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_complaint_that_nobody_can_hear_is_no_error() -> None:
    """D59: it is made in the handler of a signal, and a SIGTERM must drain all the same."""
    code = "from pdcore.cli.options import complain\ncomplain('x')\nprint('after')"
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=full, timeout=60
        )
    assert done.stdout == b"after\n"
