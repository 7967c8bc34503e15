"""The three levels of using pdcore as a library: each example runs, says what it should, and
stays short enough to read in one go."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import pdcore
from pdcore.testing.runner import CHECKS, check_model_runner

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
MAX_LINES = 79
TIMEOUT_S = 90


def run(name: str) -> list[str]:
    """What an example prints, run as a person would: in a process of its own, warnings are
    errors, nothing on standard error."""
    done = subprocess.run(
        [sys.executable, "-W", "error", str(ROOT / "examples" / name)],
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


POTATOES = "two potato, three potato, four; one potato, two potato, thre"


def test_the_cores_run_in_a_loop_of_your_own() -> None:
    """Level 1; every block is back in both pools after the end and after the abort."""
    free = "KVBlocks(full:1/64, seqs=0, leased=0, quarantined=0)"
    assert run("drive_cores.py") == [
        "room 1: prefill ended it with stop",
        "room 1: decode ended it with length",
        f"room 1: 20 tokens so far, {free}",
        "room 2: prefill ended it with stop",
        "room 2: decode ended it with abort",
        f"room 2: 50 tokens so far, {free}",
    ]


def test_an_engine_of_your_own_runs_behind_a_worker() -> None:
    """Level 2: the text could only go on like this if decode had prefill's KV cache."""
    first, second = run("own_runner.py")
    assert first == f"{POTATOES} [length]"
    assert second.startswith("tw")
    assert second.endswith(" [abort]")


def test_the_second_level_works_without_shared_memory(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pdcore, "available_transports", lambda: {"shm": "not on this system"})
    load("own_runner").main()
    assert capsys.readouterr().out.startswith(f"{POTATOES} [length]\n")


def test_the_engine_of_the_example_keeps_the_contract() -> None:
    """Except for drawing at a temperature, which a parrot cannot do."""
    wanted = [name for name in CHECKS if name != "draws_depend_on_seed_and_position"]
    assert check_model_runner(load("own_runner").ParrotRunner, checks=wanted) == wanted


def test_the_apps_are_mounted_in_servers_of_your_own() -> None:
    """Level 3: through a mounted router, two hosts and real sockets, with an abort by room."""
    completion, first_event, aborted, last_event = run("mount_apps.py")
    assert completion == POTATOES
    assert first_event.startswith('data: {"id":"cmpl-')
    assert aborted == "aborted (prefill, decode): [false,true]"
    assert '"code":"cancelled"' in last_event


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_LINES


def pdcore_modules(text: str) -> set[str]:
    """What a program imports of pdcore, by full name."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found.add(node.module)
    return {name for name in found if name.split(".")[0] == "pdcore"}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_needs_nothing_but_what_is_exported(path: Path) -> None:
    """What stays stable is what `pdcore` exports (docs/library.md): that must be enough."""
    assert pdcore_modules(path.read_text(encoding="utf-8")) == {"pdcore"}


def test_an_import_past_the_exports_is_seen() -> None:
    deep = "import pdcore\nfrom pdcore.server.serve import bind"
    assert pdcore_modules(deep) == {"pdcore", "pdcore.server.serve"}


def test_every_export_is_named_in_the_page() -> None:
    """docs/library.md says which level a name belongs to, or shows how it is used."""
    page = (ROOT / "docs" / "library.md").read_text(encoding="utf-8")
    examples = "".join(path.read_text(encoding="utf-8") for path in EXAMPLES)
    known = set(re.findall(r"\w+", page + examples))
    assert set(pdcore.__all__) - known == {"__version__"}


def test_every_example_is_run_here() -> None:
    assert {path.stem for path in EXAMPLES} == {"drive_cores", "own_runner", "mount_apps"}
