"""How many may be inside at once."""

from __future__ import annotations

from collections import Counter

import pytest

from pdcore.errors import Overloaded
from pdcore.server.gate import Gate


def test_the_limit_holds_and_a_place_is_given_back_whatever_happened() -> None:
    """D60."""
    counters: Counter[str] = Counter()
    gate = Gate(1, counters)
    with gate:
        with pytest.raises(Overloaded, match="1 requests are in flight, the limit is 1"), gate:
            raise AssertionError("inside")
        assert (gate.num_inside, counters["overloaded"]) == (1, 1)
    with pytest.raises(ValueError, match="a bug"), gate:
        raise ValueError("a bug")
    assert gate.num_inside == 0
