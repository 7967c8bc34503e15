"""The small cluster is spelled as the product spells it."""

from __future__ import annotations

from pdcore.sim.places import BLOCK, Dispatch, Place, Shape, life_of, route_to, setup_of
from pdcore.types import RoomKey

RANKS = tuple(Place(f"prefill{n}", False, "prefill", n, 2) for n in (0, 1))
SHAPE = Shape(RANKS, (Dispatch(RoomKey(1, 1), "prefill"),), num_chunks=2)


def test_every_life_is_another_incarnation_at_the_same_address() -> None:
    first, second = RANKS[0].ref(0), RANKS[0].ref(1)
    assert first.address == second.address
    assert len(first.incarnation) == 16
    assert (life_of(first.incarnation), life_of(second.incarnation)) == ("prefill0.0", "prefill0.1")


def test_the_route_names_the_lives_that_are_registered() -> None:
    route = route_to(RANKS, (0, 1), SHAPE)
    assert [r.incarnation for r in route.ranks.values()] == [
        RANKS[0].ref(0).incarnation.hex(),
        RANKS[1].ref(1).incarnation.hex(),
    ]


def test_a_request_fills_its_chunks() -> None:
    assert len(SHAPE.request(0).prompt_token_ids) == 2 * BLOCK
    assert setup_of(RANKS[1], 0, SHAPE).limits.prefill_chunk_tokens == BLOCK
