"""The metadata record: what prefill tells decode about a finished prompt.

Three forms of the same facts, all little-endian:

* R120's 64 bytes: ``u64 request_id, u64 room, u64 output token, u64 kv_len, u32
  spec_count, 7 x u32 spec tokens``;
* the raw slot, for a vendor path that writes memory: those 64 bytes plus generation,
  length and crc32. A slot is written iff its length field is set and the crc holds,
  never "not all zero" (D12);
* :class:`MetadataRecord`, carried by STATUS Done, the only completion (rule 5): version,
  R120's bytes, attempt, nonce, logprob, hash of the prompt ids, crc32. Where decode asked
  for it, version 2, which adds checksums of the KV that was sent: who did not ask never
  sees one.

``kv_len`` is the index of the last cached position, ``num_tokens - 1`` (R63). Decode
checks ``num_tokens`` and ``ids_hash`` against its own prompt (D19).
"""

from __future__ import annotations

import sys
import zlib
from array import array
from collections.abc import Sequence
from hashlib import blake2b
from struct import Struct
from typing import Final

import attrs

from pdcore.errors import CodecError
from pdcore.types import Incarnation, Nonce

MAX_SPEC_TOKENS: Final = 7
METADATA_BYTES: Final = 64
METADATA_VERSION: Final = 1
#: With checksums of the KV.
SUMMED_VERSION: Final = 2

_U64: Final = (1 << 64) - 1
_U32: Final = (1 << 32) - 1

_BODY: Final = Struct("<QQQQI7I")
#: generation, length, crc32 after the 64 bytes.
_SLOT_TAIL: Final = Struct("<QII")
SLOT_BYTES: Final = METADATA_BYTES + _SLOT_TAIL.size
#: version, flags, length of the whole record; then R120's 64 bytes.
_HEAD: Final = Struct("<HHI")
#: attempt, nonce incarnation, nonce counter, logprob, hash of the ids.
_EXTRA: Final = Struct("<Q16sQdQ")
_CRC: Final = Struct("<I")
RECORD_BYTES: Final = _HEAD.size + METADATA_BYTES + _EXTRA.size + _CRC.size
#: Version 2, before its crc32: how many transfers, how many checksums; then one past the last
#: position of each transfer, then the checksums, 4 bytes each.
_COUNTS: Final = Struct("<II")
_HAS_LOGPROB: Final = 1
_INCARNATION_BYTES: Final = 16


@attrs.frozen
class SlotMetadata:
    """R120's fields by name."""

    request_id: int
    room: int
    output_token_id: int
    kv_len: int
    spec_token_ids: tuple[int, ...] = ()


@attrs.frozen
class MetadataRecord:
    """What STATUS Done carries. ``logprob`` None means absent, not zero (D18)."""

    room: int
    attempt: int
    nonce: Nonce
    output_token_id: int
    logprob: float | None
    num_tokens: int
    ids_hash: int
    spec_token_ids: tuple[int, ...] = ()
    #: Where the transfers of this leg ended, ascending, in tokens; empty: no checksums.
    sent_until: tuple[int, ...] = ()
    #: Of all of them, in order, as :func:`pdcore.kv.checksums.sum_blocks` gives them.
    sums: bytes = b""


def hash_token_ids(token_ids: Sequence[int]) -> int:
    """64-bit hash of token ids, equal on every host and Python (D19)."""
    packed = array("q", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return int.from_bytes(blake2b(packed.tobytes(), digest_size=8).digest(), "little")


def pack_metadata(fields: SlotMetadata) -> bytes:
    """R120's 64 bytes. Raises ValueError for more than 7 speculative tokens or a number
    that does not fit its field."""
    spec = fields.spec_token_ids
    if len(spec) > MAX_SPEC_TOKENS:
        raise ValueError(f"spec_token_ids: at most {MAX_SPEC_TOKENS}, got {len(spec)}")
    _check_range("request_id", fields.request_id, _U64)
    _check_range("room", fields.room, _U64)
    _check_range("output_token_id", fields.output_token_id, _U64)
    _check_range("kv_len", fields.kv_len, _U64)
    for token in spec:
        _check_range("spec_token_ids", token, _U32)
    padded = spec + (0,) * (MAX_SPEC_TOKENS - len(spec))
    return _BODY.pack(
        fields.request_id, fields.room, fields.output_token_id, fields.kv_len, len(spec), *padded
    )


def unpack_metadata(data: bytes) -> SlotMetadata:
    """The fields of R120's 64 bytes. Raises CodecError for another length or an
    impossible count."""
    if len(data) != METADATA_BYTES:
        raise CodecError(f"metadata is {METADATA_BYTES} bytes, got {len(data)}")
    request_id, room, token, kv_len, count, *spec = _BODY.unpack(data)
    if count > MAX_SPEC_TOKENS:
        raise CodecError(f"metadata spec_count {count} exceeds {MAX_SPEC_TOKENS}")
    return SlotMetadata(request_id, room, token, kv_len, tuple(spec[:count]))


def pack_slot(fields: SlotMetadata, generation: int) -> bytes:
    """The raw slot form: R120's bytes, generation of the slot, length, crc32."""
    _check_range("generation", generation, _U64)
    body = pack_metadata(fields)
    head = body + _SLOT_TAIL.pack(generation, METADATA_BYTES, 0)[:-4]
    return head + _CRC.pack(zlib.crc32(head))


def unpack_slot(data: bytes) -> tuple[SlotMetadata, int] | None:
    """(fields, generation), or None for a slot nobody has written (length field 0).

    Raises CodecError when it is written but torn, truncated or foreign.
    """
    if len(data) != SLOT_BYTES:
        raise CodecError(f"a metadata slot is {SLOT_BYTES} bytes, got {len(data)}")
    generation, length, crc = _SLOT_TAIL.unpack_from(data, METADATA_BYTES)
    if length == 0 and crc == 0:
        return None
    if length != METADATA_BYTES or crc != zlib.crc32(data[:-4]):
        raise CodecError(f"metadata slot is torn: length {length}, crc32 {crc:#010x}")
    return unpack_metadata(data[:METADATA_BYTES]), generation


def encode_record(record: MetadataRecord) -> bytes:
    """RECORD_BYTES bytes, more with checksums. Raises ValueError for a field out of range."""
    if record.num_tokens < 1:
        raise ValueError(f"num_tokens must be >= 1, got {record.num_tokens}")
    if len(record.nonce.incarnation) != _INCARNATION_BYTES:
        raise ValueError(f"nonce incarnation must be {_INCARNATION_BYTES} bytes")
    for name, value in (
        ("attempt", record.attempt),
        ("nonce counter", record.nonce.counter),
        ("ids_hash", record.ids_hash),
    ):
        _check_range(name, value, _U64)
    # R120 leaves request_id free: decode never compares it. The low 64 bits carry the
    # attempt, so that a dump of the raw bytes names the dispatch.
    body = pack_metadata(
        SlotMetadata(
            record.attempt,
            record.room,
            record.output_token_id,
            record.num_tokens - 1,
            record.spec_token_ids,
        )
    )
    flags = 0 if record.logprob is None else _HAS_LOGPROB
    tail = _pack_sums(record)
    version = SUMMED_VERSION if tail else METADATA_VERSION
    head = _HEAD.pack(version, flags, RECORD_BYTES + len(tail)) + body
    head += _EXTRA.pack(
        record.attempt,
        record.nonce.incarnation,
        record.nonce.counter,
        0.0 if record.logprob is None else record.logprob,
        record.ids_hash,
    )
    head += tail
    return head + _CRC.pack(zlib.crc32(head))


def decode_record(data: bytes) -> MetadataRecord:
    """The record. Raises CodecError for a wrong length, version, flag or crc."""
    if len(data) < _HEAD.size:
        raise CodecError(f"metadata record is truncated: {len(data)} bytes")
    version, flags, length = _HEAD.unpack_from(data)
    if version not in (METADATA_VERSION, SUMMED_VERSION):
        raise CodecError(
            f"metadata record version {version}, this side reads {METADATA_VERSION} and "
            f"{SUMMED_VERSION}"
        )
    is_fixed = version == METADATA_VERSION
    if length != len(data) or (length != RECORD_BYTES if is_fixed else length < RECORD_BYTES):
        raise CodecError(
            f"metadata record of {len(data)} bytes that says {length}, expected {RECORD_BYTES}"
        )
    (crc,) = _CRC.unpack_from(data, length - _CRC.size)
    if crc != zlib.crc32(data[: -_CRC.size]):
        raise CodecError(f"metadata record fails its crc32 {crc:#010x}")
    if flags & ~_HAS_LOGPROB:
        raise CodecError(f"metadata record has unknown flags {flags:#x}")
    body = unpack_metadata(data[_HEAD.size : _HEAD.size + METADATA_BYTES])
    attempt, incarnation, counter, logprob, ids_hash = _EXTRA.unpack_from(
        data, _HEAD.size + METADATA_BYTES
    )
    sent_until, sums = _unpack_sums(data) if version == SUMMED_VERSION else ((), b"")
    return MetadataRecord(
        room=body.room,
        attempt=attempt,
        nonce=Nonce(Incarnation(incarnation), counter),
        output_token_id=body.output_token_id,
        logprob=logprob if flags & _HAS_LOGPROB else None,
        num_tokens=body.kv_len + 1,
        ids_hash=ids_hash,
        spec_token_ids=body.spec_token_ids,
        sent_until=sent_until,
        sums=sums,
    )


def _pack_sums(record: MetadataRecord) -> bytes:
    ends = record.sent_until
    if not ends:
        return b""
    for end in ends:
        _check_range("sent_until", end, _U32)
    packed = _COUNTS.pack(len(ends), len(record.sums) // 4)
    return packed + b"".join(end.to_bytes(4, "little") for end in ends) + record.sums


def _unpack_sums(data: bytes) -> tuple[tuple[int, ...], bytes]:
    start, stop = RECORD_BYTES - _CRC.size, len(data) - _CRC.size
    if stop - start < _COUNTS.size:
        raise CodecError("metadata record of version 2 is too short for its checksums")
    num_ends, num_sums = _COUNTS.unpack_from(data, start)
    at = start + _COUNTS.size
    if not num_ends or at + 4 * (num_ends + num_sums) != stop:
        raise CodecError(
            f"metadata record says {num_ends} transfers and {num_sums} checksums, and has "
            f"{stop - at} bytes for them"
        )
    ends = Struct(f"<{num_ends}I").unpack_from(data, at)
    if list(ends) != sorted(set(ends)):
        raise CodecError("metadata record: its transfers do not follow one another")
    return ends, data[at + 4 * num_ends : stop]


def _check_range(name: str, value: int, limit: int) -> None:
    if not 0 <= value <= limit:
        raise ValueError(f"{name} must be in 0..{limit}, got {value}")
