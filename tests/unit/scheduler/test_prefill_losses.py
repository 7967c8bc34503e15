"""Which prefill rooms end when a decode rank is out of reach."""

from __future__ import annotations

from pdcore.config import CoreLimits
from pdcore.engine.simulated import simulated_tokens
from pdcore.errors import TransportError
from pdcore.fsm.states import PeerState, SenderState
from pdcore.testing.world import World, make_world
from pdcore.transports.base import PeerSession
from pdcore.types import RoomKey, SamplingParams

PROMPT = list(range(10, 70))
FIVE = SamplingParams(max_tokens=5)


def drained(world: World) -> bool:
    while world.fabric.step() is not None:
        pass
    return not any(rank.worker.core.live_keys() for rank in world.ranks.values())


def failure_of(world: World, name: str, key: RoomKey) -> tuple[str, str] | None:
    result = world.ranks[name].result(key)
    assert result is not None
    return None if result.failure is None else (result.failure.code, result.failure.detail)


def test_a_data_plane_that_cannot_be_opened_proves_no_death() -> None:
    """The requests that wanted it fail with the reason; the peer is alive and works again as
    soon as it can be reached."""
    world = make_world(stepped=True, num_blocks=60)
    executor = world.prefill.worker.executor
    connect = executor.transport.connect

    def refuse(descriptor: bytes) -> PeerSession:
        raise TransportError("no answer within 1.0 s")

    executor.transport.connect = refuse
    key = world.submit(PROMPT, sampling=FIVE)
    world.run(lambda: drained(world) and world.decode.result(key) is not None)
    detail = "decode decode rank 0: its data plane cannot be reached: no answer within 1.0 s"
    assert failure_of(world, "decode", key) == ("unreachable", detail)
    assert failure_of(world, "prefill", key) == ("unreachable", detail)
    decode = world.decode.worker.core.setup.me.incarnation
    assert world.prefill.worker.core.rooms.peers.state_of(decode) is not PeerState.DEAD
    executor.transport.connect = connect
    world.clock.advance(5.0)
    key = world.submit(PROMPT, sampling=FIVE)
    world.run(lambda: drained(world) and world.decode.result(key) is not None)
    assert failure_of(world, "decode", key) is None
    assert world.decode.tokens(key) == simulated_tokens(world.model, PROMPT, 5)


def test_a_claim_that_nobody_answers_ends_when_its_peer_falls_silent() -> None:
    """Nothing was granted, so nothing is lost by giving up; the blocks come back at once, and
    that decode rank is out for new work."""
    world = make_world(limits=CoreLimits(prefill_chunk_tokens=8), manual=True)
    key = world.submit(PROMPT, sampling=FIVE)
    core = world.prefill.worker.core

    def deliver_to_prefill() -> bool:
        for flight in world.network.pending():
            if flight.to.endswith("prefill"):
                world.network.deliver(flight.sequence)
        record = core.rooms.records.get(key)
        return record is not None and record.sender.state is SenderState.WAITING_FOR_INPUT

    world.run(deliver_to_prefill)
    world.ranks.pop("decode")
    world.run(lambda: world.prefill.result(key) is not None)
    why = failure_of(world, "prefill", key)
    assert why == ("unavailable", "decode rank 0: it has not answered 5 heartbeats in a row")
    assert core.rooms.refused_peers(world.clock.monotonic()).keys() == {"decode"}
    ledger = core.blocks.audit()["full"]
    assert ledger.free == ledger.total
