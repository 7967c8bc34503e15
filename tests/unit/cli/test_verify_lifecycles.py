"""``pdcore verify lifecycles`` from the command line; what it does is tested in test_proving."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pdcore.cli import main
from pdcore.sim.lifecycles import CONFIGURATIONS
from pdcore.sim.mutants import MUTANTS


def test_the_list_names_worlds_and_mutants(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "lifecycles", "--list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [c["name"] for c in listed["configurations"]] == [c.name for c in CONFIGURATIONS]
    assert list(listed["mutants"]) == list(MUTANTS)


def test_the_list_fits_the_terminal_and_explains_its_words(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["verify", "lifecycles", "--list"]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    words = " ".join(shown.split())
    assert CONFIGURATIONS[0].covers in words
    assert f"{MUTANTS['free-on-abort'].undoes} [pair, reuse]" in words
    for page in ("docs/architecture.md, section 3", "docs/requirements.md"):
        assert page in words


def test_a_counterexample_replays_from_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Issue 3, point 8: caught, written, and walked again step by step from the file alone."""
    mutant = ["--mutant", "free-on-abort", "--only", "reuse", "--save", str(tmp_path)]
    assert main(["verify", "lifecycles", *mutant]) == 0
    said = capsys.readouterr().out
    (path,) = tmp_path.iterdir()
    assert f"pdcore verify lifecycles --replay {path}" in said
    trace = json.loads(path.read_text(encoding="utf-8"))["trace"]
    assert main(["verify", "lifecycles", "--replay", str(path)]) == 1
    replayed = capsys.readouterr().out
    for number, label in enumerate(trace, 1):
        assert f"{number:3d} {label}\n" in replayed
    assert "BROKEN: prefill0.0 may still write under lease" in replayed


def test_a_counterexample_that_is_repaired_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same steps without the mutant: the product keeps the blocks."""
    assert main(["verify", "lifecycles", "--mutant", "free-on-abort", "--only", "reuse",
                 "--save", str(tmp_path)]) == 0  # fmt: skip
    (path,) = tmp_path.iterdir()
    scenario = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**scenario, "mutant": ""}), encoding="utf-8")
    capsys.readouterr()
    assert main(["verify", "lifecycles", "--replay", str(path)]) == 0
    assert "does not fail any more" in capsys.readouterr().out


def test_the_hash_seed_changes_nothing(tmp_path: Path) -> None:
    """Counts and counterexamples are the same on every machine and in every process."""
    found: list[dict[str, object]] = []
    for seed in ("1", "2"):
        folder = tmp_path / seed
        folder.mkdir()
        command = [sys.executable, "-m", "pdcore.cli", "verify", "lifecycles", "--json"]
        done = subprocess.run(
            [*command, "--mutant", "free-on-abort", "--only", "reuse", "--save", str(folder)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            check=True,
            timeout=120,
        )
        (row,) = json.loads(done.stdout)["mutants"]
        found.append({name: row[name] for name in ("states", "kind", "problem", "trace", "state")})
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "nowhere"], "--only: no world 'nowhere'; there are: pair, chunks"),
        (["--mutant", "nothing"], "no mutant 'nothing'; there are: free-on-abort"),
        (["--mutant", "free-on-abort", "--only", "dummy"], "none of the chosen worlds"),
        (["--only", "pair, nowhere"], "--only: no world 'nowhere'"),
        (["--walks", "-1"], "--walks must be 0 or more, got -1"),
        (["--save", "/nowhere"], "--save /nowhere: no such folder"),
        (["--replay", "/nowhere/x.json"], "--replay /nowhere/x.json: No such file"),
    ],
)
def test_a_mistake_is_one_message(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", "lifecycles", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
