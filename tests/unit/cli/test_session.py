"""Status lines: once per change, quiet when it ends."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from pdcore.cli.session import StatusView
from pdcore.server.cluster import Member
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
