from __future__ import annotations

import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcore.errors import TransportError
from pdcore.transports.check import MAX_REGION_BYTES
from pdcore.transports.torchdist_wire import (
    Address,
    ChunkHead,
    Hello,
    Meeting,
    Welcome,
    decode_address,
    decode_chunk,
    decode_hello,
    decode_key,
    decode_meeting,
    decode_welcome,
    encode_key,
)
from pdcore.transports.torchdist_witness import NOBODY
from pdcore.types import Incarnation, LeaseId
from tests.unit.transports.torchdist_rig import HOST, rows

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="torchdist is Linux")
ADDRESS = Address("gloo", HOST, 4711, b"k" * 16)
LEASE = LeaseId(Incarnation(b"i" * 16), 7)


@pytest.mark.parametrize("host", [HOST, "::1", "10.1.2.3"])
def test_an_address_survives(host: str) -> None:
    address = Address("hccl", host, 65535, b"t" * 16)
    assert decode_address(address.encode()) == address


def test_a_damaged_address_is_never_dialled() -> None:
    """G6: any flipped bit, any part; a damaged host may be somebody else's."""
    good = ADDRESS.encode()
    for i in range(len(good)):
        for bit in range(8):
            bad = bytearray(good)
            bad[i] ^= 1 << bit
            with pytest.raises(TransportError, match="malformed"):
                decode_address(bytes(bad))
        with pytest.raises(TransportError, match="malformed"):
            decode_address(good[:i])


def test_a_name_is_no_address() -> None:
    """Resolving one may take longer than ``connect`` may."""
    named = Address("gloo", "prefill.example", 80, b"t" * 16)
    with pytest.raises(TransportError, match=r"prefill\.example"):
        decode_address(named.encode())


@given(st.binary(max_size=200))
def test_noise_is_refused(noise: bytes) -> None:
    """Whatever a peer sends is an error of the transport or a value, nothing else."""
    for read in (
        decode_address,
        decode_hello,
        decode_welcome,
        decode_meeting,
        decode_key,
        decode_chunk,
    ):
        try:
            read(noise)
        except TransportError:
            continue


def test_frames_survive() -> None:
    hello = Hello(Incarnation(b"a" * 16), Incarnation(b"b" * 16), b"c" * 16, NOBODY)
    assert decode_hello(hello.encode()) == hello
    welcome = Welcome(NOBODY, {3: 1 << 40, 1: 5})
    assert decode_welcome(welcome.encode()) == welcome
    for sizes in ({1: 0}, {1: MAX_REGION_BYTES + 1}, {1: (1 << 64) - 1}):
        # Such a size ended the worker's loop at the first submit (D58).
        with pytest.raises(TransportError, match="WELCOME"):
            decode_welcome(Welcome(NOBODY, sizes).encode())
    twice = welcome.encode() + welcome.encode()[len(NOBODY) :]
    with pytest.raises(TransportError, match="WELCOME"):
        decode_welcome(twice)
    meeting = Meeting(1 << 20, b"k" * 16)
    assert decode_meeting(meeting.encode()) == meeting
    assert decode_key(encode_key("0/1", b"\0address")) == ("0/1", b"\0address")
    for notify in (None, b"", b"wake up"):
        head = ChunkHead(LEASE, 30, rows((1, 2, 10), (3, 4, 20)), True, notify)
        found = decode_chunk(head.encode())
        assert (found.lease, found.num_bytes, found.is_last) == (LEASE, 30, True)
        assert found.notify == notify
        assert np.array_equal(found.table, head.table)


def test_a_meeting_with_absurd_chunks_is_refused() -> None:
    for chunk_bytes in (0, 100, 1 << 31):
        with pytest.raises(TransportError, match="chunks of"):
            decode_meeting(Meeting(chunk_bytes, b"k" * 16).encode())
