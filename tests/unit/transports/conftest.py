"""Every test of a transport leaves the process as it found it (G7)."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest

from pdcore.testing.transport_checks_life import footprint


def _grown(before: tuple[int, int, list[str]]) -> bool:
    fds, threads, names = footprint()
    return fds > before[0] or threads > before[1] or names != before[2]


@pytest.fixture(autouse=True)
def _no_growth() -> Iterator[None]:
    before = footprint()
    yield
    if _grown(before):
        # Reference cycles of the test itself (pytest.raises keeps tracebacks).
        gc.collect()
    assert not _grown(before), (
        f"(fds, threads, /dev/shm) were {before}, are {footprint()}: {threading.enumerate()}"
    )
