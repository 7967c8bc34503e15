"""Peers that lie, restart, or come from elsewhere: what they say must not count."""

from __future__ import annotations

import msgspec
import pytest

from pdcore.config import CoreLimits
from pdcore.control.codec import decode_frame, encode_frames
from pdcore.control.messages import (
    Cancel,
    CancelAck,
    Claim,
    Finished,
    Handshake,
    Stale,
    Status,
    StatusAck,
    StatusKind,
    WorkerHealth,
)
from pdcore.engine.simulated import simulated_tokens
from pdcore.errors import failure
from pdcore.fsm.events import MessageReceived
from pdcore.fsm.states import ReceiverState, SenderState
from pdcore.scheduler.decode_rooms import ACKNOWLEDGED_S
from pdcore.testing.world import World, make_world
from pdcore.transports.base import Revocation
from pdcore.types import Incarnation, LeaseId, Nonce, PeerRef, RoomKey, SamplingParams

PROMPT = list(range(10, 30))
FIVE = SamplingParams(max_tokens=5)
STRANGER = PeerRef("stranger:1", 0, Incarnation(b"s" * 16), "tcp://stranger:1")


def in_transfer(**changes: object) -> tuple[World, RoomKey]:
    """A request whose write is posted and waits for the fabric."""
    world = make_world(num_blocks=10, prefill_blocks=64, stepped=True, seed=3, **changes)
    key = world.submit(PROMPT, sampling=FIVE)
    world.run(lambda: any(a.kind == "move" for a in world.fabric.pending()))
    return world, key


def hear(world: World, role: str, sender: PeerRef, message: object) -> None:
    core = world.ranks[role].worker.core
    core.handle_event(MessageReceived(sender, b"", message), world.clock.monotonic())
    world.step()


def receiver_state(world: World, key: RoomKey) -> ReceiverState:
    return world.decode.worker.core.rooms.records[key].receiver.state


def finish_well(world: World, key: RoomKey) -> None:
    def is_over() -> bool:
        while world.fabric.step() is not None:
            pass
        return world.decode.result(key) is not None

    world.run(is_over)
    result = world.decode.result(key)
    assert result is not None
    assert result.failure is None, result.failure
    assert world.decode.tokens(key) == simulated_tokens(world.model, PROMPT, 5)


def test_a_dummy_status_never_completes_a_request() -> None:
    """A target that calls itself a dummy while it may write: the request fails, drained."""
    world, key = in_transfer()
    prefill = world.prefill.worker.core.setup.me
    lease = world.decode.worker.core.rooms.records[key].receiver.lease
    hear(world, "decode", prefill, Status(key, lease, StatusKind.DUMMY))
    assert receiver_state(world, key) is ReceiverState.DRAINING
    world.run(lambda: world.decode.result(key) is not None)
    assert world.decode.tokens(key) == []


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_strangers_stale_proves_nothing(role: str) -> None:
    """Only another life at the same place can prove a restart (rule 2)."""
    world, key = in_transfer()
    other = world.ranks["decode" if role == "prefill" else "prefill"]
    addressed = other.worker.core.setup.me.incarnation
    hear(world, role, STRANGER, Stale(key, addressed))
    hear(world, role, other.worker.core.setup.me, Stale(key, addressed))
    finish_well(world, key)


def test_a_strangers_ack_does_not_silence_the_outcome() -> None:
    """A StatusAck counts from the leg's own rank, about what it was told."""
    world, key = in_transfer()
    record = world.prefill.worker.core.rooms.records[key]
    leg = record.sender.legs[0]
    hear(world, "prefill", STRANGER, StatusAck(key, leg.lease, StatusKind.DONE))
    assert not leg.acked
    finish_well(world, key)


def test_a_strangers_cancel_ends_nothing() -> None:
    """Both legs name the chosen instances: nobody else may cancel (section 2)."""
    world, key = in_transfer()
    lease = LeaseId(STRANGER.incarnation, 1)
    hear(world, "prefill", STRANGER, Cancel(key, lease, ()))
    assert world.prefill.worker.core.rooms.records[key].sender.state is SenderState.TRANSFERRING
    finish_well(world, key)


def test_a_claim_with_a_nonce_of_another_life_gets_no_grant() -> None:
    """Nobody could ever acknowledge it: its blocks would stay out for ever."""
    world = make_world(seed=3)
    key = world.submit(PROMPT, to=("decode",), sampling=FIVE)
    world.run(lambda: receiver_state(world, key) is ReceiverState.TRANSFERRING)
    receiver = world.decode.worker.core.rooms.records[key].receiver
    prefill = world.prefill.worker.core.setup.me
    foreign = Nonce(Incarnation(b"x" * 16), 1)
    hear(world, "decode", prefill, Claim(key, receiver.lease, foreign))
    assert receiver.targets[0].nonce is None


def test_timings_of_a_stranger_do_not_reach_the_result() -> None:
    world, key = in_transfer()
    lease = world.decode.worker.core.rooms.records[key].receiver.lease
    lie = Status(key, lease, StatusKind.QUEUED, timings={"x": 1.0})
    hear(world, "decode", STRANGER, lie)
    finish_well(world, key)
    result = world.decode.result(key)
    assert result is not None
    assert "prefill_x" not in result.timeline


def test_a_partition_longer_than_the_linger_time_loses_no_finished_transfer() -> None:
    """Prefill tells its outcome until the request's own deadline."""
    world = make_world(seed=3, stepped=True, limits=CoreLimits(linger_s=5.0))
    key = world.submit(PROMPT, sampling=FIVE, timeout_s=120.0)
    world.run(lambda: any(a.kind == "move" for a in world.fabric.pending()))
    ends = [r.worker.ports.channel._channel.address for r in world.ranks.values()]
    world.network.partition(*ends)
    while world.fabric.step() is not None:
        pass
    until = world.clock.monotonic() + 40.0
    world.run(lambda: world.clock.monotonic() > until)
    assert world.decode.result(key) is None
    world.network.heal()
    finish_well(world, key)


@pytest.mark.parametrize("code", ["overloaded", "shutting_down"])
def test_d11_what_the_shell_refuses_reaches_decode_too(code: str) -> None:
    """D11: prefill answers its leader; decode, which waits already, hears of it by STATUS."""
    limits = CoreLimits(max_queued_requests=1)
    world = make_world(seed=3, limits=limits)
    if code == "overloaded":
        world.submit(PROMPT, to=("prefill",), sampling=FIVE)
    else:
        world.prefill.worker._drain_until_s = world.clock.monotonic() + 1000.0
    start = world.clock.monotonic()
    key = world.submit(PROMPT, sampling=FIVE)
    world.run(lambda: world.decode.result(key) is not None)
    result = world.decode.result(key)
    assert result is not None
    assert result.failure is not None
    assert result.failure.code == code
    assert world.clock.monotonic() - start < 3.0


def test_d18_a_token_outside_the_vocabulary_fails_its_own_request_only() -> None:
    """D18: one peer's nonsense must not cost the batch of all others."""
    world = make_world(seed=3)
    object.__setattr__(world.decode.worker.core.setup, "vocab_size", 1)
    bad = world.submit(PROMPT, sampling=FIVE)
    world.run(lambda: world.decode.result(bad) is not None)
    result = world.decode.result(bad)
    assert result is not None
    assert result.failure is not None
    assert result.failure.code == "bad_metadata"
    world.settle()
    assert world.decode.worker.core.blocks.audit()["full"].held == 0


def test_quarantine_runs_from_the_last_moment_a_writer_could_post() -> None:
    """An acknowledgement after half an hour does not make the period half an hour old."""
    world, key = in_transfer(revocation=Revocation.QUARANTINE)
    period_s = world.decode.worker.core.setup.quarantine_s
    ends = [r.worker.ports.channel._channel.address for r in world.ranks.values()]
    world.network.partition(*ends)
    world.abort(key)
    until = world.clock.monotonic() + 2 * period_s
    world.run(lambda: world.clock.monotonic() > until)
    assert receiver_state(world, key) is ReceiverState.DRAINING
    world.network.heal()
    healed = world.clock.monotonic()

    def is_released() -> bool:
        while world.fabric.step() is not None:
            pass
        return world.decode.worker.core.blocks.audit()["full"].quarantined == 0

    world.run(is_released)
    assert world.clock.monotonic() - healed >= ACKNOWLEDGED_S


def swallow_acks(world: World) -> None:
    """A prefill rank that answers everything but cancels."""
    channel = world.prefill.worker.ports.channel
    send = channel.send

    def mute(to: str, data: bytes) -> bool:
        frame = decode_frame(data)
        kept = [m for m in frame.messages if not isinstance(m, CancelAck)]
        changed = msgspec.structs.replace(frame, messages=kept)
        return all(send(to, part) for part in encode_frames(changed)) if kept else True

    channel.send = mute


def test_a_stuck_peer_shows_in_health_and_gets_no_more_grants() -> None:
    """Rule 6: its blocks stay out, counted; readiness says so; beyond its share of the pool
    it is granted nothing, and the request fails with 503 instead of adding to the pile."""
    limits = CoreLimits(drain_timeout_s=5.0, quarantine_share=0.2)
    world = make_world(num_blocks=40, stepped=True, seed=3, limits=limits)
    key = world.submit([7] * 60, sampling=FIVE)
    world.run(lambda: any(a.kind == "move" for a in world.fabric.pending()))
    swallow_acks(world)
    world.abort(key)
    until = world.clock.monotonic() + 12.0
    world.run(lambda: world.clock.monotonic() > until)
    snapshot = world.decode.worker.core.snapshot()
    assert (snapshot.stuck, snapshot.kv_quarantined) == (1, 16)
    reports = [m for m in world.decode.said if isinstance(m, WorkerHealth)]
    assert reports[-1].problems == ["1 room waits for prefill rank 0, which does not acknowledge"]
    after = world.submit(PROMPT, sampling=FIVE)
    world.run(lambda: world.decode.result(after) is not None)
    result = world.decode.result(after)
    assert result is not None
    assert result.failure is not None
    assert (result.failure.code, result.failure.http_status) == ("unavailable", 503)


def test_a_repeated_submit_does_not_end_the_first() -> None:
    """The leader link may repeat a message: one key has one result."""
    world = make_world(seed=3)
    key = world.submit(PROMPT, sampling=FIVE)
    world.submit(PROMPT, key=key, sampling=FIVE)
    world.run(lambda: world.decode.result(key) is not None)
    results = [m for m in world.decode.said if isinstance(m, Finished) and m.key == key]
    assert [r.failure for r in results] == [None]
    assert world.decode.tokens(key) == simulated_tokens(world.model, PROMPT, 5)


def test_a_stranger_with_the_right_rank_speaks_for_nobody() -> None:
    """Section 2: a message of another incarnation changes no lifecycle; above all, it does not
    acknowledge for a writer that lives."""
    world, key = in_transfer()
    receiver = world.decode.worker.core.rooms.records[key].receiver
    nonce = receiver.targets[0].nonce
    why = failure("internal", "forged")
    hear(world, "decode", STRANGER, Status(key, receiver.lease, StatusKind.FAILED, failure=why))
    assert receiver.failure is None
    world.abort(key)
    world.run(lambda: receiver.state is ReceiverState.DRAINING)
    hear(world, "decode", STRANGER, CancelAck(key, receiver.lease, nonce))
    assert not receiver.targets[0].over


def test_an_oversized_handshake_is_not_parked() -> None:
    """A stranger's block lists are not kept on our account: more than any prompt has is no."""
    world = make_world(seed=3)
    core = world.prefill.worker.core
    me = world.decode.worker.core.setup
    huge = Handshake(
        key=RoomKey(5, 5),
        lease=LeaseId(me.me.incarnation, 1),
        endpoint=me.endpoint(),
        blocks={"full": bytes(3 << 20)},
        num_cached_tokens=0,
        num_tokens=4,
        ids_hash=1,
        num_required=1,
        expires_at_s=0.0,
        remaining_s=1.0,
    )
    hear(world, "prefill", me.me, huge)
    assert len(core.inbox.parked) == 0
