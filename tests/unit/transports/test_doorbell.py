from __future__ import annotations

import select

from pdcore.transports.doorbell import Doorbell


def is_readable(bell: Doorbell) -> bool:
    return bool(select.select([bell.fileno()], [], [], 0)[0])


def test_it_is_readable_from_its_ring_until_it_is_cleared() -> None:
    bell = Doorbell()
    try:
        assert not is_readable(bell)
        bell.ring()
        bell.ring()
        assert is_readable(bell)
        bell.clear()
        assert not is_readable(bell)
        bell.clear()
    finally:
        bell.close()


def test_nobody_waits_for_a_bell_that_rings_already() -> None:
    bell = Doorbell()
    try:
        for _ in range(100_000):  # more than any buffer holds
            bell.ring()
        bell.clear()
        assert not is_readable(bell)
    finally:
        bell.close()
