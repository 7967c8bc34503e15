"""Every test of a transport leaves the process as it found it (G7)."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest

from pdcore.testing.transport_checks_growth import Footprint


def _grown(before: Footprint) -> bool:
    now = Footprint.now()
    return now.fds > before.fds or now.threads > before.threads or now.names != before.names


@pytest.fixture(autouse=True)
def _no_growth() -> Iterator[None]:
    before = Footprint.now()
    yield
    if _grown(before):
        # Reference cycles of the test itself (pytest.raises keeps tracebacks).
        gc.collect()
    assert not _grown(before), (
        f"there was {before}, there is {Footprint.now()}: {threading.enumerate()}"
    )
