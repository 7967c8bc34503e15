"""A clock that moves only when told to."""

from __future__ import annotations

import pytest

from pdcore.clock import ManualClock


def test_both_times_move_together() -> None:
    clock = ManualClock(start_s=10.0, unix_offset_s=1000.0)
    assert (clock.monotonic(), clock.unix()) == (10.0, 1010.0)
    assert clock.advance(0.5) == 10.5
    assert (clock.monotonic(), clock.unix()) == (10.5, 1010.5)


def test_time_does_not_go_back() -> None:
    clock = ManualClock()
    with pytest.raises(ValueError, match="does not go back"):
        clock.advance(-1.0)
    assert clock.monotonic() == 0.0
