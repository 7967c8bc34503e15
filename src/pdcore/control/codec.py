"""Bytes of the control plane: versioned frames with a size limit, never pickle (D40).

A frame is an 8-byte header (magic, protocol version, kind, body length; little-endian) and
one msgpack body. What is checked, in this order: length against the limit, magic, version,
kind, body length, then types, bounds and identities of the body. Whatever is wrong raises
:class:`CodecError` and nothing else, so that a receiver counts it and goes on.

Ids of blocks and tokens travel packed as little-endian int32: 2,000 block ids cost 2 us, as
a list 149 us (measured).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import msgspec

from pdcore.control import messages as m
from pdcore.errors import CodecError, IncompatibleError
from pdcore.types import MAX_ID, Failure, LeaseId, Nonce, RoomKey

#: Versions this build speaks, lowest and highest. A change of any wire form raises the
#: highest; the lowest follows when an old form is given up.
PROTOCOL_MIN: Final = 1
PROTOCOL_MAX: Final = 1

#: A handshake of a million tokens in blocks of 16 is 250 KB; 4 MiB leave room for batches.
MAX_FRAME_BYTES: Final = 4 << 20
#: A prompt of a million token ids is 4 MB.
MAX_LINK_BYTES: Final = 16 << 20
#: An endpoint names every cache entry of a model (about 300 entries of 40 bytes).
MAX_ENDPOINT_BYTES: Final = 1 << 20

_MAGIC: Final = b"PD"
_HEADER: Final = struct.Struct("<2sBBI")
_HEADER_BYTES: Final = _HEADER.size
_KIND_FRAME: Final = 1
_KIND_LEADER: Final = 2
_KIND_WORKER: Final = 3
_KIND_NAMES: Final = {
    _KIND_FRAME: "rank frame",
    _KIND_LEADER: "leader message",
    _KIND_WORKER: "worker message",
}
_INCARNATION_BYTES: Final = 16
_OF_LEADER: Final = (m.Submit, m.Abort, m.Stop)

_encode = msgspec.msgpack.Encoder().encode
_decode_frame_body = msgspec.msgpack.Decoder(m.Frame).decode
_decode_leader_body = msgspec.msgpack.Decoder[m.LeaderMessage](m.LeaderMessage).decode
_decode_worker_body = msgspec.msgpack.Decoder[m.WorkerMessage](m.WorkerMessage).decode
_decode_endpoint_body = msgspec.msgpack.Decoder(m.Endpoint).decode

T = TypeVar("T")


# --- versions ---------------------------------------------------------------------------


def negotiate(mine: tuple[int, int], theirs: tuple[int, int]) -> int:
    """The highest protocol version both (lowest, highest) ranges hold.

    Raises IncompatibleError naming both ranges when there is none (architecture, section 2).
    """
    for name, (low, high) in (("our", mine), ("the peer's", theirs)):
        if low > high:
            raise IncompatibleError(f"{name} protocol range {low}..{high} is empty")
    version = min(mine[1], theirs[1])
    if version < max(mine[0], theirs[0]):
        raise IncompatibleError(
            f"no common protocol version: this build speaks {mine[0]}..{mine[1]}, "
            f"the peer {theirs[0]}..{theirs[1]}; upgrade the older side"
        )
    return version


# --- packed ids -------------------------------------------------------------------------


def pack_ids(ids: Sequence[int], what: str = "id") -> bytes:
    """Non-negative 31-bit ids as little-endian int32, 4 bytes each.

    Raises CodecError naming ``what`` for an id that does not fit.
    """
    try:
        data = struct.pack(f"<{len(ids)}i", *ids)
    except (struct.error, TypeError) as error:
        raise CodecError(f"{what}s must be integers of 31 bits: {error}") from None
    _require_non_negative(data, what)
    return data


def unpack_ids(data: bytes, what: str = "id") -> list[int]:
    """Inverse of :func:`pack_ids`. Raises CodecError for a cut or negative id."""
    return list(struct.unpack(f"<{_count_ids(data, what)}i", data))


def pack_block_ids(ids: Sequence[int]) -> bytes:
    return pack_ids(ids, "block id")


def unpack_block_ids(data: bytes) -> list[int]:
    return unpack_ids(data, "block id")


def pack_token_ids(ids: Sequence[int]) -> bytes:
    return pack_ids(ids, "token id")


def unpack_token_ids(data: bytes) -> list[int]:
    return unpack_ids(data, "token id")


def _count_ids(data: bytes, what: str) -> int:
    if len(data) % 4:
        raise CodecError(f"packed {what}s must be a multiple of 4 bytes, got {len(data)}")
    _require_non_negative(data, what)
    return len(data) // 4


def _require_non_negative(data: bytes, what: str) -> None:
    # The sign bit sits in every fourth byte; isascii() is one pass in C, 20x faster than
    # comparing integers.
    if not data[3::4].isascii():
        worst = min(struct.unpack(f"<{len(data) // 4}i", data))
        raise CodecError(f"{what}s must be >= 0, got {worst}")


# --- frames -----------------------------------------------------------------------------


def encode_frame(frame: m.Frame, max_bytes: int = MAX_FRAME_BYTES) -> bytes:
    """One frame for :meth:`ControlChannel.send`. Raises CodecError when it is over the
    limit (see :func:`encode_frames`) or holds an integer of more than 64 bits."""
    return _seal(_KIND_FRAME, frame, max_bytes)


def encode_frames(frame: m.Frame, max_bytes: int = MAX_FRAME_BYTES) -> list[bytes]:
    """The same messages, in order, in as many frames as the limit makes necessary.

    Raises CodecError when a single message does not fit."""
    count = len(frame.messages)
    try:
        if count <= m.MAX_FRAME_MESSAGES:
            return [encode_frame(frame, max_bytes)]
    except CodecError:
        if count < 2:
            raise
    return [
        data
        for messages in (frame.messages[: count // 2], frame.messages[count // 2 :])
        for data in encode_frames(msgspec.structs.replace(frame, messages=messages), max_bytes)
    ]


def decode_frame(data: bytes, max_bytes: int = MAX_FRAME_BYTES) -> m.Frame:
    """Raises CodecError, and nothing else, for whatever a peer may send."""
    frame = _open(_KIND_FRAME, data, max_bytes, _decode_frame_body)
    _check_incarnation("incarnation", frame.incarnation)
    _check_incarnation("to_incarnation", frame.to_incarnation, may_be_unknown=True)
    for message in frame.messages:
        _CHECKS[type(message)](message)
    return frame


def encode_link(
    message: m.LeaderMessage | m.WorkerMessage, max_bytes: int = MAX_LINK_BYTES
) -> bytes:
    """One message of the leader link, either direction. Raises CodecError over the limit."""
    kind = _KIND_LEADER if isinstance(message, _OF_LEADER) else _KIND_WORKER
    return _seal(kind, message, max_bytes)


def decode_leader_message(data: bytes, max_bytes: int = MAX_LINK_BYTES) -> m.LeaderMessage:
    """Worker side. Raises CodecError, and nothing else."""
    message = _open(_KIND_LEADER, data, max_bytes, _decode_leader_body)
    _CHECKS[type(message)](message)
    return message


def decode_worker_message(data: bytes, max_bytes: int = MAX_LINK_BYTES) -> m.WorkerMessage:
    """Leader side. Raises CodecError, and nothing else."""
    message = _open(_KIND_WORKER, data, max_bytes, _decode_worker_body)
    _CHECKS[type(message)](message)
    return message


def encode_endpoint(endpoint: m.Endpoint) -> bytes:
    """The bytes of ``Handshake.endpoint``, once per process life. No wish for checksums leaves
    no trace: a peer that knows of none reads it too."""
    fields = msgspec.structs.astuple(endpoint)
    data = _encode(fields if endpoint.integrity else fields[:-1])
    return _limited("endpoint", data, MAX_ENDPOINT_BYTES)


def decode_endpoint(data: bytes) -> m.Endpoint:
    """Raises CodecError for malformed bytes and for lists of different length."""
    _limited("endpoint", data, MAX_ENDPOINT_BYTES)
    endpoint = _decode_body("endpoint", memoryview(data), _decode_endpoint_body)
    names = "entry_names", "regions", "offsets", "block_strides"
    fields = msgspec.structs.asdict(endpoint)
    lengths = {name: len(fields[name]) for name in names}
    if len(set(lengths.values())) != 1:
        raise CodecError(f"endpoint lists differ in length: {lengths}")
    if len(set(endpoint.entry_names)) != len(endpoint.entry_names):
        raise CodecError("endpoint names a cache entry twice")
    if endpoint.tp_rank >= endpoint.tp_size:
        raise CodecError(f"endpoint tp_rank {endpoint.tp_rank} >= tp_size {endpoint.tp_size}")
    return endpoint


def _limited(what: str, data: bytes, max_bytes: int) -> bytes:
    if len(data) > max_bytes:
        raise CodecError(f"{what} of {len(data)} bytes exceeds the limit of {max_bytes}")
    return data


def _seal(kind: int, value: m.Frame | m.LeaderMessage | m.WorkerMessage, max_bytes: int) -> bytes:
    try:
        body = _encode(value)
    except (OverflowError, TypeError, ValueError) as error:
        raise CodecError(f"cannot encode {_KIND_NAMES[kind]}: {error}") from None
    data = _HEADER.pack(_MAGIC, PROTOCOL_MAX, kind, len(body)) + body
    return data if len(data) <= max_bytes else _limited(_KIND_NAMES[kind], data, max_bytes)


def _open(kind: int, data: bytes, max_bytes: int, decode: Callable[[memoryview], T]) -> T:
    size = len(data)
    if _HEADER_BYTES <= size <= max_bytes:  # look at the parts only when it is no good one
        magic, version, found, length = _HEADER.unpack_from(data)
        is_whole = magic == _MAGIC and found == kind and length == size - _HEADER_BYTES
        if is_whole and PROTOCOL_MIN <= version <= PROTOCOL_MAX:
            return _decode_body(_KIND_NAMES[kind], memoryview(data)[_HEADER_BYTES:], decode)
    raise _refusal(kind, data, max_bytes)


def _refusal(kind: int, data: bytes, max_bytes: int) -> CodecError:
    what = _KIND_NAMES[kind]
    size = len(_limited(what, data, max_bytes))
    if size < _HEADER_BYTES:
        return CodecError(f"{what} of {size} bytes is shorter than its {_HEADER_BYTES}-byte header")
    magic, version, found, length = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        return CodecError(f"{what} starts with {magic!r}, not {_MAGIC!r}: not a pdcore peer")
    if not PROTOCOL_MIN <= version <= PROTOCOL_MAX:
        ours = f"{PROTOCOL_MIN}..{PROTOCOL_MAX}"
        return CodecError(f"{what} of protocol version {version}; this build speaks {ours}")
    if found != kind:
        theirs = _KIND_NAMES.get(found, f"frame of kind {found}")
        return CodecError(f"{theirs} where {what} belongs")
    return CodecError(f"{what} announces {length} bytes, {size - _HEADER_BYTES} came")


def _decode_body(what: str, body: memoryview, decode: Callable[[memoryview], T]) -> T:
    try:
        return decode(body)
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError, MemoryError) as error:
        raise CodecError(f"malformed {what}: {error}") from None


# --- identities in a body: what msgspec's bounds cannot express ---------------------------


def _check_incarnation(what: str, value: bytes, *, may_be_unknown: bool = False) -> None:
    if len(value) != _INCARNATION_BYTES and not (may_be_unknown and not value):
        raise CodecError(f"{what} must be {_INCARNATION_BYTES} bytes, got {len(value)}")


def _check_key(key: RoomKey) -> None:
    room, attempt = key
    if not (0 < room <= MAX_ID and 0 < attempt <= MAX_ID):
        raise CodecError(f"room and attempt must be between 1 and {MAX_ID}, got {room}, {attempt}")


def _check_counted(what: str, value: LeaseId | Nonce) -> None:
    incarnation, counter = value
    if len(incarnation) != _INCARNATION_BYTES:
        raise CodecError(f"{what} incarnation must be 16 bytes, got {len(incarnation)}")
    if not 0 <= counter <= MAX_ID:
        raise CodecError(f"{what} counter must be between 0 and {MAX_ID}, got {counter}")


def _check_failure(failure: Failure | None) -> None:
    if failure is None:
        return
    if not failure.code or not 400 <= failure.http_status <= 599:
        got = f"{failure.code[:64]!r}, {failure.http_status}"
        raise CodecError(f"failure needs a code and an HTTP status of 400..599, got {got}")


def _check_handshake(message: m.Handshake) -> None:
    _check_key(message.key)
    _check_counted("lease", message.lease)
    cached, total = message.num_cached_tokens, message.num_tokens
    if cached > total:
        raise CodecError(f"num_cached_tokens {cached} > num_tokens {total}")
    for manager_key, packed in message.blocks.items():
        _count_ids(packed, f"{manager_key[:64]} block id")


def _check_claim(message: m.Claim) -> None:
    _check_key(message.key)
    _check_counted("lease", message.lease)
    _check_counted("nonce", message.nonce)


def _check_nonced(message: m.Grant | m.Refuse) -> None:
    _check_key(message.key)
    _check_counted("nonce", message.nonce)


def _check_status(message: m.Status) -> None:
    _check_key(message.key)
    _check_counted("lease", message.lease)
    if message.nonce is not None:
        _check_counted("nonce", message.nonce)
    if (message.metadata is not None) != (message.kind is m.StatusKind.DONE):
        raise CodecError(f"status {message.kind.name} and metadata: exactly DONE carries it")
    _check_failure(message.failure)


def _check_leased(message: m.StatusAck | m.Cancel | m.CancelAck) -> None:
    _check_key(message.key)
    _check_counted("lease", message.lease)
    if isinstance(message, m.Cancel):
        for nonce in message.nonces:
            _check_counted("nonce", nonce)
    elif isinstance(message, m.CancelAck) and message.nonce is not None:
        _check_counted("nonce", message.nonce)


def _check_stale(message: m.Stale) -> None:
    _check_key(message.key)
    _check_incarnation("addressed", message.addressed, may_be_unknown=True)


def _check_submit(message: m.Submit) -> None:
    _check_key(message.key)
    _count_ids(message.prompt, "token id")


def _check_tokens(message: m.Tokens) -> None:
    for key in message.keys:
        _check_key(key)
    rows = (message.keys, message.token_ids, message.logprobs)
    if len({len(column) for column in rows if column is not None}) != 1:
        raise CodecError("keys, token_ids and logprobs must have one row for each request")


def _check_finished(message: m.Finished) -> None:
    _check_key(message.key)
    _check_failure(message.failure)
    _check_finite("timeline", message.timeline)


def _check_ready(message: m.WorkerReady) -> None:
    _check_incarnation("incarnation", message.incarnation)


def _check_health(message: m.WorkerHealth) -> None:
    _check_finite("counters", message.counters)


def _check_finite(what: str, values: dict[str, float]) -> None:
    for name, value in values.items():
        if not math.isfinite(value):
            raise CodecError(f"{what} {name[:64]!r} must be finite, got {value}")


def _check_nothing(message: m.Heartbeat | m.HeartbeatAck | m.Stop) -> None:
    """Bounds on the fields say it all."""


_CHECKS: Final[dict[type[msgspec.Struct], Callable[..., None]]] = {
    m.Handshake: _check_handshake,
    m.Claim: _check_claim,
    m.Grant: _check_nonced,
    m.Refuse: _check_nonced,
    m.Status: _check_status,
    m.StatusAck: _check_leased,
    m.Cancel: _check_leased,
    m.CancelAck: _check_leased,
    m.Stale: _check_stale,
    m.Heartbeat: _check_nothing,
    m.HeartbeatAck: _check_nothing,
    m.Submit: _check_submit,
    m.Abort: lambda message: _check_key(message.key),
    m.Stop: _check_nothing,
    m.Accepted: lambda message: _check_key(message.key),
    m.Aborted: lambda message: _check_key(message.key),
    m.Tokens: _check_tokens,
    m.Finished: _check_finished,
    m.WorkerReady: _check_ready,
    m.WorkerHealth: _check_health,
}
