"""The folders of one command, and the clean-up of runs that could not clean up themselves.

A folder made for a run goes with it, unless the run failed: then its logs are for a person to
read. A run that is killed removes nothing, so the next one does: each holds a lock in its
folder for as long as its process lives, and the kernel lets go of it however that ends. (A
process id in a file would not do: ids come again, and another container that shares the
temporary folder counts its own.)
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Final

import attrs

from pdcore.config_loader import Environment
from pdcore.errors import ConfigError

PREFIX: Final = "pdcore-"
#: The file that is locked while its run lives; gone from a folder that is to be kept.
MARK: Final = "running"
#: Abandoned folders removed by one start.
MAX_REMOVED: Final = 64


@attrs.frozen
class Workplace:
    """Environment and folders of one command."""

    env: Environment
    cache_dir: Path
    run_dir: Path
    #: The folder was made for this run: remove it after a good end.
    is_temporary: bool

    def remove(self) -> None:
        """After a good end: the folder of this run's logs, unless somebody chose it."""
        if self.is_temporary:
            shutil.rmtree(self.run_dir, ignore_errors=True)

    def keep(self) -> None:
        """After a bad end: a person is told to look at it, so no later run removes it."""
        if self.is_temporary:
            with contextlib.suppress(OSError):
                (self.run_dir / MARK).unlink()


def workplace(env: Environment) -> Workplace:
    """Make the folders. Call it when everything else has been checked: a mistake must leave
    nothing behind. Raises ConfigError for a folder that cannot be made."""
    try:
        env.cache_dir.mkdir(parents=True, exist_ok=True)
        if env.run_dir is not None:
            env.run_dir.mkdir(parents=True, exist_ok=True)
            return Workplace(env, env.cache_dir, env.run_dir, False)
        remove_abandoned(Path(tempfile.gettempdir()))
        run_dir = Path(tempfile.mkdtemp(prefix=PREFIX))
        hold(run_dir)
    except OSError as error:
        raise ConfigError(
            f"{error.filename}: {error.strerror}; set PDCORE_CACHE_DIR and PDCORE_RUN_DIR to "
            "folders that can be written"
        ) from None
    return Workplace(env, env.cache_dir, run_dir, True)


def hold(run_dir: Path) -> int:
    """Mark a folder as that of a living process; the descriptor stays open until its end.
    Returns it. Raises OSError."""
    # Locked before it has the name that others look for.
    fresh = run_dir / f"{MARK}.new"
    descriptor = os.open(fresh, os.O_CREAT | os.O_RDWR, 0o600)
    _lock(descriptor)
    fresh.rename(run_dir / MARK)
    return descriptor


def remove_abandoned(parent: Path) -> int:
    """Remove the folders of our own runs that were killed; returns how many. Never raises:
    what cannot be removed is somebody else's."""
    removed = 0
    for mark in parent.glob(f"{PREFIX}*/{MARK}"):
        if removed == MAX_REMOVED:
            break
        try:
            descriptor = os.open(mark, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            if os.fstat(descriptor).st_uid == os.getuid() and _lock(descriptor):
                shutil.rmtree(mark.parent, ignore_errors=True)
                removed += 1
        finally:
            os.close(descriptor)
    return removed


def _lock(descriptor: int) -> bool:
    """False: its process lives. Where there is no such lock everybody lives for ever."""
    if sys.platform == "win32":
        return False
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
