from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcore.errors import TransportError
from pdcore.transports.check import MAX_REGION_BYTES
from pdcore.transports.descriptor import EndpointDescriptor, decode
from pdcore.types import Incarnation

descriptors = st.builds(
    EndpointDescriptor,
    st.just("shm"),
    st.binary(min_size=16, max_size=16).map(Incarnation),
    st.dictionaries(st.integers(0, 2**32 - 1), st.integers(1, MAX_REGION_BYTES), max_size=5),
    st.binary(max_size=100),
)


@given(descriptors)
def test_round_trip(descriptor: EndpointDescriptor) -> None:
    assert decode(descriptor.encode(), "shm") == descriptor


@given(descriptors, st.data())
def test_damage_is_refused(descriptor: EndpointDescriptor, data: st.DataObject) -> None:
    """G6: one flipped bit, or a missing or extra byte, is never accepted."""
    good = descriptor.encode()
    at = data.draw(st.integers(0, len(good) - 1))
    flipped = bytearray(good)
    flipped[at] ^= 1 << data.draw(st.integers(0, 7))
    for bad in (bytes(flipped), good[:at], good + b"\0"):
        with pytest.raises(TransportError):
            decode(bad, "shm")


@given(st.binary(max_size=200))
def test_random_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(TransportError):
        decode(data, "shm")


def test_the_refusal_names_both_transports() -> None:
    other = EndpointDescriptor("socket", Incarnation(b"i" * 16), {}).encode()
    with pytest.raises(TransportError, match="'socket', ours is 'shm'"):
        decode(other, "shm")


def test_what_cannot_be_encoded() -> None:
    for name, incarnation in (("", b"i" * 16), ("x" * 33, b"i" * 16), ("shm", b"short")):
        with pytest.raises(TransportError):
            EndpointDescriptor(name, Incarnation(incarnation), {}).encode()
    with pytest.raises(TransportError, match="at most"):
        EndpointDescriptor("shm", Incarnation(b"i" * 16), dict.fromkeys(range(5000), 1)).encode()
