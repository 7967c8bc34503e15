"""The machine's clocks as a :class:`pdcore.clock.Clock`, for shells and servers."""

from __future__ import annotations

import time


class SystemClock:
    """Real time. Below the shell nobody makes one: ``now`` is an argument there."""

    monotonic = staticmethod(time.monotonic)
    unix = staticmethod(time.time)
