"""Bounds and times of one router (habit 8)."""

from __future__ import annotations

import enum

import attrs

from pdcore.router.policies import ClientFields


class OnPrefillLoss(enum.Enum):
    """What follows when a prefill that had accepted a request is lost before the first token:
    the failure is the client's answer, or another attempt is made, on another prefill instance
    or by a decode instance that computes the prompt itself (local prefill)."""

    FAIL = "fail"
    RETRY = "retry"
    LOCAL_PREFILL = "local-prefill"


@attrs.frozen
class RouterLimits:
    """What a router is bound by. Times in seconds."""

    #: Requests in flight; more are answered 429 (D60).
    max_in_flight: int = 4096
    #: A request's whole life; a client may ask for less, not for more.
    request_timeout_s: float = 1800.0
    #: The router's own timer is later than the legs' by this much (rule 8).
    grace_s: float = 5.0
    on_prefill_loss: OnPrefillLoss = OnPrefillLoss.RETRY
    #: Attempts of one request, the first one counted: a request that kills whatever runs it
    #: takes no more instances along than this.
    max_attempts: int = 3
    #: The second attempt goes out at once, to another instance; before the third one there is
    #: this pause, doubled for every further one up to the maximum, for by then it is more than
    #: one instance that has trouble.
    retry_initial_s: float = 0.05
    retry_max_s: float = 1.0
    cancel_initial_s: float = 0.05
    cancel_max_s: float = 5.0
    #: A cancel of what its leg goes on not to know is given up after this.
    cancel_unknown_s: float = 30.0
    max_cancels: int = 8192
    #: Rooms whose last attempt is remembered, so that a retry names what it replaces.
    max_recent_rooms: int = 4096
    #: Finished rooms of clients that are remembered, for how long, the bytes of all their
    #: results and of one: a larger result is not kept, and its room is a 409 (D7).
    max_results: int = 4096
    result_ttl_s: float = 300.0
    max_results_bytes: int = 64 << 20
    max_result_bytes: int = 1 << 20

    def budget_s(self, fields: ClientFields) -> float:
        """A request's whole life in seconds."""
        return min(fields.timeout_s or self.request_timeout_s, self.request_timeout_s)

    def retry_delay_s(self, num_attempts: int) -> float:
        """The pause before another attempt after ``num_attempts`` that were lost (>= 1)."""
        if num_attempts < 2:
            return 0.0
        return min(self.retry_initial_s * 2.0 ** min(num_attempts - 2, 60), self.retry_max_s)
