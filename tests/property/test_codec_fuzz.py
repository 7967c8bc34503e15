"""Invariant of the codec: any bytes give either a valid value or a CodecError, nothing else."""

from __future__ import annotations

import struct
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcore.control import codec
from pdcore.control import messages as m
from pdcore.errors import HTTP_STATUS, CodecError
from pdcore.types import MAX_ID, Failure, Incarnation, LeaseId, Nonce, RoomKey

ids = st.integers(1, MAX_ID)
counts = st.integers(0, 2**31 - 1)
names = st.text(min_size=1, max_size=20)
texts = st.text(max_size=40)
finite = st.floats(-1e12, 1e12)
incarnations = st.binary(min_size=16, max_size=16).map(Incarnation)
maybe_incarnations = st.one_of(st.just(Incarnation(b"")), incarnations)
keys = st.builds(RoomKey, ids, ids)
leases = st.builds(LeaseId, incarnations, st.integers(0, MAX_ID))
nonces = st.builds(Nonce, incarnations, st.integers(0, MAX_ID))
packed = st.lists(counts, max_size=5).map(codec.pack_ids)
failures = st.sampled_from(sorted(HTTP_STATUS)).flatmap(
    lambda code: st.builds(Failure, st.just(code), texts, st.just(HTTP_STATUS[code]))
)
not_done = st.sampled_from([k for k in m.StatusKind if k is not m.StatusKind.DONE])

handshakes = st.tuples(counts, counts).flatmap(
    lambda two: st.builds(
        m.Handshake,
        keys,
        leases,
        st.binary(max_size=20),
        st.dictionaries(names, packed, max_size=2),
        st.just(min(two)),
        st.just(max(two)),
        st.integers(0, 2**64 - 1),
        st.integers(1, 64),
        finite,
        finite,
        st.booleans(),
    )
)
peer_messages = st.one_of(
    handshakes,
    st.builds(m.Claim, keys, leases, nonces),
    st.builds(m.Grant, keys, nonces),
    st.builds(m.Refuse, keys, nonces, texts),
    st.builds(m.Status, keys, leases, not_done, st.none() | nonces, st.none() | failures),
    st.builds(
        m.Status,
        keys,
        leases,
        st.just(m.StatusKind.DONE),
        nonces,
        st.none(),
        st.binary(max_size=99),
    ),
    st.builds(m.StatusAck, keys, leases, st.sampled_from(m.StatusKind)),
    st.builds(m.Cancel, keys, leases, st.lists(nonces, max_size=3).map(tuple)),
    st.builds(m.CancelAck, keys, leases, st.none() | nonces),
    st.builds(m.Stale, keys, maybe_incarnations),
    st.builds(m.Heartbeat, st.integers(0, MAX_ID)),
    st.builds(m.HeartbeatAck, st.integers(0, MAX_ID)),
)
frames = st.builds(
    m.Frame,
    names,
    counts,
    incarnations,
    names,
    maybe_incarnations,
    st.lists(peer_messages, max_size=3),
)
sampling = st.builds(
    m.SubmitSampling,
    st.none() | counts,
    counts,
    finite,
    finite,
    counts,
    st.none() | st.integers(-(2**63), 2**64 - 1),
    st.lists(counts, max_size=3).map(tuple),
    st.booleans(),
    st.booleans(),
    counts,
)
leader_messages = st.one_of(
    st.builds(
        m.Submit,
        keys,
        texts,
        packed,
        sampling,
        finite,
        finite,
        texts,
        texts,
        texts,
        counts,
        st.none() | ids,
    ),
    st.builds(m.Abort, keys, texts, st.booleans()),
    st.builds(m.Stop, finite),
)
worker_messages = st.one_of(
    st.builds(m.Accepted, keys),
    st.builds(m.Aborted, keys, st.booleans()),
    st.integers(0, 3).flatmap(
        lambda n: st.builds(
            m.Tokens,
            st.lists(keys, min_size=n, max_size=n),
            st.lists(st.lists(counts, max_size=3), min_size=n, max_size=n),
            st.none()
            | st.lists(
                st.none() | st.lists(st.none() | finite, max_size=3), min_size=n, max_size=n
            ),
        )
    ),
    st.builds(
        m.Finished,
        keys,
        texts,
        st.none() | failures,
        counts,
        counts,
        st.dictionaries(texts, finite, max_size=2),
    ),
    st.builds(
        m.WorkerReady,
        counts,
        counts,
        incarnations,
        names,
        counts,
        counts,
        counts,
        counts,
        names,
    ),
    st.builds(
        m.WorkerHealth,
        counts,
        st.lists(texts, max_size=2),
        st.dictionaries(texts, finite, max_size=2),
    ),
)

#: decoder, and what makes valid bytes for it
WIRES: dict[str, tuple[Callable[[bytes], object], st.SearchStrategy[bytes], int]] = {
    "frame": (codec.decode_frame, frames.map(codec.encode_frame), 1),
    "leader": (codec.decode_leader_message, leader_messages.map(codec.encode_link), 2),
    "worker": (codec.decode_worker_message, worker_messages.map(codec.encode_link), 3),
}


@given(frames)
def test_every_valid_frame_survives(frame: m.Frame) -> None:
    assert codec.decode_frame(codec.encode_frame(frame)) == frame


@given(leader_messages)
def test_every_valid_leader_message_survives(message: m.LeaderMessage) -> None:
    assert codec.decode_leader_message(codec.encode_link(message)) == message


@given(worker_messages)
def test_every_valid_worker_message_survives(message: m.WorkerMessage) -> None:
    assert codec.decode_worker_message(codec.encode_link(message)) == message


@st.composite
def mutated(draw: st.DrawFn, valid: st.SearchStrategy[bytes]) -> bytes:
    """A valid frame, damaged in one to four places, with its length field made right again
    half of the time, so that the damage reaches the body's decoder."""
    data = bytearray(draw(valid))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        match draw(st.integers(0, 4)):
            case 0 if data:
                data[at] ^= 1 << draw(st.integers(0, 7))
            case 1 if data:
                data[at] = draw(st.sampled_from([0x00, 0x7F, 0x80, 0xC0, 0xC1, 0xCB, 0xDD, 0xFF]))
            case 2:
                del data[at : at + draw(st.integers(1, 8))]
            case 3:
                data[at:at] = draw(st.binary(min_size=1, max_size=8))
            case _:
                data += draw(st.binary(max_size=4))
    if len(data) >= 8 and draw(st.booleans()):
        data[4:8] = struct.pack("<I", len(data) - 8)
    return bytes(data)


def check_is_total(decode: Callable[[bytes], object], data: bytes) -> None:
    """A value that is valid enough to be sent on, or CodecError."""
    try:
        value = decode(data)
    except CodecError:
        return
    except Exception as error:
        raise AssertionError(f"{decode} raised {error!r}") from error
    again = codec.encode_frame(value) if isinstance(value, m.Frame) else codec.encode_link(value)
    assert decode(again) == value


@pytest.mark.parametrize("wire", WIRES)
@given(data=st.data())
def test_damaged_frames_are_codec_errors(wire: str, data: st.DataObject) -> None:
    decode, valid, _ = WIRES[wire]
    check_is_total(decode, data.draw(mutated(valid)))


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=17)
    | st.sampled_from(["claim", "status", "handshake", "submit", "tokens", "ready"]),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=20,
)


@pytest.mark.parametrize("wire", WIRES)
@given(value=anything, noise=st.binary(max_size=64), is_noise=st.booleans())
def test_any_body_under_a_good_header_is_a_codec_error(
    wire: str, value: object, noise: bytes, is_noise: bool
) -> None:
    decode, _, kind = WIRES[wire]
    body = noise if is_noise else msgspec.msgpack.encode(value)
    check_is_total(decode, b"PD" + bytes([1, kind]) + struct.pack("<I", len(body)) + body)


@pytest.mark.parametrize("wire", WIRES)
@given(data=st.binary(max_size=64))
def test_noise_is_a_codec_error(wire: str, data: bytes) -> None:
    check_is_total(WIRES[wire][0], data)


def test_the_check_fails_on_a_decoder_that_lets_foreign_errors_out() -> None:
    """The mutant: msgspec used directly, as one would write it first."""
    with pytest.raises(AssertionError, match="raised"):
        check_is_total(msgspec.msgpack.Decoder(m.Frame).decode, b"\xc1")
