"""Effects are frozen values: they compare, hash where their parts do, and cannot change."""

from __future__ import annotations

import pytest

from pdcore.fsm import effects
from pdcore.fsm.effects import CancelTransfer, Effect, PostTransfer, RevokeLease
from pdcore.types import Incarnation, LeaseId, PeerRef, RoomKey

KINDS = [
    kind
    for kind in vars(effects).values()
    if isinstance(kind, type) and issubclass(kind, Effect) and kind is not Effect
]
LEASE = LeaseId(Incarnation(b"d" * 16), 1)
PEER = PeerRef("decode:8100", 0, Incarnation(b"d" * 16), "tcp://decode:9")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_effect_is_frozen(kind: type[Effect]) -> None:
    assert kind.__struct_config__.frozen


def test_effects_compare_by_value() -> None:
    assert RevokeLease(LEASE) == RevokeLease(LeaseId(Incarnation(b"d" * 16), 1))
    assert CancelTransfer(1) != CancelTransfer(2)
    with pytest.raises(AttributeError):
        CancelTransfer(1).handle = 2


def test_what_the_entity_does_not_know_is_empty_until_the_core_fills_it() -> None:
    post = PostTransfer(1, RoomKey(1, 2), PEER, LEASE, start_token=0, num_tokens=16)
    assert (post.endpoint, post.batches, post.ranges) == (b"", (), {})
    assert post.ranges is not PostTransfer(2, RoomKey(1, 2), PEER, LEASE, 0, 16).ranges
