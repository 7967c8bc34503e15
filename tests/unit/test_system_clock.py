"""SystemClock: the machine's clocks in the shape that cores' shells want."""

from __future__ import annotations

import time

from pdcore.clock import Clock
from pdcore.system_clock import SystemClock


def test_it_is_a_clock_and_tells_the_time() -> None:
    clock: Clock = SystemClock()
    before = time.monotonic()
    assert before <= clock.monotonic() <= time.monotonic()
    assert abs(clock.unix() - time.time()) < 60
