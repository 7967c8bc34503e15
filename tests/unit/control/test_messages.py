"""Messages are values: immutable, hashable where the cores need it, and without pointers."""

from __future__ import annotations

import typing

import msgspec
import pytest

from pdcore.control import messages as m
from pdcore.types import Incarnation, LeaseId, Nonce, RoomKey

KEY = RoomKey(5, 6)
LEASE = LeaseId(Incarnation(b"d" * 16), 1)
NONCE = Nonce(Incarnation(b"p" * 16), 2)


def structs(union: object) -> list[type[msgspec.Struct]]:
    return list(typing.get_args(union))


UNIONS = [m.PeerMessage, m.LeaderMessage, m.WorkerMessage]
ALL = [kind for union in UNIONS for kind in structs(union)]


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_every_message_is_frozen_tagged_and_strict(kind: type[msgspec.Struct]) -> None:
    config = kind.__struct_config__
    assert config.frozen
    assert config.array_like, "arrays are a third of the bytes of maps"
    assert config.forbid_unknown_fields
    assert config.tag is not None


def test_tags_are_unique_within_each_union() -> None:
    for union in UNIONS:
        tags = [kind.__struct_config__.tag for kind in structs(union)]
        assert len(tags) == len(set(tags))


def test_frozen_messages_can_be_compared_and_kept() -> None:
    assert m.Claim(KEY, LEASE, NONCE) == m.Claim(KEY, LEASE, NONCE)
    assert len({m.Grant(KEY, NONCE), m.Grant(KEY, NONCE)}) == 1
    with pytest.raises(AttributeError):
        m.Grant(KEY, NONCE).nonce = NONCE  # type: ignore[misc]


def check_no_pointer(kind: type[msgspec.Struct]) -> None:
    """D58: blocks are named by id inside registered regions, never by address."""
    names = [field.name for field in msgspec.structs.fields(kind)]
    assert not [n for n in names if "ptr" in n or "pointer" in n or n.endswith("addr")], names


class SeedInfo(msgspec.Struct):
    """The seed's handshake (R51)."""

    metadata_slot_ptr: int
    dst_kv_ptrs: list[int]


def test_d58_no_message_holds_a_pointer() -> None:
    """D58: a raw address used unchecked lets a hostile peer write anywhere."""
    for kind in (*ALL, m.Endpoint, m.Frame):
        check_no_pointer(kind)
    with pytest.raises(AssertionError):
        check_no_pointer(SeedInfo)
