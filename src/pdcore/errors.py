"""Every error pdcore raises, and every failure code it reports.

A caller's fault raises a subclass of :class:`PdcoreError`; a peer's or a request's
failure is a :class:`pdcore.types.Failure` value built by the functions below, so that
a code always has one HTTP status (D9: never 200 without tokens).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from pdcore.types import Failure

#: code -> HTTP status. The only place where the two meet.
HTTP_STATUS: Final[dict[str, int]] = {
    "invalid_request": 400,
    "not_found": 404,
    "model_not_found": 404,
    "method_not_allowed": 405,
    "request_timeout": 408,
    "room_in_use": 409,
    "prompt_too_long": 413,
    "body_too_large": 413,
    "cancelled": 499,
    "overloaded": 429,
    "internal": 500,
    "incompatible": 502,
    "bad_gateway": 502,
    "prefill_failed": 502,
    "handshake_rejected": 502,
    "bad_metadata": 502,
    "transfer_failed": 502,
    "corrupted": 502,
    "peer_lost": 503,
    "stale_route": 503,
    "worker_lost": 503,
    "unreachable": 503,
    "unavailable": 503,
    "out_of_memory": 503,
    "shutting_down": 503,
    "deadline_exceeded": 504,
}


def failure(code: str, detail: str) -> Failure:
    """A Failure with the status its code stands for. Raises KeyError for an unknown code."""
    return Failure(code, detail, HTTP_STATUS[code])


class PdcoreError(Exception):
    """Base of everything pdcore raises on purpose."""


class ConfigError(PdcoreError):
    """A configuration value is wrong; the message names file, line, field and remedy."""


class InvalidRequest(PdcoreError):
    """A request that no core would accept; ``field`` names the culprit."""

    def __init__(self, field: str, detail: str) -> None:
        super().__init__(f"{field}: {detail}")
        self.field = field
        self.detail = detail


class Overloaded(PdcoreError):
    """A bounded queue is full; try again later (D60)."""


class RoomInUse(PdcoreError):
    """The same (room, attempt), or a live room without ``replaces`` (D7)."""


class OwnershipError(PdcoreError):
    """A block, slot or lease was released or taken twice: a bug, never a peer's fault."""


class IncompatibleError(PdcoreError):
    """Two instances cannot be paired; the message names both values (D14, D35)."""


class CodecError(PdcoreError):
    """A frame is truncated, oversized, of another version or not a known message."""


class TransportError(PdcoreError):
    """A transport call was refused before byte 0; nothing was written."""


class PeerGone(TransportError):
    """The peer's process or session no longer exists."""


class EngineError(PdcoreError):
    """The model runner could not load or execute.

    ``seq_ids``: the sequences of the batch whose fault it is. Only they fail then, and the step
    is run again without them; empty: it cannot be told, and the whole batch fails."""

    def __init__(self, detail: str = "", *, seq_ids: Iterable[int] = ()) -> None:
        super().__init__(detail)
        self.seq_ids = frozenset(seq_ids)


class GroupBroken(PdcoreError):
    """The ranks of a group are out of step: nothing can be decided together any more, and the
    group must be restarted (architecture, section 9)."""


class LifecycleError(PdcoreError):
    """A lifecycle table, or the class it is compiled onto, is wrong: found at import."""


class RegistrationConflict(PdcoreError):
    """A rank's registration contradicts the instance's configuration or its other ranks
    (D31, 409); ``field`` names the culprit."""

    def __init__(self, field: str, detail: str) -> None:
        super().__init__(f"{field}: {detail}")
        self.field = field
        self.detail = detail
