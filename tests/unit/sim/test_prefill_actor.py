"""What only a prefill rank can meet."""

from __future__ import annotations

from pdcore.sim.actors import Write
from pdcore.sim.places import Dispatch, Place, Shape
from pdcore.sim.prefill_actor import PrefillActor
from pdcore.types import Incarnation, RoomKey

PREFILL = Place("prefill0", False, "prefill")
SHAPE = Shape((PREFILL,), (Dispatch(RoomKey(1, 1), "prefill"),))


def test_a_refused_request_is_remembered_for_its_other_half() -> None:
    actor = PrefillActor(PREFILL, 0, SHAPE)
    actor.apply(("refuse", 0))
    assert actor.core.rooms.tombstones.get(RoomKey(1, 1), 0.0) is not None
    actor.apply(("submit", 0))
    assert actor.created == [0]
    assert actor.problems == []


def test_a_write_that_reads_freed_blocks_is_noticed() -> None:
    """D4: source blocks are held while a write may read them."""
    actor = PrefillActor(PREFILL, 0, SHAPE)
    actor.apply(("submit", 0))
    actor.writes[7] = Write(actor.me.incarnation, Incarnation(b"d" * 16), 1)
    actor.core.rooms._handles[7] = RoomKey(1, 1)
    assert list(actor.exposed()) == ["prefill0: write 7 reads blocks that are back in the pool"]


def test_keys_tell_states_apart_and_nothing_else() -> None:
    first, second = PrefillActor(PREFILL, 0, SHAPE), PrefillActor(PREFILL, 0, SHAPE)
    assert first.key() == second.key()
    first.apply(("submit", 0))
    assert first.key() != second.key()
    second.apply(("submit", 0))
    assert first.key() == second.key()
