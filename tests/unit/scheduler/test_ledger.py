"""The ledger of a rank: every block and slot in one state, recounted, all free at rest."""

from __future__ import annotations

import pytest

from pdcore.config import CoreLimits
from pdcore.errors import OwnershipError
from pdcore.scheduler.ledger import SLOTS, Account, accounts, audit
from pdcore.testing.world import World, make_world
from pdcore.types import SamplingParams

PROMPT = list(range(10, 50))
LIMITS = CoreLimits(num_reserved_decode_tokens=8, num_metadata_slots=4, prefill_chunk_tokens=8)


def states(world: World, name: str) -> dict[str, Account]:
    return accounts(world.ranks[name].worker.core.rooms)


def make() -> World:
    return make_world(stepped=True, num_blocks=33, limits=LIMITS)


def test_a_request_passes_through_the_states_and_they_always_add_up() -> None:
    world = make()
    idle = {"full": Account(32, 0, 0, 0, 0), SLOTS: Account(4, 0, 0, 0, 0)}
    assert states(world, "decode") == idle
    assert states(world, "prefill") == {"full": Account(32, 0, 0, 0, 0)}
    seen: set[str] = set()
    key = world.submit(PROMPT, sampling=SamplingParams(max_tokens=30))

    def look() -> bool:
        world.fabric.step()
        for name in ("prefill", "decode"):
            for pool, account in audit(world.ranks[name].worker.core.rooms).items():
                assert account.total == (4 if pool == SLOTS else 32)
                seen.update(f"{name} {k}" for k, n in account._asdict().items() if n)
        return world.decode.result(key) is not None

    world.run(look)
    assert seen == {
        *(f"prefill {state}" for state in ("free", "held", "leased")),
        *(f"decode {state}" for state in ("free", "reserved", "held", "leased")),
    }
    world.settle()
    for name in ("prefill", "decode"):
        audit(world.ranks[name].worker.core.rooms, at_rest=True)


def test_who_is_over_while_somebody_may_write_is_quarantined() -> None:
    world = make()
    key = world.submit(PROMPT, sampling=SamplingParams(max_tokens=4))
    world.run(lambda: any(a.kind == "move" for a in world.fabric.pending()))
    world.ranks.pop("prefill")
    world.abort(key)
    world.run(lambda: world.decode.result(key) is not None)
    found = states(world, "decode")
    assert found["full"].quarantined == 11
    assert found[SLOTS] == Account(3, 0, 0, 0, 1)
    with pytest.raises(OwnershipError, match=r"full: .* 11 quarantined of 32 while no request"):
        audit(world.decode.worker.core.rooms, at_rest=True)


def test_what_is_reserved_is_free_but_never_more_than_that() -> None:
    world = make_world(num_blocks=9, limits=LIMITS)
    blocks = world.decode.worker.core.blocks
    assert blocks.allocate_slots(1, 0, 28)
    assert states(world, "decode")["full"] == Account(0, 1, 7, 0, 0)


def test_a_leak_is_found_at_rest_and_a_lie_always() -> None:
    world = make()
    core = world.decode.worker.core
    core.blocks.allocate_slots(77, 0, 5)
    audit(core.rooms)
    with pytest.raises(OwnershipError, match="full: 28 free, 2 reserved, 2 held"):
        audit(core.rooms, at_rest=True)
    core.blocks.release(77)
    slot = core.rooms.slots.alloc()
    with pytest.raises(
        OwnershipError, match="metadata slots: 3 free, 0 reserved, 0 held, 1 leased"
    ):
        audit(core.rooms, at_rest=True)
    core.rooms.slots.free(slot)
    core.blocks._by_key["full"].pool._free.take(1)
    with pytest.raises(OwnershipError, match="free runs hold 31"):
        audit(core.rooms)
