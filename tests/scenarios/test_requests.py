"""What becomes of requests: refusals, duplicates, lost messages, deadlines, retraction."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from pdcore.config import CoreLimits
from pdcore.control.codec import decode_frame, encode_frames
from pdcore.control.memory import FaultPlan
from pdcore.control.messages import Frame, Handshake, Status, StatusKind
from pdcore.engine.simulated import SimulatedConfig, simulated_tokens
from pdcore.fsm.effects import FetchTopology
from pdcore.fsm.events import MessageReceived, TopologyFetched
from pdcore.fsm.receiver import Receiver
from pdcore.fsm.targets import StatusFrom
from pdcore.scheduler.queues import ExpiringTable
from pdcore.testing.world import World, make_world
from pdcore.types import LeaseId, RoomKey, SamplingParams

PROMPT = list(range(10, 40))
EIGHT = SamplingParams(max_tokens=8)


def failure_code(world: World, key: RoomKey, role: str = "decode") -> str | None:
    result = world.ranks[role].result(key)
    assert result is not None
    return None if result.failure is None else result.failure.code


def finish(world: World, key: RoomKey) -> str | None:
    world.run(lambda: world.decode.result(key) is not None)
    return failure_code(world, key)


def test_a_request_whose_kv_moved_equals_one_that_never_did() -> None:
    """vLLM #52617: PD and the monolithic path give the same tokens."""
    world = make_world()
    assert world.run_request(PROMPT, EIGHT) == simulated_tokens(world.model, PROMPT, 8)


def test_d6_strangers_leave_no_state() -> None:
    """D6, SGLang I39428, PR39623: messages for unknown rooms fill bounded, expiring tables only."""
    limits = CoreLimits(parked_handshake_cap=16, parked_handshake_ttl_s=5.0)
    world = make_world(limits=limits)
    core, decode = world.prefill.worker.core, world.decode.worker.core
    sender = decode.setup.me
    for i in range(1, 2000):
        handshake = Handshake(
            key=RoomKey(i, i),
            lease=LeaseId(sender.incarnation, i),
            endpoint=decode.setup.endpoint(),
            blocks={"full": b""},
            num_cached_tokens=0,
            num_tokens=4,
            ids_hash=1,
            num_required=1,
            expires_at_s=0.0,
            remaining_s=1.0,
        )
        core.handle_event(MessageReceived(sender, b"", handshake), 1000.0)
        status = Status(RoomKey(i, i), LeaseId(sender.incarnation, i), StatusKind.FAILED)
        decode.handle_event(MessageReceived(core.setup.me, b"", status), 1000.0)
    assert len(core.inbox.parked) == 16
    assert core.inbox.parked.num_evicted == 1999 - 16
    assert not core.rooms.records
    assert not decode.rooms.records


def test_d6_mutant_an_unbounded_table_is_caught() -> None:
    class Unbounded(ExpiringTable[int]):
        def put(self, key: object, value: int, now: float) -> None:
            self._entries[key] = (now + self._ttl_s, value)

    def check(table: ExpiringTable[int]) -> None:
        for i in range(100):
            table.put(i, i, float(i))
        assert len(table) <= 8

    check(ExpiringTable(8, 5.0))
    with pytest.raises(AssertionError):
        check(Unbounded(8, 5.0))


def test_an_early_handshake_is_parked_and_used() -> None:
    """R44: metadata may arrive before the sender exists and must not be lost."""
    world = make_world()
    key = world.submit(PROMPT, to=("decode",), sampling=EIGHT)
    world.run(lambda: len(world.prefill.worker.core.inbox.parked) == 1)
    world.submit(PROMPT, key=key, to=("prefill",), sampling=EIGHT)
    assert finish(world, key) is None


def test_d7_a_live_room_is_not_taken_twice() -> None:
    """D7, SGLang I40125, Mooncake transfer_id collision: the second gets 409, the first
    completes, the loops live."""
    world = make_world()
    first = world.submit(PROMPT, sampling=EIGHT)
    second = world.submit(PROMPT[::-1], key=RoomKey(first.room, 77), sampling=EIGHT)
    world.submit(PROMPT, key=first, sampling=EIGHT)
    assert finish(world, second) == "room_in_use"
    world.run(lambda: len(world.decode.tokens(first)) == 8)
    assert world.decode.tokens(first) == simulated_tokens(world.model, PROMPT, 8)


def check_retraction_resumes(world: World) -> None:
    """Two requests that cannot both stay: the victim comes back with the same tokens."""
    long = SamplingParams(max_tokens=40)
    keys = [world.submit([i] * 12, sampling=long) for i in (20, 30)]
    world.run(lambda: all(world.decode.result(k) for k in keys))
    for key, i in zip(keys, (20, 30), strict=True):
        assert failure_code(world, key) is None
        assert world.decode.tokens(key) == simulated_tokens(world.model, [i] * 12, 40)


def tight_world() -> World:
    """52 tokens each end up in 13 blocks; 18 usable blocks hold one and a half."""
    limits = CoreLimits(num_reserved_decode_tokens=0, max_retractions=5)
    return make_world(num_blocks=19, prefill_blocks=64, limits=limits)


def test_d8_retraction_requeues_and_resumes() -> None:
    """D8, R72, SGLang I6857: retracted requests finish with all their tokens, none cut short."""
    world = tight_world()
    check_retraction_resumes(world)
    world.settle()
    assert world.decode.worker.core.blocks.audit()["full"].held == 0


def test_d8_mutant_that_aborts_the_victim_is_caught() -> None:
    """The seed finished the victim and returned its partial text as success."""
    world = tight_world()
    running = world.decode.worker.core.running
    running.limits = CoreLimits(max_retractions=0)
    with pytest.raises(AssertionError):
        check_retraction_resumes(world)


def test_d11_a_prompt_too_long_for_prefill_fails_decode_at_once() -> None:
    """D11, SGLang I30233: decode's cap is larger; prefill's refusal reaches decode by STATUS
    before any token, and the client gets prefill's status."""
    world = make_world(limits=CoreLimits(max_prefill_tokens=64))
    setup = world.decode.worker.core.setup
    object.__setattr__(setup, "limits", CoreLimits(max_prefill_tokens=256))
    start = world.clock.monotonic()
    key = world.submit(list(range(3, 103)), sampling=EIGHT)
    assert finish(world, key) == "prompt_too_long"
    assert world.decode.tokens(key) == []
    assert world.clock.monotonic() - start < 2.0


def done_status(receiver: Receiver, peer: object, metadata: bytes | None) -> StatusFrom:
    target = receiver.targets[peer.rank]  # type: ignore[attr-defined]
    status = Status(
        receiver.key, receiver.lease, StatusKind.DONE, nonce=target.nonce, metadata=metadata
    )
    return StatusFrom(peer, status)  # type: ignore[arg-type]


def intercept(world: World, change: Callable[[Status], Status]) -> None:
    """Let a hand on prefill's wire change every STATUS Done."""
    channel = world.prefill.worker.ports.channel
    send = channel.send

    def tampering(to: str, data: bytes) -> bool:
        frame = decode_frame(data)
        messages = [
            change(m) if isinstance(m, Status) and m.kind is StatusKind.DONE else m
            for m in frame.messages
        ]
        changed = Frame(
            frame.instance,
            frame.rank,
            frame.incarnation,
            frame.reply_to,
            frame.to_incarnation,
            messages,
        )
        return all(send(to, part) for part in encode_frames(changed))

    channel.send = tampering


def replaced(status: Status, metadata: bytes | None) -> Status:
    return Status(status.key, status.lease, status.kind, status.nonce, status.failure, metadata, {})


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("D12: missing", lambda data: None),
        ("torn", lambda data: data[:-1] + bytes([data[-1] ^ 1])),
        ("truncated", lambda data: data[:40]),
        ("all zero", lambda data: bytes(len(data))),
    ],
)
def test_d12_done_without_valid_metadata_fails_that_request_only(
    name: str, spoil: Callable[[bytes], bytes | None]
) -> None:
    """D12, D13: never a wait for ever, never another request's token."""
    world = make_world()
    intercept(world, lambda s: replaced(s, spoil(s.metadata or b"")))
    bad = world.submit(PROMPT, sampling=EIGHT)
    assert finish(world, bad) == "bad_metadata" or name == "D12: missing"
    assert failure_code(world, bad) is not None
    assert world.decode.tokens(bad) == []
    world.prefill.worker.ports.channel.__dict__.pop("send")
    assert world.run_request(PROMPT, EIGHT) == simulated_tokens(world.model, PROMPT, 8)
    world.settle()


def test_d14_an_incompatible_prefill_fails_only_its_requests() -> None:
    """D14, D35: 502 with both values named; the loop and its other peers go on."""
    world = make_world()
    executor = world.decode.worker.executor
    good = executor.fetch_route

    def foreign(bootstrap: str) -> TopologyFetched:
        answer = good(bootstrap)
        route = answer.route
        assert route is not None
        import msgspec

        return TopologyFetched(bootstrap, msgspec.structs.replace(route, fingerprint="other"))

    executor.fetch_route = foreign
    bad = world.submit(PROMPT, sampling=EIGHT)
    assert finish(world, bad) == "incompatible"
    executor.fetch_route = good
    world.clock.advance(31.0)
    assert world.run_request(PROMPT, EIGHT) == simulated_tokens(world.model, PROMPT, 8)


def test_d18_the_first_token_may_end_the_request() -> None:
    """D18: max_tokens 1 gives one token; EOS as first token stops at commit."""
    world = make_world()
    assert len(world.run_request(PROMPT, SamplingParams(max_tokens=1))) == 1
    eos = SimulatedConfig(block_size=4, max_model_len=512, eos_period=1, verify_all=True)
    world = make_world(model=eos)
    assert world.run_request(PROMPT, EIGHT) == [2]


def test_d19_different_token_ids_are_refused_before_any_write() -> None:
    """D19: both sides tokenised; equal length is not enough."""
    world = make_world()
    key = world.submit(PROMPT, to=("prefill",), sampling=EIGHT)
    world.submit(PROMPT[::-1], key=key, to=("decode",), sampling=EIGHT)
    assert finish(world, key) == "incompatible"
    world.settle()


def test_d20_a_route_that_is_late_is_asked_for_in_time_not_in_tries() -> None:
    """D20: decode arrives before prefill is ready; it asks again at intervals and serves."""
    world = make_world()
    executor = world.decode.worker.executor
    good, asked = executor.fetch_route, []

    def late(bootstrap: str) -> TopologyFetched:
        asked.append(world.clock.monotonic())
        if len(asked) <= 20:
            return TopologyFetched(bootstrap, None)
        return good(bootstrap)

    executor.fetch_route = late
    assert world.run_request(PROMPT, EIGHT) == simulated_tokens(world.model, PROMPT, 8)
    gaps = [b - a for a, b in itertools.pairwise(asked)]
    assert min(gaps) >= world.decode.worker.core.setup.limits.topology_retry_s


def test_d20_an_unreachable_prefill_gives_up_and_blocks_nobody() -> None:
    """SGLang PR20371, 19900, 20832: 503 after the budget."""
    world = make_world()
    world.decode.worker.executor.fetch_route = lambda b: TopologyFetched(b, None)
    key = world.submit(PROMPT, sampling=EIGHT)
    assert finish(world, key) == "unreachable"


def test_d28_one_fetch_serves_many_requests() -> None:
    """D28: the cached route is used; single flight while it is being fetched."""
    world = make_world()
    executor = world.decode.worker.executor
    good, asked = executor.fetch_route, []

    def counting(bootstrap: str) -> TopologyFetched:
        asked.append(bootstrap)
        return good(bootstrap)

    executor.fetch_route = counting
    keys = [world.submit(PROMPT, sampling=EIGHT) for _ in range(6)]
    world.run(lambda: all(world.decode.result(k) for k in keys))
    assert len(asked) == 1


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_d23_every_wait_has_a_deadline(side: str) -> None:
    """D23: alone, each half gives up at its own deadline and gives everything back."""
    world = make_world()
    key = world.submit(PROMPT, to=(side,), sampling=EIGHT, timeout_s=5.0)
    start = world.clock.monotonic()
    world.run(lambda: world.ranks[side].result(key) is not None)
    assert failure_code(world, key, side) == "deadline_exceeded"
    assert 4.9 < world.clock.monotonic() - start < 6.0
    world.settle()
    ledger = world.ranks[side].worker.core.blocks.audit()["full"]
    assert ledger.free == ledger.total


def test_d26_a_lost_frame_delays_and_never_loses() -> None:
    """D26, TensorRT-LLM #17665: half of all frames are lost, everything still ends well."""
    faults = FaultPlan(drop=0.5, duplicate=0.2, reorder=0.3, max_delay_s=0.05)
    world = make_world(faults=faults, seed=11)
    keys = [world.submit(PROMPT, sampling=EIGHT) for _ in range(5)]
    world.run(lambda: all(world.decode.result(k) for k in keys))
    for key in keys:
        assert world.decode.tokens(key) == simulated_tokens(world.model, PROMPT, 8)
    world.settle()


def test_d60_a_full_queue_answers_429() -> None:
    """D60: bounded queues; what is over the bound is refused at once."""
    world = make_world(limits=CoreLimits(max_queued_requests=3))
    keys = [world.submit(PROMPT, sampling=EIGHT) for _ in range(5)]
    world.run(lambda: all(world.decode.result(k) for k in keys))
    codes = [failure_code(world, key) for key in keys]
    assert codes.count("overloaded") == 2
    assert codes.count(None) == 3


def test_an_unservable_token_id_is_a_400() -> None:
    world = make_world()
    key = world.submit([5, 1_000_000], sampling=EIGHT)
    assert finish(world, key) == "invalid_request"


def test_a_handshake_of_another_instance_is_refused() -> None:
    """Section 2: both legs name the chosen instances; anybody else is rejected."""
    world = make_world()
    setup = world.decode.worker.core.setup
    me = setup.me._replace(instance="intruder")
    object.__setattr__(setup, "me", me)
    key = world.submit(PROMPT, sampling=EIGHT)
    assert finish(world, key) == "handshake_rejected"


def test_a_replacing_attempt_ends_the_former_one() -> None:
    """Section 2: a re-dispatch names the attempt it replaces, which is cancelled."""
    world = make_world()
    first = world.submit(PROMPT, sampling=EIGHT)
    world.step()
    second = RoomKey(first.room, first.attempt + 1)
    for name in ("prefill", "decode"):
        port = world.ranks[name].port
        world.submit(PROMPT, key=second, to=(), sampling=EIGHT)
        message = _submit_again(world, second, first.attempt)
        port.put(message)
    assert finish(world, second) is None
    world.run(lambda: world.decode.result(first) is not None)
    assert failure_code(world, first) == "cancelled"
    assert world.decode.tokens(second) == simulated_tokens(world.model, PROMPT, 8)
    world.settle()


def _submit_again(world: World, key: RoomKey, replaces: int):
    import msgspec

    kept: list = []
    port = world.ranks["decode"].port
    put = port.put
    port.put = kept.append
    world.submit(PROMPT, key=key, to=("decode",), sampling=EIGHT)
    port.put = put
    return msgspec.structs.replace(kept[0], replaces=replaces)


def test_fetch_topology_is_an_effect_never_a_call() -> None:
    """Layers 0-3 do no I/O: asking for a route is a value the shell carries out."""
    world = make_world()
    core = world.decode.worker.core
    world.submit(PROMPT, to=("decode",), sampling=EIGHT)
    world.decode.worker._receive(world.clock.monotonic())
    assert FetchTopology("bootstrap:1") in core.poll_effects()


@pytest.mark.parametrize("drop", [0.0, 0.5])
@pytest.mark.parametrize("is_first", [True, False])
def test_what_decode_gives_up_in_its_queue_does_not_wait_at_prefill(
    drop: float, is_first: bool
) -> None:
    """A killed router, a client that talks to instances and leaves decode: nobody tells prefill,
    whose half would keep its place in the queue until its deadline. Decode does, and again
    when that is lost, also where prefill has not heard of the request yet."""
    limits = CoreLimits(num_metadata_slots=1)
    world = make_world(limits=limits, faults=FaultPlan(drop=drop), seed=3, stepped=True)
    world.submit(PROMPT, sampling=EIGHT)  # its KV does not arrive: the slot stays taken
    world.run(lambda: bool(world.fabric.pending()))
    key = world.submit(PROMPT, to=("prefill", "decode") if is_first else ("decode",))
    world.run(lambda: world.decode.worker.core.snapshot().prealloc == 1)
    start_s = world.clock.monotonic()
    world.abort(key)
    world.run(lambda: world.decode.result(key) is not None)
    if not is_first:
        world.run(lambda: key not in world.decode.worker.core.rooms.records)  # answered
        world.submit(PROMPT, key=key, to=("prefill",))
    world.run(lambda: world.prefill.result(key) is not None)
    assert failure_code(world, key, "prefill") == "cancelled"
    assert world.clock.monotonic() - start_s < limits.resend_max_s * 4
