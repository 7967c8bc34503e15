"""Effects: what a core wants done, as values the shell carries out in order.

Ordering duties (habit 3): effects are executed in the order polled. A handle is live from
the moment ``PostTransfer`` is returned, executed or not, until the shell feeds back
``HandleEnded(quiesced=True)`` (architecture, section 3).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pdcore.control.messages import PeerMessage
from pdcore.kv.checksums import LegPart
from pdcore.kv.plan import Int64Array, WriteBatch
from pdcore.types import Failure, FinishReason, LeaseId, PeerRef, RoomKey


class Effect(msgspec.Struct, frozen=True, gc=False):
    pass


class SendMessage(Effect, frozen=True, gc=False):
    """Best effort: a refused send is dropped, the core's timers resend."""

    to: PeerRef
    message: PeerMessage


class PostTransfer(Effect, frozen=True, gc=False):
    """Write this request's KV into the leased blocks of one decode rank. The entity says
    which tokens; the core fills ``batches``, ``ranges`` and, where decode asked for it, ``sums``
    before the shell sees it. Those are taken off the tick and before anything is written, and
    come back with ``HandleEnded``."""

    handle: int
    key: RoomKey
    peer: PeerRef
    lease: LeaseId
    start_token: int
    num_tokens: int
    endpoint: bytes = b""
    batches: tuple[WriteBatch, ...] = ()
    ranges: dict[int, Int64Array] = {}
    sums: LegPart | None = None


class VerifyBlocks(Effect, frozen=True, gc=False):
    """Decode: sum what one prefill rank has written under this lease, off the tick, and
    compare with ``sums``; answered by ``BlocksVerified``. ``part``: all of its transfers."""

    key: RoomKey
    lease: LeaseId
    rank: int
    part: LegPart
    sums: bytes


class ConnectPeer(Effect, frozen=True, gc=False):
    """Open the data plane to this process life before it is asked for a grant: from then on
    its transport sees our death, so a grant it gives is never open for ever (rule 3). Does
    nothing when the session exists; a failure comes back as ``ConnectFailed``."""

    peer: PeerRef
    endpoint: bytes


class CancelTransfer(Effect, frozen=True, gc=False):
    handle: int


class FencePeer(Effect, frozen=True, gc=False):
    """Cut the peer's process life off the data plane if the transport can; ``PeerLost``
    with ``fenced`` comes back when nothing of it can land any more."""

    peer: PeerRef


class GrantLease(Effect, frozen=True, gc=False):
    """Decode: tell the transport which ranges of our memory this lease opens."""

    lease: LeaseId
    ranges: dict[int, Int64Array]


class RevokeLease(Effect, frozen=True, gc=False):
    """Decode: close the lease. RECEIVER_ENFORCED transports answer ``LeaseRevoked``."""

    lease: LeaseId


class ReleaseLease(Effect, frozen=True, gc=False):
    """Decode: no writer is left; the transport forgets the lease."""

    lease: LeaseId


class FetchTopology(Effect, frozen=True, gc=False):
    """Decode: GET the route of this bootstrap server off the tick (D28); answered by
    ``TopologyFetched``."""

    bootstrap: str


class ForgetPeer(Effect, frozen=True, gc=False):
    """Drop control connection and transport session of a process life that is over."""

    peer: PeerRef


class ReduceVotes(Effect, frozen=True, gc=False):
    """One vector per tick (architecture, section 9): MIN over the group. ``ids_hash``
    detects ranks that no longer hold the same ids. ``failures``: (place in the vector, why) of
    what failed on this rank, so that all ranks of a group end it for the same reason. ``tokens``:
    (place, first token) of what is received here: all ranks must go on with the same one.
    Answered by ``VotesReduced``."""

    sequence: int
    ids_hash: int
    votes: tuple[int, ...]
    failures: tuple[tuple[int, Failure], ...] = ()
    tokens: tuple[tuple[int, int], ...] = ()


class ReportAccepted(Effect, frozen=True, gc=False):
    key: RoomKey


class ReportTokens(Effect, frozen=True, gc=False):
    """New output tokens of one step, one position per request: one effect, because a step
    of a thousand sequences would otherwise cost a thousand of them. ``logprobs`` is None
    when nobody has any."""

    keys: Sequence[RoomKey]
    token_ids: Sequence[Sequence[int]]
    logprobs: Sequence[Sequence[float | None] | None] | None


class ReportFinished(Effect, frozen=True, gc=False):
    """The one terminal result of a request (invariant 1)."""

    key: RoomKey
    reason: FinishReason
    failure: Failure | None
    prompt_tokens: int
    completion_tokens: int
    timeline: dict[str, float]
