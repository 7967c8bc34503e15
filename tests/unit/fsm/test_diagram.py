"""docs/lifecycle.md comes from the Machines, and nothing in it is left out."""

from __future__ import annotations

import re
import types
from pathlib import Path

import pytest

from pdcore.fsm import diagram, peer
from pdcore.fsm.diagram import LIFECYCLES, main, mermaid, render, theory
from pdcore.fsm.table import Lifecycle

TABLES = pytest.mark.parametrize("table", [t for t, _ in LIFECYCLES], ids=lambda t: t.name)


@TABLES
def test_the_diagram_has_every_change_of_state_and_no_other(table: Lifecycle) -> None:
    drawn = set(re.findall(r"^    (\w+) --> (\w+): (\w+)", mermaid(table), re.MULTILINE))
    rows = {
        (row.source.value, row.dest.value, row.event)
        for row in table.rows
        if row.dest is not row.source
    }
    assert drawn == rows


@TABLES
def test_the_diagram_marks_where_it_begins_and_ends(table: Lifecycle) -> None:
    text = mermaid(table)
    assert text.startswith(f"stateDiagram-v2\n    [*] --> {table.initial.value}\n")
    assert set(re.findall(r"(\w+) --> \[\*\]", text)) == {s.value for s in table.terminal}


@TABLES
def test_the_page_names_every_state_event_guard_and_action(table: Lifecycle) -> None:
    page = render()
    for state in table.states:
        assert f"| {state.value} | {table.info[state].meaning} |" in page
    for row in table.rows:
        assert f"| `{row.event}` |" in page
        for name in (*row.actions, *([row.guard] if row.guard else [])):
            assert f"`{name}`" in page


def test_the_theory_becomes_markdown() -> None:
    title, text = theory(peer)
    assert (
        title == "Peer: one pair of ranks, seen from one of them, for one incarnation of the other."
    )
    assert "\n- **Suspect**: several heartbeats in a row went unanswered." in text
    assert "``" not in text
    assert "Theory" not in text


def test_lists_of_a_docstring_are_set_off_by_blank_lines() -> None:
    module = types.ModuleType("m", "T.\n\nRules:\n  - one\n    more\n  - two\nEnd :meth:`A.b`.\n")
    assert theory(module) == ("T.", "Rules:\n\n- one\n  more\n- two\n\nEnd `A.b`.")


def test_the_page_is_deterministic_and_ends_with_one_newline() -> None:
    assert render() == render()
    assert render().endswith("|\n")
    assert not [line for line in render().splitlines() if line != line.rstrip()]


def test_main_prints_or_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert capsys.readouterr().out == render()
    path = tmp_path / "lifecycle.md"
    assert diagram.main(["--write", str(path)]) == 0
    assert path.read_text(encoding="utf-8") == render()
