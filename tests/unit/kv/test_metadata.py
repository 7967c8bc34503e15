"""The metadata record in its three forms: R120, rule 5, D12, D18, D19."""

from __future__ import annotations

import struct
import zlib

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcore.errors import CodecError
from pdcore.kv.metadata import (
    METADATA_BYTES,
    RECORD_BYTES,
    SLOT_BYTES,
    MetadataRecord,
    SlotMetadata,
    decode_record,
    encode_record,
    hash_token_ids,
    pack_metadata,
    pack_slot,
    unpack_metadata,
    unpack_slot,
)
from pdcore.types import MAX_ID, Incarnation, Nonce

U64 = st.integers(0, 2**64 - 1)
SPEC = st.lists(st.integers(0, 2**32 - 1), max_size=7).map(tuple)
FIELDS = st.builds(SlotMetadata, U64, U64, U64, U64, SPEC)
RECORDS = st.builds(
    MetadataRecord,
    room=st.integers(1, MAX_ID),
    attempt=st.integers(1, MAX_ID),
    nonce=st.builds(Nonce, st.binary(min_size=16, max_size=16).map(Incarnation), U64),
    output_token_id=U64,
    logprob=st.none() | st.floats(allow_nan=False),
    num_tokens=st.integers(1, 2**63),
    ids_hash=U64,
    spec_token_ids=SPEC,
)
SAMPLE = MetadataRecord(7, 8, Nonce(Incarnation(b"i" * 16), 3), 42, -0.5, 12, 99, (1, 2))


def test_the_vector_of_the_requirement() -> None:
    """R120: (1, 2, 3, 4, [11, 12])."""
    expected = (
        "01" + "00" * 7 + "02" + "00" * 7 + "03" + "00" * 7 + "04" + "00" * 7
        + "02000000" + "0b000000" + "0c000000" + "00" * 20
    )  # fmt: skip
    packed = pack_metadata(SlotMetadata(1, 2, 3, 4, (11, 12)))
    assert packed.hex() == expected
    assert len(packed) == METADATA_BYTES == 64


@pytest.mark.parametrize(
    "fields",
    [
        SlotMetadata(0, 1, 1, 1, tuple(range(8))),
        SlotMetadata(0, -1, 1, 1),
        SlotMetadata(0, 2**64, 1, 1),
        SlotMetadata(-1, 1, 1, 1),
        SlotMetadata(0, 1, 2**64, 1),
        SlotMetadata(0, 1, 1, -1),
        SlotMetadata(0, 1, 1, 1, (2**32,)),
        SlotMetadata(0, 1, 1, 1, (-1,)),
    ],
)
def test_what_does_not_fit_is_a_value_error(fields: SlotMetadata) -> None:
    """R120: more than 7 tokens, negative or over-long numbers."""
    with pytest.raises(ValueError):
        pack_metadata(fields)


@given(FIELDS)
def test_the_64_bytes_round_trip(fields: SlotMetadata) -> None:
    assert unpack_metadata(pack_metadata(fields)) == fields


@pytest.mark.parametrize("size", [0, 63, 65])
def test_another_length_is_a_codec_error(size: int) -> None:
    with pytest.raises(CodecError, match="64 bytes"):
        unpack_metadata(bytes(size))


def test_an_impossible_count_is_a_codec_error() -> None:
    with pytest.raises(CodecError, match="spec_count 8"):
        unpack_metadata(struct.pack("<QQQQI7I", 1, 2, 3, 4, 8, *[0] * 7))


@given(FIELDS, U64)
def test_the_raw_slot_round_trips(fields: SlotMetadata, generation: int) -> None:
    assert unpack_slot(pack_slot(fields, generation)) == (fields, generation)


def test_an_unwritten_slot_is_absent_and_a_zero_record_is_not() -> None:
    """D12: 'written' is the length field, not any non-zero byte."""
    assert unpack_slot(bytes(SLOT_BYTES)) is None
    zero = SlotMetadata(0, 0, 0, 0)
    assert unpack_slot(pack_slot(zero, 0)) == (zero, 0)


def test_a_torn_slot_is_an_error() -> None:
    packed = pack_slot(SlotMetadata(1, 2, 3, 4), 5)
    for i in range(SLOT_BYTES):
        torn = bytearray(packed)
        torn[i] ^= 1
        with pytest.raises(CodecError, match="torn"):
            unpack_slot(bytes(torn))
    with pytest.raises(CodecError, match="80 bytes"):
        unpack_slot(packed[:-1])


@given(RECORDS)
def test_the_record_round_trips(record: MetadataRecord) -> None:
    data = encode_record(record)
    assert len(data) == RECORD_BYTES
    assert decode_record(data) == record


SUMMED = attrs.evolve(SAMPLE, sent_until=(512, 1024, 1030), sums=bytes(range(20)))


@given(RECORDS, st.sets(st.integers(1, 2**32 - 1), min_size=1), st.binary(max_size=40))
def test_a_record_with_checksums_round_trips(
    record: MetadataRecord, ends: set[int], sums: bytes
) -> None:
    """Issue 4.7: version 2; who sends none writes version 1, byte for byte as before."""
    sums = sums[: len(sums) // 4 * 4]
    summed = attrs.evolve(record, sent_until=tuple(sorted(ends)), sums=sums)
    data = encode_record(summed)
    assert len(data) == RECORD_BYTES + 8 + 4 * len(ends) + len(sums)
    assert (data[0], encode_record(record)[0]) == (2, 1)
    assert decode_record(data) == summed


def resealed(data: bytes | bytearray) -> bytes:
    return bytes(data[:-4]) + struct.pack("<I", zlib.crc32(bytes(data[:-4])))


def test_checksums_that_do_not_add_up_are_refused() -> None:
    """D58: whatever a peer may send is a CodecError."""
    good = encode_record(SUMMED)
    counts, ends = RECORD_BYTES - 4, RECORD_BYTES + 4
    for offset, value in ((counts, 2), (counts, 0), (counts + 4, 2**32 - 1), (ends + 4, 512)):
        bad = bytearray(good)
        bad[offset : offset + 4] = struct.pack("<I", value)
        with pytest.raises(CodecError, match="metadata record"):
            decode_record(resealed(bad))
    bare = bytearray(encode_record(SAMPLE))
    bare[0] = 2
    with pytest.raises(CodecError, match="too short for its checksums"):
        decode_record(resealed(bare))
    for cut in (good[:-8] + good[-4:], good + b"1234"):
        with pytest.raises(CodecError, match="expected"):
            decode_record(resealed(cut))
    with pytest.raises(ValueError, match="sent_until"):
        encode_record(attrs.evolve(SUMMED, sent_until=(2**32,)))


def test_the_record_contains_the_64_bytes() -> None:
    """Rule 5: R120's bytes are inside; kv_len is the last cached position (R63)."""
    data = encode_record(SAMPLE)
    assert unpack_metadata(data[8 : 8 + METADATA_BYTES]) == SlotMetadata(8, 7, 42, 11, (1, 2))


def test_absent_logprob_is_not_zero() -> None:
    """D18: the first token's logprob is carried, or marked absent."""
    for logprob in (None, 0.0, -1.25):
        record = MetadataRecord(1, 1, SAMPLE.nonce, 5, logprob, 3, 9)
        assert decode_record(encode_record(record)).logprob == logprob


@pytest.mark.parametrize("record", [SAMPLE, SUMMED], ids=["plain", "summed"])
def test_no_byte_of_a_record_can_change_unnoticed(record: MetadataRecord) -> None:
    data = encode_record(record)
    for i in range(len(data)):
        bad = bytearray(data)
        bad[i] ^= 0x10
        with pytest.raises(CodecError):
            decode_record(bytes(bad))


@pytest.mark.parametrize("size", [0, 7, RECORD_BYTES - 1, RECORD_BYTES + 1])
def test_a_record_of_another_size_is_refused(size: int) -> None:
    data = (encode_record(SAMPLE) + b"\0")[:size]
    with pytest.raises(CodecError, match=r"truncated|expected"):
        decode_record(data)


def test_another_version_is_refused_by_number() -> None:
    data = bytearray(encode_record(SAMPLE))
    data[0] = 9
    with pytest.raises(CodecError, match="version 9, this side reads 1"):
        decode_record(bytes(data))


def test_unknown_flags_are_refused() -> None:
    data = bytearray(encode_record(SAMPLE))
    data[2] |= 0x80
    data[-4:] = struct.pack("<I", zlib.crc32(bytes(data[:-4])))
    with pytest.raises(CodecError, match="unknown flags"):
        decode_record(bytes(data))


@pytest.mark.parametrize(
    "record",
    [
        MetadataRecord(1, 1, SAMPLE.nonce, 5, None, 0, 9),
        MetadataRecord(1, 2**64, SAMPLE.nonce, 5, None, 1, 9),
        MetadataRecord(1, 1, SAMPLE.nonce, 5, None, 1, 2**64),
        MetadataRecord(1, 1, Nonce(Incarnation(b"short"), 1), 5, None, 1, 9),
        MetadataRecord(1, 1, Nonce(SAMPLE.nonce.incarnation, -1), 5, None, 1, 9),
    ],
)
def test_a_record_that_cannot_be_written_is_a_value_error(record: MetadataRecord) -> None:
    with pytest.raises(ValueError):
        encode_record(record)


def test_the_hash_tells_prompts_apart_and_never_changes() -> None:
    """D19: equal counts are not equal prompts. The literal pins the hash across hosts."""
    assert hash_token_ids([1, 2, 3]) == hash_token_ids((1, 2, 3)) == 13041116711478803063
    assert len({hash_token_ids(ids) for ids in ([], [0], [0, 0], [1, 2], [2, 1])}) == 5
