"""Folders of a run: made late, removed after a good end, kept for a person, swept after a kill."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pdcore.cli import workplace as module
from pdcore.cli.workplace import MARK, MAX_REMOVED, hold, remove_abandoned, workplace
from pdcore.config_loader import load_environment
from pdcore.errors import ConfigError

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="flock")


def test_workplace_makes_its_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDCORE_CACHE_DIR", str(tmp_path / "c"))
    monkeypatch.setenv("PDCORE_RUN_DIR", str(tmp_path / "r"))
    place = workplace(load_environment())
    assert place.cache_dir.is_dir()
    assert place.run_dir.is_dir()
    assert not place.is_temporary
    (tmp_path / "file").touch()
    monkeypatch.setenv("PDCORE_CACHE_DIR", str(tmp_path / "file" / "c"))
    with pytest.raises(ConfigError, match="PDCORE_CACHE_DIR"):
        workplace(load_environment())


def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> module.Workplace:
    monkeypatch.setenv("PDCORE_CACHE_DIR", str(tmp_path / "c"))
    monkeypatch.delenv("PDCORE_RUN_DIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return workplace(load_environment())


def test_a_folder_made_for_the_run_goes_with_a_good_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = temporary(tmp_path, monkeypatch)
    assert place.is_temporary
    assert place.run_dir.parent == tmp_path
    (place.run_dir / "log").touch()
    place.remove()
    assert not place.run_dir.exists()


def test_a_folder_that_somebody_chose_is_never_removed(tmp_path: Path) -> None:
    place = module.Workplace(load_environment({}), tmp_path, tmp_path, False)
    (tmp_path / MARK).touch()
    place.remove()
    place.keep()
    assert (tmp_path / MARK).exists()


def abandon(folder: Path) -> None:
    """As a run that was killed: the mark is there, its process is not."""
    folder.mkdir()
    os.close(hold(folder))
    (folder / "log_0.log").write_text("x")


def check_only_the_abandoned_go(sweep: Callable[[Path], int], parent: Path) -> None:
    abandon(parent / "pdcore-dead")
    living = parent / "pdcore-alive"
    living.mkdir()
    descriptor = hold(living)
    (parent / "pdcore-kept").mkdir()
    (parent / "pdcore-file").touch()
    abandon(parent / "other")
    assert sweep(parent) == 1
    os.close(descriptor)
    left = {path.name for path in parent.iterdir()}
    assert left == {"pdcore-alive", "pdcore-kept", "pdcore-file", "other"}


def test_folders_of_killed_runs_are_removed_at_the_next_start(tmp_path: Path) -> None:
    """Those of living runs, and those that were kept for a person, stay."""
    check_only_the_abandoned_go(remove_abandoned, tmp_path)


def test_a_sweep_that_asks_nobody_is_caught(tmp_path: Path) -> None:
    def mutant(parent: Path) -> int:
        found = [path for path in parent.glob("pdcore-*") if (path / MARK).exists()]
        for path in found:
            module.shutil.rmtree(path)
        return len(found)

    with pytest.raises(AssertionError):
        check_only_the_abandoned_go(mutant, tmp_path)


def test_a_failed_run_keeps_its_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = temporary(tmp_path, monkeypatch)
    place.keep()
    assert remove_abandoned(tmp_path) == 0
    assert place.run_dir.is_dir()


def test_the_lock_ends_with_its_process(tmp_path: Path) -> None:
    """Also where nothing could clean up: SIGKILL."""
    folder = tmp_path / "pdcore-run"
    folder.mkdir()
    code = (
        "import sys; from pathlib import Path; from pdcore.cli.workplace import hold\n"
        "hold(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    assert child.stdin is not None
    assert child.stdout.readline() == b"held\n"
    assert remove_abandoned(tmp_path) == 0
    child.kill()
    child.wait()
    assert remove_abandoned(tmp_path) == 1
    assert not folder.exists()
    child.stdin.close()
    child.stdout.close()


def test_one_start_removes_a_bounded_number(tmp_path: Path) -> None:
    for number in range(MAX_REMOVED + 2):
        abandon(tmp_path / f"pdcore-{number}")
    assert remove_abandoned(tmp_path) == MAX_REMOVED
    assert remove_abandoned(tmp_path) == 2
