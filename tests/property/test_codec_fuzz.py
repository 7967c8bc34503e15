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
from pdcore.errors import CodecError
from pdcore.testing import frames, leader_messages, worker_messages

#: decoder, and what makes valid bytes for it
WIRES: dict[str, tuple[Callable[[bytes], object], st.SearchStrategy[bytes], int]] = {
    "frame": (codec.decode_frame, frames().map(codec.encode_frame), 1),
    "leader": (codec.decode_leader_message, leader_messages().map(codec.encode_link), 2),
    "worker": (codec.decode_worker_message, worker_messages().map(codec.encode_link), 3),
}


@given(frames())
def test_every_valid_frame_survives(frame: m.Frame) -> None:
    assert codec.decode_frame(codec.encode_frame(frame)) == frame


@given(leader_messages())
def test_every_valid_leader_message_survives(message: m.LeaderMessage) -> None:
    assert codec.decode_leader_message(codec.encode_link(message)) == message


@given(worker_messages())
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
