"""Bounds and timers of one rank's core."""

from __future__ import annotations

from typing import Final

import attrs

from pdcore.config.fields import bounded


@attrs.frozen
class CoreLimits:
    """Bounds and timers of one rank's core (habit 8: a bound on everything).

    Raises ValueError naming field, range and value.
    """

    max_queued_requests: int = bounded(
        256,
        "requests",
        "without a result yet, running ones too; more are answered 429 (D60)",
        low=1,
    )
    max_prefill_tokens: int = bounded(
        8192, "tokens", "longest prompt and budget of one prefill step (R87)", low=1, seed="8192"
    )
    prefill_chunk_tokens: int = bounded(
        512, "tokens", "one forward pass; short enough that aborts and sends are timely", low=1
    )
    max_running: int = bounded(
        32, "requests", "sequences in one decode step", low=1, seed="1 (batch_size)"
    )
    num_reserved_decode_tokens: int = bounded(
        64, "tokens", "head-room each running request keeps at admission (R69)", low=0, seed="64"
    )
    num_metadata_slots: int = bounded(
        64,
        "slots",
        "2 x max_running: quarantined slots must not stop admission",
        low=1,
        seed="max(1, batch_size_per_dp_rank)",
    )
    resend_initial_s: float = bounded(
        0.05, "s", "first resend of an unanswered message (rule 4)", low=0.001
    )
    resend_max_s: float = bounded(5.0, "s", "upper end of the resend back-off (rule 4)", low=0.001)
    topology_retry_s: float = bounded(
        0.5, "s", "pause between two fetches of a route that is not ready", low=0.001, seed="1.0"
    )
    topology_ttl_s: float = bounded(
        30.0, "s", "age at which a cached route is fetched again", low=0.001
    )
    drain_timeout_s: float = bounded(
        30.0,
        "s",
        "draining longer than this (and twice a transport's quarantine) destroys its session",
        low=0.001,
    )
    linger_s: float = bounded(
        30.0, "s", "a finished entity still answers its peers this long", low=0.0
    )
    prefill_arrival_s: float = bounded(
        10.0,
        "s",
        "a request ends here (and is tried again) whose half prefill says it lacks for this long",
        low=0.001,
    )
    parked_handshake_cap: int = bounded(
        1024, "entries", "rooms whose handshake or cancel came before their request (R44)", low=1
    )
    parked_handshake_ttl_s: float = bounded(
        30.0,
        "s",
        "what is parked is forgotten after this; decode sends a handshake again",
        low=0.001,
    )
    tombstone_cap: int = bounded(
        4096,
        "entries",
        "finished rooms remembered; safety does not depend on it",
        low=1,
        seed="1024",
    )
    tombstone_ttl_s: float = bounded(
        120.0, "s", "a finished room is forgotten after this", low=0.001
    )
    max_retractions: int = bounded(
        3, "times", "a request retracted more often fails instead of starving", low=0
    )
    heartbeat_interval_s: float = bounded(
        1.0, "s", "pause between two liveness probes of a peer (D48)", low=0.001, seed="5"
    )
    heartbeat_misses: int = bounded(
        5, "probes", "unanswered in a row before a peer is Suspect", low=1, seed="3"
    )
    peer_failures: int = bounded(
        3,
        "times",
        "transfers or handshakes in a row that fail before a peer gets no new work (R49, D25)",
        low=1,
        seed="3",
    )
    peer_cooldown_s: float = bounded(
        10.0,
        "s",
        "without new work for a peer that failed or fell silent, then one request tries it (D25)",
        low=0.001,
    )
    clock_skew_s: float = bounded(
        5.0, "s", "a request's absolute expiry may be off by this much (rule 8)", low=0.0
    )
    quarantine_share: float = bounded(
        0.5,
        "share",
        "of a rank's blocks kept out by one peer; beyond it no more handshakes or grants (rule 6)",
        low=0.0,
        high=1.0,
    )

    @property
    def silence_s(self) -> float:
        """Who says nothing for so long is silent; before, nobody can be called that."""
        return self.heartbeat_interval_s * self.heartbeat_misses

    def __attrs_post_init__(self) -> None:
        if self.resend_max_s < self.resend_initial_s:
            raise ValueError(
                f"resend_max_s must be >= resend_initial_s ({self.resend_initial_s}), "
                f"got {self.resend_max_s}"
            )


#: Used where nobody configured anything.
DEFAULT_LIMITS: Final = CoreLimits()
