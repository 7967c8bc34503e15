"""``pdcore verify cluster``: options, JSON, exit status, and a replay."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pdcore.cli import main
from pdcore.cli.verify_cluster import choose_seeds, read_numbers, read_seeds
from pdcore.errors import ConfigError


def test_some_seeds_hold(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "cluster", "--seeds", "1", "--start", "20", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["seeds"] == 1
    assert report["requests"] >= 50
    assert sum(report["faults"].values()) >= 5
    assert report["violations"] == []
    assert {"virtual_seconds", "wall_seconds"} <= report.keys()


def test_one_seed_shows_its_trace_and_may_be_cut(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["verify", "cluster", "--seed", "4", "--only-faults", "0", "--only-requests"]
    assert main([*arguments, "1,2"]) == 0
    first = capsys.readouterr().out
    assert "everything held" in first
    assert first.count(" outcome request") == 2 + 4
    assert main([*arguments, "1,2"]) == 0
    assert capsys.readouterr().out == first


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--mutant", "nonsense"], "there are: free-on-abort"),
        (["--mutant", "no-release-vote"], "verify lifecycles"),
        (["--seed", "1", "--mutant", "all"], "name one variant"),
        (["--seed", "1", "--seeds", "5"], "leave out --seeds"),
        (["--only-faults", "1"], "need the --seed"),
        (["--seed", "1", "--only-faults", "a"], "comma-separated"),
        (["--seeds", "-1"], "0 or more"),
        (["--seeds-file", "/nonexistent"], "No such file"),
        (["--seeds", "0"], "no seeds: give --seeds a number"),
        (["--seed", "1", "--only-faults", "\u00b2"], "comma-separated"),
        (["--seed", "1", "--only-requests", "9" * 5000], "comma-separated"),
        (["--seed", "1", "--only-faults", "0,999"], "and no 999"),
        (["--seed", "1", "--only-requests", "4000"], "and no 4000"),
        (["--jobs", "-1"], "--jobs must be 0 to 256, got -1"),
        (["--jobs", "1000000"], "--jobs must be 0 to 256"),
    ],
)
def test_a_mistake_is_one_sentence(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", "cluster", *arguments]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "words"),
    [(b"\xff\xfe", "is not text"), ("\u00b2".encode(), "is not a seed"), (b"7" * 9999, "seed")],
)
def test_a_file_that_lists_no_seeds(text: bytes, words: str, tmp_path: Path) -> None:
    """Each of them was a traceback."""
    file = tmp_path / "seeds.txt"
    file.write_bytes(text)
    with pytest.raises(ConfigError, match=words):
        read_seeds(file)


def test_recorded_seeds_come_first(tmp_path: Path) -> None:
    file = tmp_path / "seeds.txt"
    file.write_text("7 # it broke once\n\n# a comment\n9\n")
    assert read_seeds(file) == [7, 9]
    assert choose_seeds(2, 100, file) == [7, 9, 100, 101]
    assert choose_seeds(None, 0, file) == [7, 9]
    assert len(choose_seeds(None, 0, None)) == 500
    file.write_text("seven\n")
    with pytest.raises(ConfigError, match=r"seeds\.txt:1"):
        read_seeds(file)


def test_numbers() -> None:
    assert read_numbers("--x", None) is None
    assert read_numbers("--x", "none") == []
    assert read_numbers("--x", "1,22") == [1, 22]
