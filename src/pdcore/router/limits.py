"""Bounds and times of one router (habit 8)."""

from __future__ import annotations

import attrs

from pdcore.router.policies import ClientFields


@attrs.frozen
class RouterLimits:
    """Bounds and times of one router (habit 8)."""

    #: Requests in flight; more are answered 429 (D60).
    max_in_flight: int = 4096
    #: A request's whole life; a client may ask for less, not for more.
    request_timeout_s: float = 1800.0
    #: The router's own timer is later than the legs' by this much (rule 8).
    grace_s: float = 5.0
    max_retries: int = 1
    cancel_initial_s: float = 0.05
    cancel_max_s: float = 5.0
    #: A cancel of what its leg goes on not to know is given up after this.
    cancel_unknown_s: float = 30.0
    max_cancels: int = 8192
    #: Rooms whose last attempt is remembered, so that a retry names what it replaces.
    max_recent_rooms: int = 4096

    def budget_s(self, fields: ClientFields) -> float:
        """A request's whole life in seconds."""
        return min(fields.timeout_s or self.request_timeout_s, self.request_timeout_s)
