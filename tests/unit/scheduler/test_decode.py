"""The decode core: ends of requests in every phase, and loops that never leave work asleep."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from pdcore.config import CoreLimits
from pdcore.control.messages import Cancel, CancelAck, Claim, Handshake, Stale
from pdcore.engine.simulated import SimulatedConfig, simulated_tokens
from pdcore.errors import failure
from pdcore.fsm.effects import (
    Effect,
    FencePeer,
    FetchTopology,
    ForgetPeer,
    GrantLease,
    ReportAccepted,
    ReportTokens,
)
from pdcore.fsm.events import HandleEnded, PeerLost, StepCompleted, TopologyFetched
from pdcore.fsm.states import ReceiverState
from pdcore.scheduler.decode import DecodeCore
from pdcore.testing.world import World, make_world
from pdcore.types import (
    Batch,
    FinishReason,
    GenerateRequest,
    Incarnation,
    Nonce,
    PeerRef,
    RoomKey,
    SamplingParams,
    StepOutput,
)
from tests.unit.scheduler.kit import (
    PREFILL,
    exchange,
    handshake_of,
    make_decode,
    make_prefill,
    make_request,
    make_route,
    results,
    sent,
    start,
    tell,
    tick,
)

GONE = failure("cancelled", "the client is gone")


def deliver(decode: DecodeCore, request: GenerateRequest, now: float = 0.0) -> list[Effect]:
    """The whole way through a prefill core: KV and first token arrive."""
    prefill = make_prefill()
    prefill.submit(request, now)
    kept = start(decode, request, now)
    tell(prefill, decode.setup.me, handshake_of(kept), now)
    kept = exchange(prefill, decode, now)
    batch = prefill.schedule(now)
    assert batch is not None
    prefill.handle_event(StepCompleted(batch.batch_id, StepOutput([[50]])), now)
    for effect in exchange(prefill, decode, now):
        if type(effect).__name__ == "PostTransfer":
            prefill.handle_event(HandleEnded(effect.handle, True), now)
    return [*kept, *exchange(prefill, decode, now)]


def step(decode: DecodeCore, batch: Batch, now: float = 1.0, token: int = 60) -> list[Effect]:
    rows = [[token] if sample else None for sample in batch.sample]
    decode.handle_event(StepCompleted(batch.batch_id, StepOutput(rows)), now)
    return tick(decode, now)


def tokens(effects: list[Effect]) -> list[tuple[RoomKey, list[int]]]:
    """Every request's new tokens, in order."""
    found = []
    for effect in effects:
        if isinstance(effect, ReportTokens):
            rows = zip(effect.keys, effect.token_ids, strict=True)
            found.extend((key, list(ids)) for key, ids in rows)
    return found


def running(decode: DecodeCore, **changes: object) -> GenerateRequest:
    request = make_request(**changes)
    deliver(decode, request)
    assert decode.snapshot().running >= 1
    return request


# --- into the pipeline ------------------------------------------------------------------


def test_a_request_passes_through_its_queues() -> None:
    """R69: pending, preallocation, transfer, running."""
    core, request = make_decode(), make_request()
    core.submit(request, 0.0)
    effects = tick(core)
    assert effects == [ReportAccepted(request.key), FetchTopology("bootstrap:1")]
    assert core.snapshot().pending == 1
    core.handle_event(TopologyFetched("bootstrap:1", make_route(core.setup)), 0.0)
    effects = tick(core)
    (grant,) = [e for e in effects if isinstance(e, GrantLease)]
    handshake = handshake_of(effects)
    assert effects.index(grant) < [type(e).__name__ for e in effects].index("SendMessage")
    assert handshake.lease == grant.lease
    assert (handshake.num_tokens, handshake.num_required) == (8, 1)
    assert len(handshake.blocks["full"]) == 2 * 4, "the block of the first output token is ours"
    assert core.blocks.ledger()["full"].leased == 3
    assert core.snapshot().transfer == 1
    assert core.live_keys() == [request.key]


@pytest.mark.parametrize(("limits", "num_blocks"), [(CoreLimits(num_metadata_slots=2), 64)])
def test_slots_limit_admission_and_those_who_wait_get_them(
    limits: CoreLimits, num_blocks: int
) -> None:
    core = make_decode(limits, num_blocks)
    requests = [make_request(4) for _ in range(4)]
    for request in requests:
        start(core, request)
    assert core.snapshot().transfer == 2
    assert core.snapshot().prealloc == 2
    core.abort(requests[0].key, GONE, 1.0)
    effects = tick(core, 1.0)
    (cancel,) = sent(effects, Cancel)
    assert isinstance(cancel, Cancel)
    assert core.snapshot().transfer == 2, "no claim was granted: the slot is free at once"
    assert core.rooms.slots.available == 0


def test_r70_who_does_not_fit_blocks_nobody_behind() -> None:
    """R69, R70: eleven usable blocks; nothing is reserved, so the small one passes."""
    core = make_decode(CoreLimits(num_reserved_decode_tokens=0), num_blocks=12)
    first, large, small = make_request(27), make_request(27), make_request(7)
    for request in (first, large, small):
        start(core, request)
    states = [core.rooms.records[r.key].receiver.state for r in (first, large, small)]
    assert states == [
        ReceiverState.TRANSFERRING,
        ReceiverState.WAITING_FOR_INPUT,
        ReceiverState.TRANSFERRING,
    ]


def test_r70_running_requests_keep_their_head_room() -> None:
    """ceil(reserved / block size) blocks per holder are not given to newcomers."""
    limits = CoreLimits(num_reserved_decode_tokens=17)
    for num_blocks, admitted in ((12, 2), (11, 1)):
        core = make_decode(limits, num_blocks)
        start(core, make_request(7))
        start(core, make_request(15))
        # 2 blocks + 4 blocks + 5 reserved for the first = 11 usable.
        assert core.snapshot().transfer == admitted


# --- ends -------------------------------------------------------------------------------


def test_the_tokens_of_a_request_come_in_order_and_its_blocks_come_back() -> None:
    core = make_decode()
    request = make_request(8, max_tokens=3)
    effects = deliver(core, request)
    assert tokens(effects) == [(request.key, [50])]
    for token in (61, 62):
        batch = core.schedule(1.0)
        assert batch is not None
        effects = step(core, batch, token=token)
        assert tokens(effects) == [(request.key, [token])]
    (result,) = results(effects)
    assert (result.reason, result.failure, result.completion_tokens) == (
        FinishReason.LENGTH,
        None,
        3,
    )
    assert core.blocks.ledger()["full"].free == 63
    assert core.rooms.records == {}
    assert core.schedule(2.0) is None


PHASES = ["pending", "waiting", "transferring", "draining", "running", "unknown"]


def in_phase(core: DecodeCore, phase: str) -> GenerateRequest:
    request = make_request(8, max_tokens=20)
    if phase == "pending":
        core.submit(request, 0.0)
        tick(core)
    elif phase == "waiting":
        for _ in range(2):
            start(core, make_request(8))
        start(core, request)
        assert core.rooms.records[request.key].receiver.state is ReceiverState.WAITING_FOR_INPUT
    elif phase in ("transferring", "draining"):
        effects = start(core, request)
        claim = Claim(request.key, handshake_of(effects).lease, Nonce(PREFILL.incarnation, 1))
        tell(core, PREFILL, claim)
        tick(core)
        if phase == "draining":
            core.abort(request.key, GONE, 0.5)
            tick(core, 0.5)
    elif phase == "running":
        deliver(core, request)
    return request


@pytest.mark.parametrize("unless_received", [False, True])
@pytest.mark.parametrize("phase", PHASES)
def test_the_abort_matrix(phase: str, unless_received: bool) -> None:
    """Section 10: a prefill failure does not end a request whose KV is here; every other
    abort is applied once, and its client hears at once."""
    core = make_decode(CoreLimits(num_metadata_slots=2))
    request = in_phase(core, phase)
    applied = core.abort(request.key, GONE, 1.0, unless_received=unless_received)
    expected = phase not in ("draining", "unknown") and not (phase == "running" and unless_received)
    assert applied is expected
    found = [r for r in results(tick(core, 1.0)) if r.key == request.key]
    assert len(found) == expected
    if found:
        assert found[0].reason is FinishReason.ABORT
        assert not core.abort(request.key, GONE, 2.0), "it is over"
    assert (request.key in core.live_keys()) is (
        phase in ("transferring", "draining") or (phase == "running" and unless_received)
    )


def given_up(core: DecodeCore) -> tuple[GenerateRequest, Cancel]:
    """A request that ends in the queue behind two others."""
    request = in_phase(core, "waiting")
    core.abort(request.key, GONE, 1.0)
    (cancel,) = sent(tick(core, 1.0), Cancel)
    assert isinstance(cancel, Cancel)
    return request, cancel


def forgotten(core: DecodeCore, now: float) -> list[PeerRef]:
    core.handle_timeout(now)
    return [e.peer for e in tick(core, now) if isinstance(e, ForgetPeer)]


def test_who_gives_up_in_the_queue_tells_prefill_until_it_answers() -> None:
    """Nothing is published, but prefill's half waits for it."""
    core = make_decode(CoreLimits(num_metadata_slots=2))
    request, cancel = given_up(core)
    assert (cancel.key, cancel.nonces) == (request.key, ())
    core.handle_timeout(2.0)
    assert sent(tick(core, 2.0), Cancel) == [cancel]
    tell(core, PREFILL, CancelAck(cancel.key, cancel.lease, None), 2.5)
    tick(core, 2.5)
    assert request.key not in core.rooms.records


@pytest.mark.parametrize("is_needed", [False, True])
def test_what_opened_a_connection_in_vain_closes_it(is_needed: bool) -> None:
    """Not where another room needs that peer."""
    core = make_decode(CoreLimits(num_metadata_slots=2, linger_s=30.0))
    request, _ = given_up(core)
    if not is_needed:
        for other in list(core.rooms.records):
            if other != request.key:
                core.rooms.forget(other)
    assert forgotten(core, 32.0) == ([] if is_needed else [PREFILL])
    assert request.key not in core.rooms.records
    assert forgotten(core, 33.0) == []


def test_who_was_answered_lingers_and_closes_nothing() -> None:
    core, request = make_decode(CoreLimits(linger_s=30.0)), make_request(8)
    lease = handshake_of(start(core, request)).lease
    core.abort(request.key, GONE, 1.0)
    tick(core, 1.0)
    core.rooms.records[request.key].receiver.targets[0].cancel_answered = True
    assert forgotten(core, 32.0) == [], lease
    assert request.key not in core.rooms.records


@pytest.mark.parametrize("fenced", [False, True])
def test_a_queue_tells_a_dead_life_nothing(fenced: bool) -> None:
    """However its death is proved: no room of the queue lingers or asks again, and a word of
    its successor about one of them costs no look at all the others."""
    core = make_decode(CoreLimits(num_metadata_slots=2))
    requests = [make_request(8) for _ in range(20)]
    for request in requests:
        start(core, request)
    core.handle_event(PeerLost(PREFILL.incarnation, fenced), 1.0)
    effects = tick(core, 1.0)
    assert {r.key for r in results(effects)} == {r.key for r in requests}
    assert len(sent(effects, Cancel)) == (0 if fenced else 2), "those that were published"
    waited = [request.key for request in requests[2:]]
    assert not any(key in core.rooms.records for key in waited)
    successor = PREFILL._replace(incarnation=Incarnation(b"N" * 16))
    before = core.inbox.num_ignored
    for key in waited:
        tell(core, successor, Stale(key, PREFILL.incarnation), 1.1)
    assert core.inbox.num_ignored == before + len(waited)
    assert not any(isinstance(e, FencePeer) for e in tick(core, 1.1))


def test_a_deadline_while_running_is_a_504_and_gives_the_blocks_back() -> None:
    core = make_decode()
    request = running(core, remaining_s=5.0, max_tokens=100)
    core.handle_timeout(5.0)
    (result,) = results(tick(core, 5.0))
    assert result.failure is not None
    assert (result.failure.code, result.failure.http_status) == ("deadline_exceeded", 504)
    assert (result.reason, result.completion_tokens) == (FinishReason.ERROR, 1)
    assert core.blocks.ledger()["full"].free == 63
    assert request.key not in core.rooms.records
    assert core.schedule(5.0) is None


@pytest.mark.parametrize("end", ["abort", "deadline"])
def test_blocks_of_a_request_that_ends_in_flight_wait_for_the_pass(end: str) -> None:
    """A forward pass counts like a handle: it may still write those blocks."""
    core = make_decode()
    request = running(core, remaining_s=5.0, max_tokens=100)
    other = running(core, max_tokens=100)
    batch = core.schedule(1.0)
    assert batch is not None
    assert len(batch) == 2
    if end == "abort":
        core.abort(request.key, GONE, 1.0)
    else:
        core.handle_timeout(5.0)
    (result,) = results(tick(core, 5.0))
    assert result.key == request.key
    held = core.blocks.ledger()["full"].held
    assert held == 6, "both are still there"
    effects = step(core, batch, 6.0)
    assert [key for key, _ in tokens(effects)] == [other.key]
    assert core.blocks.ledger()["full"].held == 3
    core.blocks.audit()
    batch = core.schedule(6.0)
    assert batch is not None
    assert len(batch) == 1


def test_a_completion_beats_a_deadline_of_the_same_tick() -> None:
    """SGLang PR32267."""
    core = make_decode()
    request = make_request(remaining_s=5.0, max_tokens=1)
    deliver(core, request, now=0.0)
    assert core.rooms.records == {}, "one token was all it wanted"
    core.handle_timeout(5.0)
    assert results(tick(core, 5.0)) == []


def check_engine_failure_is_isolated(core: DecodeCore) -> None:
    """D45: only the requests of the failed batch end; those in transfer go on."""
    bad = running(core, max_tokens=20)
    waiting = make_request()
    start(core, waiting)
    batch = core.schedule(1.0)
    assert batch is not None
    core.handle_event(StepCompleted(batch.batch_id, None, failure("internal", "boom")), 1.0)
    (result,) = results(tick(core, 1.0))
    assert result.key == bad.key
    assert core.blocks.ledger()["full"].leased == 3
    assert core.live_keys() == [waiting.key]
    good = running(core, max_tokens=2)
    batch = core.schedule(2.0)
    assert batch is not None
    assert [r.key for r in results(step(core, batch, 2.0))] == [good.key]


def test_d45_an_engine_failure_fails_only_its_batch() -> None:
    check_engine_failure_is_isolated(make_decode())


def test_d45_mutant_that_lets_the_batch_stay_in_flight_is_caught() -> None:
    """The seed left its loop by the exception: nothing was ever scheduled again."""
    core = make_decode()
    complete = core.running.complete
    core.running.complete = lambda event, now: (
        None if event.failure is not None else complete(event, now)
    )
    with pytest.raises((AssertionError, ValueError)):
        check_engine_failure_is_isolated(core)


@pytest.mark.parametrize(
    "output", [None, StepOutput([]), StepOutput([None]), StepOutput([[]]), StepOutput([[1, 2]])]
)
def test_d45_an_answer_that_does_not_fit_fails_the_batch(output: StepOutput | None) -> None:
    core = make_decode()
    running(core, max_tokens=20)
    batch = core.schedule(1.0)
    assert batch is not None
    core.handle_event(StepCompleted(batch.batch_id, output), 1.0)
    (result,) = results(tick(core, 1.0))
    assert result.failure is not None
    assert result.failure.code == "internal"
    assert core.blocks.ledger()["full"].free == 63


def test_nothing_about_nothing_known_raises() -> None:
    core = make_decode()
    core.handle_event(StepCompleted(9, None), 0.0)
    core.handle_event(HandleEnded(9, True), 0.0)
    core.handle_event(PeerLost(PREFILL.incarnation, True), 0.0)
    core.handle_event(TopologyFetched("nobody:1", None), 0.0)
    core.handle_timeout(1e6)
    tell(core, PREFILL, Handshake(RoomKey(1, 1), (b"", 1), b"", {}, 0, 1, 0, 1, 0.0, 0.0))
    assert not core.abort(RoomKey(1, 1), GONE, 0.0)
    assert tick(core) == []
    assert core.snapshot().num_ignored == 2


def test_a_request_without_a_prefill_instance_is_a_400() -> None:
    core = make_decode()
    core.submit(make_request(bootstrap=""), 0.0)
    (result,) = results(core.poll_effects())
    assert result.failure is not None
    assert (result.failure.code, result.failure.http_status) == ("invalid_request", 400)
    assert "bootstrap" in result.failure.detail


def test_drain_times_out_again_and_again_until_the_ack() -> None:
    """Rule 2: nothing but an acknowledgement or a fenced death frees the blocks."""
    core = make_decode(CoreLimits(drain_timeout_s=10.0, resend_initial_s=1.0, resend_max_s=1.0))
    request = in_phase(core, "draining")
    lease = core.rooms.records[request.key].receiver.lease
    fences = 0
    for second in range(1, 35):
        core.handle_timeout(float(second))
        fences += sum(type(e).__name__ == "FencePeer" for e in tick(core, float(second)))
        assert core.blocks.ledger()["full"].quarantined == 3
    assert fences == 3
    ack = CancelAck(request.key, lease, Nonce(PREFILL.incarnation, 1))
    tell(core, PREFILL, ack, 40.0)
    tick(core, 40.0)
    assert core.blocks.ledger()["full"].free == 63
    assert core.rooms.records == {}


def test_a_dead_life_s_route_is_forgotten_before_the_next_request() -> None:
    """Without a tick in between: nobody else's change may be needed for it."""
    core = make_decode()
    core.handle_event(TopologyFetched("bootstrap:1", make_route(core.setup)), 0.0)
    core.handle_event(PeerLost(PREFILL.incarnation, True, "killed"), 1.0)
    core.submit(make_request(), 1.0)
    effects = tick(core, 1.0)
    assert FetchTopology("bootstrap:1") in effects
    assert sent(effects, Handshake) == []


def test_d32_an_evicted_life_fails_exactly_its_rooms_and_keeps_their_blocks_out() -> None:
    """D32: a newer epoch of the route has another process at its place. That is no proof of
    death: its claim ends by an acknowledgement, nothing else."""
    core = make_decode()
    other = PREFILL._replace(instance="other", incarnation=Incarnation(b"o" * 16))
    gone, stays = make_request(), make_request(bootstrap="bootstrap:2", prefill="other")
    core.handle_event(TopologyFetched("bootstrap:1", make_route(core.setup)), 0.0)
    core.handle_event(TopologyFetched("bootstrap:2", make_route(core.setup, other)), 0.0)
    for request, peer in ((gone, PREFILL), (stays, other)):
        core.submit(request, 0.0)
        lease = handshake_of(tick(core)).lease
        tell(core, peer, Claim(request.key, lease, Nonce(peer.incarnation, 1)), 0.0)
    tick(core)
    successor = PREFILL._replace(incarnation=Incarnation(b"s" * 16))
    newer = msgspec.structs.replace(make_route(core.setup, successor), epoch=77)
    core.handle_event(TopologyFetched("bootstrap:1", newer), 1.0)
    (result,) = results(tick(core, 1.0))
    assert result.key == gone.key
    assert result.failure is not None
    assert result.failure.code == "peer_lost"
    assert core.rooms.records[gone.key].receiver.state is ReceiverState.DRAINING
    assert core.rooms.records[stays.key].receiver.state is ReceiverState.TRANSFERRING
    assert core.blocks.ledger()["full"].quarantined == 3


# --- sleeping (D46) ---------------------------------------------------------------------


class Sleeper:
    """One rank that acts only when its own words or its inputs call for it."""

    def __init__(self, world: World, name: str, hears: Callable[[World, str], bool]) -> None:
        self.world, self.name, self.hears = world, name, hears
        self.wakes_s: float | None = 0.0
        self.world.ranks[name].worker.ports.wait = self._sleep

    def _sleep(self, timeout_s: float | None) -> None:
        now = self.world.clock.monotonic()
        self.wakes_s = None if timeout_s is None else now + timeout_s

    def turn(self) -> bool:
        now = self.world.clock.monotonic()
        due = self.wakes_s is not None and self.wakes_s <= now
        if not due and not self.hears(self.world, self.name):
            return False
        if self.world.ranks[self.name].worker.step(None):
            self.wakes_s = now
        return True


def hears_everything(world: World, name: str) -> bool:
    """What a poller over the leader, the network, the doorbell and the background reports."""
    ports, worker = world.ranks[name].worker.ports, world.ranks[name].worker
    return bool(
        world.ranks[name].port._inbox
        or ports.channel._channel.inbox
        or ports.transport._endpoint.events
        or any(
            link.sender is ports.transport._endpoint and link.jobs for link in world.fabric._links
        )
        or worker.background._events
    )


def hears_only_its_leader(world: World, name: str) -> bool:
    """The seed: ``has_work`` ignores transfers and handshakes; a 1 s poll finds them."""
    return bool(world.ranks[name].port._inbox)


#: No timer of a healthy request comes before this.
FAR_S = 1000.0
SLEEPY = CoreLimits(
    heartbeat_interval_s=FAR_S,
    resend_initial_s=FAR_S,
    resend_max_s=FAR_S,
    topology_ttl_s=FAR_S,
    prefill_chunk_tokens=8,
    num_reserved_decode_tokens=0,
    max_retractions=10,
)


def check_nothing_sleeps(
    world: World, hears: Callable[[World, str], bool], prompts: list[list[int]], max_tokens: int
) -> None:
    """D46: everything ends without any timer: the clock does not move."""
    sleepers = [Sleeper(world, name, hears) for name in world.ranks]
    keys = [world.submit(p, sampling=SamplingParams(max_tokens=max_tokens)) for p in prompts]
    start_s = world.clock.monotonic()
    for _ in range(20_000):
        world.network.deliver_due()
        turns = [sleeper.turn() for sleeper in sleepers]
        if not any(turns):
            break
    assert world.clock.monotonic() == start_s
    for key, prompt in zip(keys, prompts, strict=True):
        result = world.decode.result(key)
        assert result is not None, world.decode.worker.core.snapshot()
        assert result.failure is None, result.failure
        assert world.decode.tokens(key) == simulated_tokens(world.model, prompt, max_tokens)
        assert world.prefill.result(key) is not None
    assert not any(rank.worker.core.live_keys() for rank in world.ranks.values())


PROMPTS = [[i * 7 + 5] * (9 + i) for i in range(6)]


@pytest.mark.parametrize("num_blocks", [128, 24, 15])
def test_d46_a_loop_that_only_follows_its_inputs_finishes_everything(num_blocks: int) -> None:
    """D46: also when requests wait for slots and blocks, are retracted and come back."""
    world = make_world(num_blocks=num_blocks, prefill_blocks=20, limits=SLEEPY)
    check_nothing_sleeps(world, hears_everything, PROMPTS, 24)


def test_d46_mutant_that_polls_only_its_leader_is_caught() -> None:
    world = make_world(limits=SLEEPY)
    with pytest.raises(AssertionError):
        check_nothing_sleeps(world, hears_only_its_leader, PROMPTS, 4)


def test_d46_mutant_that_forgets_who_waits_for_blocks_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Blocks come back, nobody is told."""
    monkeypatch.setattr(DecodeCore, "wants_tick", property(lambda self: self.rooms.wants_tick))
    world = make_world(num_blocks=15, prefill_blocks=20, limits=SLEEPY)
    with pytest.raises(AssertionError):
        check_nothing_sleeps(world, hears_everything, PROMPTS, 24)


def test_d46_lone_requests_that_retract_each_other_do_not_sleep() -> None:
    """The one sequence that runs is retracted: the batch is empty, the work is not."""
    model = SimulatedConfig(block_size=4, max_model_len=64, verify_all=True)
    world = make_world(model=model, num_blocks=9, prefill_blocks=20, limits=SLEEPY)
    check_nothing_sleeps(world, hears_everything, [[5] * 12, [6] * 12], 18)
