"""A router's bounds, and what a client may ask of them."""

from __future__ import annotations

import pytest

from pdcore.router.limits import RouterLimits
from pdcore.router.policies import ClientFields


@pytest.mark.parametrize(("asked", "gets"), [(None, 100.0), (7.5, 7.5), (1e6, 100.0)])
def test_a_client_may_ask_for_less_time_not_for_more(asked: float | None, gets: float) -> None:
    """D23: one budget for a request's whole life, also without a word of the client."""
    limits = RouterLimits(request_timeout_s=100.0)
    assert limits.budget_s(ClientFields(timeout_s=asked)) == gets
