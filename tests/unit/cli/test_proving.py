"""Reports of proofs, on worlds of a few states."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest

from pdcore.cli import main, proving
from pdcore.errors import ConfigError
from pdcore.sim.configurations import Configuration, configuration
from pdcore.sim.explore import Exploration, Move
from pdcore.sim.firing import ROW_IDS


class Countdown:
    """3, 2, 1, 0; the mutant stops at 1 or counts into the negative."""

    def __init__(self, mutant: str = "", bad: int = -1) -> None:
        self.end = 1 if mutant == "free-on-abort" else 0
        self.bad = bad

    def initial(self) -> int:
        return 3

    def moves(self, state: int) -> Iterable[Move[int]]:
        if state > self.end:
            yield Move(f"from {state}", False, state - 1, (ROW_IDS["sender"][0],))

    def problems(self, state: int) -> Iterable[str]:
        if state == self.bad:
            yield f"{state} is bad"

    def is_goal(self, state: int) -> bool:
        return state == 0

    def show(self, state: int) -> str:
        return f"at {state}"


def countdown(
    name: str = "countdown", *, bad: int = -1, catches: tuple[str, ...] = ()
) -> Configuration:
    return configuration(
        name,
        "counts",
        lambda mutant: Countdown(mutant, bad),
        bounds={"from": 3},
        invariants=("no bad number",),
        catches=catches,
    )


@pytest.fixture
def worlds(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = (countdown(catches=("free-on-abort",)), countdown("broken", bad=1))
    monkeypatch.setattr(proving, "CONFIGURATIONS", listed)


@pytest.mark.usefixtures("worlds")
def test_json_has_what_the_issue_asks_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Issue 3, point 8: states, seconds, bounds, invariants, violations; per world too."""
    assert main(["verify", "lifecycles", "--json", "--only", "countdown"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["states"], report["exhausted"], report["violations"]) == (4, True, [])
    assert report["bounds"] == {"countdown": {"from": 3}}
    assert report["invariants"] == ["no bad number"]
    (world,) = report["configurations"]
    assert (world["states"], world["transitions"], world["exhausted"]) == (4, 3, True)
    assert report["rows"]["sender"][ROW_IDS["sender"][0]] == 3
    assert len(report["rows_never_taken"]) == sum(map(len, ROW_IDS.values())) - 1


@pytest.mark.usefixtures("worlds")
def test_a_violation_and_rows_that_nobody_took_fail_the_whole_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", "lifecycles", "--json", "--save", str(tmp_path)]) == 1
    violations = json.loads(capsys.readouterr().out)["violations"]
    assert violations[0]["problem"] == "1 is bad"
    assert violations[0]["trace"] == ["from 3", "from 2"]
    assert {v["kind"] for v in violations[1:]} == {"coverage"}
    row, unseen = ROW_IDS["sender"][:2]
    problems = [v["problem"] for v in violations[1:]]
    assert f"taken 5 times, at least 100: {row}" in problems
    assert f"never taken: {unseen}" in problems
    assert main(["verify", "lifecycles", "--replay", str(tmp_path / "lifecycles-broken.json")]) == 1
    assert "BROKEN: 1 is bad" in capsys.readouterr().out


def explored(rows: dict[str, int]) -> list[proving.Ran]:
    """A run that found nothing wrong, and took the rows so often."""
    found = Exploration(4, 3, 0.0, 3, True, (), rows)
    return [proving.Ran(countdown(), found)]


def test_a_whole_run_takes_every_row_a_hundred_times(tmp_path: Path) -> None:
    """Issue 3, point 8: over the closing run every row of every table at least 100 times; a
    run of some worlds may take them less often."""
    rows = {row: proving.MIN_TAKEN for table in ROW_IDS.values() for row in table}
    enough = proving.report_of(explored(rows), 1.0, is_whole=True, save=tmp_path)
    assert (enough["violations"], enough["rows_rarely_taken"]) == ([], {})
    rare, unseen = ROW_IDS["sender"][:2]
    short = explored(rows | {rare: 99, unseen: 0})
    part = proving.report_of(short, 1.0, is_whole=False, save=tmp_path)
    assert (part["violations"], part["rows_rarely_taken"]) == ([], {rare: 99})
    assert part["rows_never_taken"] == [unseen]
    whole = proving.report_of(short, 1.0, is_whole=True, save=tmp_path)
    assert whole["violations"] == [
        {"kind": "coverage", "problem": f"never taken: {unseen}"},
        {"kind": "coverage", "problem": f"taken 99 times, at least 100: {rare}"},
    ]


@pytest.mark.usefixtures("worlds")
def test_people_get_a_table_the_trace_and_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--only", "countdown,broken", "--save", str(tmp_path)]
    assert main(["verify", "lifecycles", *arguments]) == 1
    out = capsys.readouterr().out
    assert "holds, all seen" in out
    assert "  1 from 3\n" in out
    assert f"replay: pdcore verify lifecycles --replay {tmp_path}/lifecycles-broken.json" in out


@pytest.mark.usefixtures("worlds")
def test_a_mutant_that_is_not_caught_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save = ["--save", str(tmp_path)]
    assert main(["verify", "lifecycles", "--mutant", "free-on-abort", "--json", *save]) == 0
    (row,) = json.loads(capsys.readouterr().out)["mutants"]
    assert (row["caught"], row["kind"], row["states"]) == (True, "deadlock", 3)
    blind = (countdown(catches=("send-once",)),)
    monkeypatch.setattr(proving, "CONFIGURATIONS", blind)
    assert main(["verify", "lifecycles", "--mutant", "all", *save]) == 1
    assert "NOT CAUGHT" in capsys.readouterr().out


@pytest.mark.usefixtures("worlds")
def test_a_deadlock_that_is_mended_does_not_fail_any_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A replay looks whether the end can be reached; it does not repeat what its file says."""
    save = ["--save", str(tmp_path)]
    main(["verify", "lifecycles", "--mutant", "free-on-abort", *save])
    path = tmp_path / "lifecycles-countdown-free-on-abort.json"
    assert main(["verify", "lifecycles", "--replay", str(path)]) == 1
    assert "deadlock: nothing but a fault" in capsys.readouterr().out
    mended = json.loads(path.read_text()) | {"mutant": ""}
    path.write_text(json.dumps(mended))
    assert main(["verify", "lifecycles", "--replay", str(path)]) == 0
    assert "does not fail any more" in capsys.readouterr().out


@pytest.mark.usefixtures("worlds")
def test_all_mutants_in_worlds_that_catch_none_is_no_success(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["verify", "lifecycles", "--mutant", "all", "--only", "broken"]) == 2
    assert "none of the chosen worlds" in capsys.readouterr().err


def test_long_worlds_say_how_far_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    moments = iter([0.0, 1.0, 2.5, 3.0, 4.6])
    tell = proving.teller("countdown", lambda: next(moments))
    for states in (10, 20, 30, 40):
        tell(states, 5)
    said = capsys.readouterr().err.splitlines()
    assert [line.split(":")[1].split(" states")[0].strip() for line in said] == ["20", "40"]


def test_a_file_that_is_no_counterexample_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text("{}", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"x\.json: not a counterexample"):
        proving.read_scenario(path)


def test_random_walks_are_reported_apart(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Issue 3, point 8: larger mixes are random walks, and say so."""
    monkeypatch.setattr(proving, "MIXES", (countdown("good"), countdown("broken", bad=1)))
    arguments = ["verify", "lifecycles", "--walks", "3", "--save", str(tmp_path)]
    assert main([*arguments, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert [(m["name"], m["walks"], m["broken"]) for m in report["mixes"]] == [
        ("good", 3, 0),
        ("broken", 3, 3),
    ]
    assert main(arguments) == 1
    assert "good: 3 walks, 9 moves" in capsys.readouterr().out
    assert main(["verify", "lifecycles", "--replay", str(tmp_path / "lifecycles-broken.json")]) == 1
