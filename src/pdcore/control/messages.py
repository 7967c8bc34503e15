"""Messages between processes: the claim-before-write protocol and the leader link.

Every message is idempotent and resent until answered (architecture, section 3, rule 4).
Wire form: msgpack arrays inside a versioned frame (see :mod:`pdcore.control.codec`),
never pickle (D24, D40), never a pointer (D58).

| message    | direction                  | answered by                                  |
|------------|----------------------------|----------------------------------------------|
| Handshake  | decode -> prefill rank     | Claim, Status(Queued, Dummy, Rejected, Failed), Stale |
| Claim      | prefill -> decode          | Grant or Refuse, echoing the nonce            |
| Status     | prefill -> decode          | StatusAck                                     |
| Cancel     | decode -> prefill ranks    | CancelAck per nonce, or Stale                 |
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Annotated

import msgspec

from pdcore.types import (
    MAX_ID,
    Failure,
    Incarnation,
    LeaseId,
    Nonce,
    RoomKey,
)

Id63 = Annotated[int, msgspec.Meta(ge=1, le=MAX_ID)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
#: Bounds are checked when a peer's bytes are decoded, never when we build a message.
Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)]
#: 64 bits are all that msgpack has.
UInt64 = Annotated[int, msgspec.Meta(ge=0)]
Sequence63 = Annotated[int, msgspec.Meta(ge=0, le=MAX_ID)]
#: Seconds, finite (NaN fails both bounds); negative remaining time means "expired".
Seconds = Annotated[float, msgspec.Meta(ge=-1e12, le=1e12)]
Finite = Annotated[float, msgspec.Meta(ge=-1e300, le=1e300)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
Address = Annotated[str, msgspec.Meta(min_length=1, max_length=300)]
Text = Annotated[str, msgspec.Meta(max_length=4096)]


class _Message(msgspec.Struct, frozen=True, array_like=True, gc=False, forbid_unknown_fields=True):
    pass


class StatusKind(enum.IntEnum):
    QUEUED = 0
    DUMMY = 1
    REJECTED = 2
    FAILED = 3
    DONE = 4


class Handshake(_Message, frozen=True, tag="handshake"):
    """Decode publishes its destination. ``endpoint`` is an encoded :class:`Endpoint`,
    the same bytes for the whole life of the decode rank, so that prefill decodes it once
    per incarnation. ``blocks`` maps a manager key to packed little-endian int32 block
    ids, position-aligned. ``num_required`` handshakes of this room go to this prefill
    rank in all (R58)."""

    key: RoomKey
    lease: LeaseId
    endpoint: bytes
    blocks: dict[str, bytes]
    num_cached_tokens: Count
    num_tokens: Count
    ids_hash: UInt64
    num_required: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    expires_at_s: Seconds
    remaining_s: Seconds
    is_dummy: bool = False


class Claim(_Message, frozen=True, tag="claim"):
    key: RoomKey
    lease: LeaseId
    nonce: Nonce


class Grant(_Message, frozen=True, tag="grant"):
    key: RoomKey
    nonce: Nonce


class Refuse(_Message, frozen=True, tag="refuse"):
    key: RoomKey
    nonce: Nonce
    reason: Text


class Status(_Message, frozen=True, tag="status"):
    """``nonce`` is None before a claim exists. ``metadata`` is an encoded
    :class:`pdcore.kv.metadata.MetadataRecord`, present iff DONE (rule 5)."""

    key: RoomKey
    lease: LeaseId
    kind: StatusKind
    nonce: Nonce | None = None
    failure: Failure | None = None
    metadata: bytes | None = None
    #: With DONE: seconds prefill spent per stage, for the client's timeline.
    timings: Annotated[
        dict[Annotated[str, msgspec.Meta(max_length=32)], Finite], msgspec.Meta(max_length=16)
    ] = {}


class StatusAck(_Message, frozen=True, tag="status_ack"):
    key: RoomKey
    lease: LeaseId
    kind: StatusKind


class Cancel(_Message, frozen=True, tag="cancel"):
    """Names every nonce granted to that rank, possibly none."""

    key: RoomKey
    lease: LeaseId
    nonces: Annotated[tuple[Nonce, ...], msgspec.Meta(max_length=1024)]


class CancelAck(_Message, frozen=True, tag="cancel_ack"):
    """``nonce`` None: "nothing of this lease was ever granted here", so that resending
    of an empty Cancel stops."""

    key: RoomKey
    lease: LeaseId
    nonce: Nonce | None


class Stale(_Message, frozen=True, tag="stale"):
    """The addressee lives in another incarnation: proves a restart, never quiescence."""

    key: RoomKey
    #: The incarnation the answered message was addressed to.
    addressed: Incarnation


class Heartbeat(_Message, frozen=True, tag="heartbeat"):
    """Asks for liveness per pair (D48); ``sequence`` is echoed."""

    sequence: Sequence63


class HeartbeatAck(_Message, frozen=True, tag="heartbeat_ack"):
    sequence: Sequence63


PeerMessage = (
    Handshake
    | Claim
    | Grant
    | Refuse
    | Status
    | StatusAck
    | Cancel
    | CancelAck
    | Stale
    | Heartbeat
    | HeartbeatAck
)


#: Manager key -> tokens per block.
BlockSizes = dict[Name, Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]]


class Endpoint(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What prefill must know of a decode rank to write into it. Sent inside Handshake.

    ``transport_descriptor`` is opaque to everything but the transport of that name;
    placements follow :class:`pdcore.kv.spec.KVPlacement`, entries in ``entry_names`` order.
    """

    transport: Name
    transport_descriptor: bytes
    layout_digest: Text
    fingerprint: Text
    tp_size: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    tp_rank: Count
    num_blocks: Count
    entry_names: tuple[Name, ...]
    regions: tuple[Sequence63, ...]
    offsets: tuple[Sequence63, ...]
    block_strides: tuple[Sequence63, ...]
    #: Manager key -> tokens per block; empty: as prefill's.
    block_sizes: BlockSizes = {}
    #: What decode wants to see beside its KV: "crc32" or nothing. Only said where it is asked
    #: for, so that everybody else's bytes stay what they were.
    integrity: Annotated[str, msgspec.Meta(max_length=32)] = ""


#: Messages in one frame: a loop iteration must stay short whoever sends.
MAX_FRAME_MESSAGES = 1024


class Frame(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One control-channel frame: several messages of one sender to one addressee.

    ``to_incarnation`` is what the sender believes the addressee's to be (empty: unknown).
    """

    instance: Name
    rank: Count
    incarnation: Incarnation
    reply_to: Address
    to_incarnation: Incarnation
    messages: Annotated[list[PeerMessage], msgspec.Meta(max_length=MAX_FRAME_MESSAGES)]


# --- leader <-> worker link (R38, D40, D42) ---------------------------------------------


class SubmitSampling(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    max_tokens: Count | None
    min_tokens: Count
    temperature: Finite
    top_p: Finite
    top_k: Count
    seed: int | None
    stop_token_ids: tuple[Count, ...]
    ignore_eos: bool
    logprobs: bool
    top_logprobs: Count


class Submit(_Message, frozen=True, tag="submit"):
    """Leader -> worker: one request. ``prompt`` is packed little-endian int32 ids;
    ``prefill_dp_rank`` None: not named, the room's (R60). ``is_local``: decode computes it
    itself."""

    key: RoomKey
    request_id: Text
    prompt: bytes
    sampling: SubmitSampling
    expires_at_s: Seconds
    remaining_s: Seconds
    bootstrap: Text
    prefill: Text
    decode: Text
    prefill_dp_rank: Count | None
    replaces: Id63 | None
    is_local: bool = False


class Abort(_Message, frozen=True, tag="abort"):
    """Leader -> worker: end this dispatch. ``unless_received``: a decode that already
    has its KV ignores it (architecture, section 10). Answered by Aborted."""

    key: RoomKey
    reason: Text
    unless_received: bool


class Aborted(_Message, frozen=True, tag="aborted"):
    """Worker -> leader: ``applied`` False means ignored (finished, unknown or received)."""

    key: RoomKey
    applied: bool


class Accepted(_Message, frozen=True, tag="accepted"):
    """Worker -> leader: the request passed admission checks and is queued (prefill's 202)."""

    key: RoomKey


class Tokens(_Message, frozen=True, tag="tokens"):
    """Worker -> leader: new output tokens of one step, one position per request. One
    message a step: one of a thousand requests costs 40 us to encode, a thousand of one 1 ms
    and as many sends. ``logprobs`` is None when nobody has any."""

    keys: Sequence[RoomKey]
    token_ids: Sequence[Sequence[Count]]
    logprobs: Sequence[Sequence[Finite | None] | None] | None = None


class Finished(_Message, frozen=True, tag="finished"):
    """Worker -> leader: the one terminal result. ``timeline`` holds seconds since
    acceptance for named points (queue, handshake, transfer, first_token, ...)."""

    key: RoomKey
    finish_reason: Text
    failure: Failure | None
    prompt_tokens: Count
    completion_tokens: Count
    timeline: dict[str, float]


class WorkerReady(_Message, frozen=True, tag="ready"):
    """Worker -> leader: dp/tp rank, incarnation and limits; sent once serving is possible."""

    rank: Count
    dp_rank: Count
    incarnation: Incarnation
    control_address: Address
    max_model_len: Count
    max_prefill_tokens: Count
    vocab_size: Count
    num_blocks: Count
    transport: Name


class WorkerHealth(_Message, frozen=True, tag="health"):
    """Worker -> leader, about once a second and on change: empty ``problems`` = ready."""

    rank: Count
    problems: list[str]
    counters: dict[str, float]
    #: Pool -> state -> blocks or slots (:mod:`pdcore.scheduler.ledger`).
    ledger: dict[str, dict[str, int]] = {}
    #: Instance of a peer -> why it gets no new work from this rank. Its fault, not ours:
    #: routers choose another pair, and this rank stays ready.
    refused_peers: dict[str, str] = {}


class Stop(_Message, frozen=True, tag="stop"):
    """Leader -> worker: drain for at most ``drain_s`` seconds, then exit 0."""

    drain_s: Seconds


LeaderMessage = Submit | Abort | Stop
WorkerMessage = Accepted | Aborted | Tokens | Finished | WorkerReady | WorkerHealth


# --- bootstrap server (R22-R28) ---------------------------------------------------------


class RankRegistration(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Body of PUT /bootstrap/register_rank (R24 with D31, D32, D35)."""

    attn_tp_size: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    attn_tp_rank: Count
    attn_cp_size: Annotated[int, msgspec.Meta(ge=1, le=65535)] = 1
    attn_cp_rank: Count = 0
    attn_dp_size: Annotated[int, msgspec.Meta(ge=1, le=65535)] = 1
    attn_dp_rank: Count = 0
    pp_size: Annotated[int, msgspec.Meta(ge=1, le=65535)] = 1
    pp_rank: Count = 0
    rank_ip: Name
    rank_port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    block_sizes: Annotated[BlockSizes, msgspec.Meta(min_length=1)]
    kv_cache_dtype: Name
    max_prefill_tokens: Count = 0
    #: 32 hex digits of the 128-bit incarnation.
    incarnation: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$", max_length=32)]
    layout_digest: Name
    fingerprint: Name
    transport: Name
    protocol_min: Annotated[int, msgspec.Meta(ge=1, le=255)]
    protocol_max: Annotated[int, msgspec.Meta(ge=1, le=255)]
    #: Every CP rank writes its share, not the first alone everything (R21).
    all_cp_ranks: bool = False


#: Ranks along one axis: a route that says more would cost its reader its loop.
GroupSize = Annotated[int, msgspec.Meta(ge=1, le=4096)]


class RouteRank(msgspec.Struct, frozen=True):
    rank_ip: str
    rank_port: int
    incarnation: str


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """Body of GET /bootstrap/route (R25): ``ranks`` by route key "dp,cp,tp", with pipeline
    stages "dp,cp,tp,pp" (R4)."""

    attn_tp_size: GroupSize
    attn_cp_size: GroupSize
    dp_size: GroupSize
    block_sizes: dict[str, int]
    kv_cache_dtype: str
    max_prefill_tokens: int
    ranks: Annotated[dict[str, RouteRank], msgspec.Meta(max_length=65536)]
    #: Instance id (host:port of the leader) that the registrations belong to.
    instance: str = ""
    #: Grows with every change of the table; part of the ETag.
    epoch: int = 0
    layout_digest: str = ""
    fingerprint: str = ""
    transport: str = ""
    protocol_min: int = 1
    protocol_max: int = 1
    pp_size: GroupSize = 1
    all_cp_ranks: bool = False
