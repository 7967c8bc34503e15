"""Events: what the shell feeds into a core. Past tense, values, no callbacks.

The lifecycles' own event names (rows of the tables) are strings there; these are the
inputs of :meth:`PrefillCore.handle_event` and :meth:`DecodeCore.handle_event`.
"""

from __future__ import annotations

import msgspec

from pdcore.control.messages import PeerMessage, Route
from pdcore.types import Failure, Incarnation, LeaseId, PeerRef, RoomKey, StepOutput


class Event(msgspec.Struct, frozen=True, gc=False):
    pass


class MessageReceived(Event, frozen=True, gc=False):
    """``to_incarnation`` is what the sender believed ours to be (b"" unknown)."""

    sender: PeerRef
    to_incarnation: Incarnation
    message: PeerMessage


class HandleEnded(Event, frozen=True, gc=False):
    """From the transport, or from the shell for a transfer it could not post (then
    ``quiesced`` is True and ``failure`` set)."""

    handle: int
    quiesced: bool
    failure: Failure | None = None
    #: (one past the last token, checksums) where ``PostTransfer.sums`` asked for them.
    summed: tuple[int, bytes] | None = None


class BlocksSummed(Event, frozen=True, gc=False):
    """Prefill: the checksums that the transfer of this handle waited for; the shell posts it
    now, and no core sees this. ``problem``: they could not be taken."""

    handle: int
    sums: bytes
    problem: str = ""


class BlocksVerified(Event, frozen=True, gc=False):
    """Decode: what ``VerifyBlocks`` found wrong, or ""."""

    key: RoomKey
    lease: LeaseId
    rank: int
    problem: str


class LeaseRevoked(Event, frozen=True, gc=False):
    """RECEIVER_ENFORCED transports: nothing of this lease can land any more."""

    lease: LeaseId


class PeerLost(Event, frozen=True, gc=False):
    """A peer's process life is over. ``fenced``: nothing of it can land any more."""

    incarnation: Incarnation
    fenced: bool
    detail: str = ""


class ConnectFailed(Event, frozen=True, gc=False):
    """Prefill: the data plane to a peer could not be opened. Proves nothing about it."""

    incarnation: Incarnation
    detail: str


class TopologyFetched(Event, frozen=True, gc=False):
    """Exactly one of ``route`` and ``failure``."""

    bootstrap: str
    route: Route | None
    failure: Failure | None = None


class VotesReduced(Event, frozen=True, gc=False):
    """``diverged``: the ranks of the group did not vote on the same ids. ``failures``: (place in
    the vector, why), of the first rank on which it failed."""

    sequence: int
    votes: tuple[int, ...]
    diverged: bool = False
    failures: tuple[tuple[int, Failure], ...] = ()


class RequestRefused(Event, frozen=True, gc=False):
    """The shell did not take this request (draining, overloaded, expired, malformed) and has
    answered its leader; the other half, which may be waiting already, is told (D11)."""

    key: RoomKey
    failure: Failure


class StepCompleted(Event, frozen=True, gc=False):
    """The engine ran the batch the core handed out last; ``output`` None: it failed.
    ``blamed``: it failed for these sequences of the batch alone; empty: for all of them."""

    batch_id: int
    output: StepOutput | None
    failure: Failure | None = None
    blamed: frozenset[int] = frozenset()
