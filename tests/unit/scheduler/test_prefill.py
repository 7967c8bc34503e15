"""The prefill core: queues, chunks and early sends, failures of the engine, draining."""

from __future__ import annotations

import pytest

from pdcore.config import CoreLimits
from pdcore.control.messages import Cancel, CancelAck, Claim, Grant, Status, StatusAck, StatusKind
from pdcore.engine.simulated import simulated_tokens
from pdcore.errors import RoomInUse, failure
from pdcore.fsm.effects import (
    CancelTransfer,
    Effect,
    ForgetPeer,
    PostTransfer,
    ReportAccepted,
    ReportFinished,
    SendMessage,
)
from pdcore.fsm.events import HandleEnded, PeerLost, StepCompleted
from pdcore.fsm.legs import KvReady
from pdcore.fsm.states import SenderState
from pdcore.scheduler.chunks import PrefillChunk
from pdcore.scheduler.prefill import PrefillCore
from pdcore.testing.world import make_world
from pdcore.types import (
    Batch,
    FinishReason,
    GenerateRequest,
    LeaseId,
    Nonce,
    RoomKey,
    SamplingParams,
    StepOutput,
)
from tests.unit.scheduler.kit import (
    DECODE,
    PREFILL,
    handshake_of,
    make_decode,
    make_prefill,
    make_request,
    make_spec,
    results,
    sent,
    start,
    tell,
    tick,
)

GONE = failure("cancelled", "the client is gone")


def bind(core: PrefillCore, request: GenerateRequest) -> Claim:
    """Submit, with the handshake a decode rank would send; returns prefill's claim."""
    core.submit(request, 0.0)
    tell(core, DECODE, handshake_of(start(make_decode(), request)))
    (claim,) = sent(tick(core), Claim)
    assert isinstance(claim, Claim)
    return claim


def grant(core: PrefillCore, claim: Claim) -> list[Effect]:
    tell(core, DECODE, Grant(claim.key, claim.nonce))
    return tick(core)


def compute(core: PrefillCore, batch: Batch, token: int = 77) -> list[Effect]:
    """The engine's answer to a batch."""
    rows = [[token] if sample else None for sample in batch.sample]
    core.handle_event(StepCompleted(batch.batch_id, StepOutput(rows)), 1.0)
    return tick(core, 1.0)


def state(core: PrefillCore, request: GenerateRequest) -> SenderState:
    return core.rooms.records[request.key].sender.state


def posts(effects: list[Effect]) -> list[PostTransfer]:
    return [e for e in effects if isinstance(e, PostTransfer)]


# --- scheduling -------------------------------------------------------------------------


def check_full_pool_gives_a_batch(core: PrefillCore) -> None:
    """D15: a pool of three usable blocks, two prompts of three blocks each."""
    first, second = make_request(12), make_request(12)
    bind(core, first)
    bind(core, second)
    batch = core.schedule(0.0)
    assert batch is not None
    assert len(batch) == 1
    assert core.schedule(0.0) is None, "a batch is in flight"
    compute(core, batch)
    assert core.schedule(1.0) is None, "the second has no blocks and is not spun on"
    assert core.snapshot().waiting == 1


def test_d15_a_full_pool_gives_a_batch_and_waits() -> None:
    """D15: an allocation that fails ends the batch; the loop goes on to drain what runs."""
    check_full_pool_gives_a_batch(make_prefill(num_blocks=4))


def test_d15_mutant_that_spins_on_the_head_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The seed's rule: ``continue`` with the same head, here with the spin counted."""

    def spinning(waiting, kv, max_tokens, max_seqs, *, align=1):
        chunks, queue, spins = [], list(waiting), 0
        while queue:
            head = queue[0]
            if not kv.allocate_slots(head.seq_id, 0, head.num_tokens):
                spins += 1
                assert spins < 1000, "livelock"
                continue
            chunks.append(PrefillChunk(queue.pop(0), 0, head.num_tokens, True))
        return chunks

    monkeypatch.setattr("pdcore.scheduler.prefill.select_prefill", spinning)
    with pytest.raises(AssertionError, match="livelock"):
        check_full_pool_gives_a_batch(make_prefill(num_blocks=4))


def test_the_blocks_of_the_first_let_the_second_run() -> None:
    """D4: they come back when its write has quiesced and decode has been told."""
    core = make_prefill(num_blocks=4)
    first, second = make_request(12), make_request(12)
    claim = bind(core, first)
    bind(core, second)
    grant(core, claim)
    batch = core.schedule(0.0)
    assert batch is not None
    (post,) = posts(compute(core, batch))
    assert core.schedule(1.0) is None
    core.handle_event(HandleEnded(post.handle, True), 2.0)
    effects = tick(core, 2.0)
    (done,) = sent(effects, Status)
    assert isinstance(done, Status)
    assert done.kind is StatusKind.DONE
    (result,) = results(effects)
    assert (result.reason, result.failure) == (FinishReason.STOP, None)
    again = core.schedule(2.0)
    assert again is not None
    assert len(again) == 1


def test_nothing_is_computed_for_a_request_without_a_destination() -> None:
    core = make_prefill()
    core.submit(make_request(), 0.0)
    assert isinstance(core.poll_effects()[0], ReportAccepted)
    tick(core)
    assert core.schedule(0.0) is None
    assert core.snapshot().bootstrap == 1


def check_sends_follow_steps(core: PrefillCore) -> list[int]:
    """Nothing is read before it is computed, and Done comes after the last write; returns where
    the sends ended."""
    request = make_request(23)
    grant(core, bind(core, request))
    covered, computed = 0, 0
    seen: list[int] = []
    handles: list[int] = []
    while (batch := core.schedule(0.0)) is not None:
        assert posts(tick(core)) == [], "posted before its step has ended"
        computed += batch.num_tokens
        for post in posts(compute(core, batch)):
            assert post.start_token == covered
            covered += post.num_tokens
            assert covered % 4 == 0 or covered == 23
            assert covered <= computed
            seen.append(covered)
            handles.append(post.handle)
    for handle in handles:
        assert state(core, request) is SenderState.TRANSFERRING, "over before its last write"
        assert sent(tick(core), Status) == []
        core.handle_event(HandleEnded(handle, True), 2.0)
    (done,) = sent(tick(core, 2.0), Status)
    assert isinstance(done, Status)
    assert (done.kind, bool(done.metadata)) == (StatusKind.DONE, True)
    return seen


def test_finished_chunks_are_sent_while_later_ones_compute() -> None:
    """R78, R123: a step's KV is complete when it returns, and only then is it posted; metadata and
    status come after the KV. Early sends end on a block boundary."""
    core = make_prefill(CoreLimits(prefill_chunk_tokens=10))
    seen = check_sends_follow_steps(core)
    assert seen == [8, 16, 23], "one send per chunk, the last one with the rest"


def test_r123_mutant_that_posts_before_the_step_is_caught() -> None:
    """What is scheduled counts as computed: the transport would read what is not there yet."""
    core = make_prefill(CoreLimits(prefill_chunk_tokens=10))
    schedule = core.schedule

    def eager(now: float) -> Batch | None:
        batch = schedule(now)
        for chunk in core._batch[1] if core._batch is not None else ():
            record = core.rooms.records[chunk.seq.key]
            ready = KvReady((chunk.start + chunk.num_tokens) // 4 * 4)
            core.rooms.emit(record, record.sender.compute_ended(ready), now)
        return batch

    core.schedule = eager
    with pytest.raises(AssertionError, match="posted before its step has ended"):
        check_sends_follow_steps(core)


def test_r123_mutant_that_is_done_while_it_writes_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The seed's order of completion rested on the order of its sockets."""
    posted = property(lambda self: self.first_token is not None and self.failure is None)
    monkeypatch.setattr("pdcore.fsm.legs.SenderFacts.is_locally_done", posted)
    with pytest.raises(AssertionError, match="over before its last write"):
        check_sends_follow_steps(make_prefill(CoreLimits(prefill_chunk_tokens=10)))


def test_a_grant_that_comes_late_sends_everything_at_once() -> None:
    core = make_prefill(CoreLimits(prefill_chunk_tokens=8))
    request = make_request(24)
    claim = bind(core, request)
    while (batch := core.schedule(0.0)) is not None:
        assert posts(compute(core, batch)) == []
    (post,) = posts(grant(core, claim))
    assert (post.start_token, post.num_tokens) == (0, 24)


def test_sliding_windows_send_once_at_the_end() -> None:
    """A block behind the window may be recycled while an early write still reads it."""
    spec = make_spec(sliding_window=8)
    core = make_prefill(CoreLimits(prefill_chunk_tokens=8), spec=spec)
    request = make_request(24)
    decode = make_decode(spec=spec)
    core.submit(request, 0.0)
    tell(core, DECODE, handshake_of(start(decode, request)))
    (claim,) = sent(tick(core), Claim)
    assert isinstance(claim, Claim)
    grant(core, claim)
    sends = []
    while (batch := core.schedule(0.0)) is not None:
        sends.append(len(posts(compute(core, batch))))
    assert sum(sends[:-1]) == 0


@pytest.mark.parametrize("chunk", [4, 6, 16])
def test_early_sends_deliver_the_exact_bytes(chunk: int) -> None:
    """Every position is verified by the decode engine that builds on it."""
    world = make_world(limits=CoreLimits(prefill_chunk_tokens=chunk))
    prompt = list(range(10, 71))
    tokens = world.run_request(prompt, SamplingParams(max_tokens=9))
    assert tokens == simulated_tokens(world.model, prompt, 9)
    assert world.prefill.worker.counters.steps >= len(prompt) // chunk


# --- engine failures --------------------------------------------------------------------


def check_engine_failure_is_isolated(core: PrefillCore) -> None:
    """D45: a failed step fails the requests of its batch, nobody else, and the core goes on."""
    bad, good = make_request(8), make_request(8)
    claims = [bind(core, bad), bind(core, good)]
    for claim in claims:
        grant(core, claim)
    batch = core.schedule(0.0)
    assert batch is not None
    assert len(batch) == 1
    core.handle_event(StepCompleted(batch.batch_id, None, failure("internal", "boom")), 1.0)
    effects = tick(core, 1.0)
    assert [r.key for r in results(effects)] == [bad.key]
    (news,) = sent(effects, Status)
    assert isinstance(news, Status)
    assert (news.key, news.kind) == (bad.key, StatusKind.FAILED)
    assert core.blocks.num_free["full"] == 63
    batch = core.schedule(1.0)
    assert batch is not None
    assert len(posts(compute(core, batch))) == 1


ONE_AT_A_TIME = CoreLimits(prefill_chunk_tokens=8)


def test_d45_an_engine_failure_fails_only_its_batch() -> None:
    check_engine_failure_is_isolated(make_prefill(ONE_AT_A_TIME))


def test_d45_mutant_that_fails_everybody_is_caught() -> None:
    core = make_prefill(ONE_AT_A_TIME)
    complete = core._complete_step

    def fail_all(event: StepCompleted, now: float) -> None:
        if event.failure is not None:
            for key in list(core.rooms.records):
                core.abort(key, event.failure, now)
        complete(event, now)

    core._complete_step = fail_all
    with pytest.raises(AssertionError):
        check_engine_failure_is_isolated(core)


@pytest.mark.parametrize(
    "output", [None, StepOutput([]), StepOutput([None]), StepOutput([[]]), StepOutput([[1], [2]])]
)
def test_d45_an_answer_that_does_not_fit_fails_the_batch(output: StepOutput | None) -> None:
    core = make_prefill()
    request = make_request(8)
    bind(core, request)
    batch = core.schedule(0.0)
    assert batch is not None
    core.handle_event(StepCompleted(batch.batch_id, output), 1.0)
    (result,) = results(tick(core, 1.0))
    assert result.failure is not None
    assert (result.failure.code, result.failure.http_status) == ("internal", 500)
    assert core.schedule(1.0) is None
    assert core.blocks.num_free["full"] == 63


def test_a_step_of_another_batch_is_counted_and_ignored() -> None:
    core = make_prefill()
    bind(core, make_request(8))
    batch = core.schedule(0.0)
    assert batch is not None
    core.handle_event(StepCompleted(batch.batch_id + 1, StepOutput([[1]])), 0.0)
    assert core.snapshot().num_ignored == 1
    assert core.schedule(0.0) is None, "the real one is still in flight"
    compute(core, batch)
    core.handle_event(StepCompleted(batch.batch_id, StepOutput([[1]])), 0.0)
    assert core.snapshot().num_ignored == 2


# --- ending early -----------------------------------------------------------------------


def test_abort_while_computing_drains_before_it_releases() -> None:
    """A forward pass counts like a handle (section 3): the client hears at once, the blocks
    come back when the pass has ended."""
    core = make_prefill()
    request = make_request(8)
    bind(core, request)
    batch = core.schedule(0.0)
    assert batch is not None
    assert core.abort(request.key, GONE, 0.5)
    (result,) = results(tick(core, 0.5))
    assert result.reason is FinishReason.ABORT
    assert state(core, request) is SenderState.DRAINING
    assert core.blocks.ledger()["full"].quarantined == 2
    assert core.live_keys() == [request.key]
    assert not core.abort(request.key, GONE, 0.6), "it is over"
    assert posts(compute(core, batch)) == [], "nothing is sent for it any more"
    assert state(core, request) is SenderState.FAILED
    assert core.blocks.ledger()["full"].free == 63
    assert core.live_keys() == []
    assert core.schedule(1.0) is None


def test_abort_while_a_write_is_posted_waits_for_the_handle() -> None:
    core = make_prefill()
    request = make_request(8)
    claim = bind(core, request)
    grant(core, claim)
    batch = core.schedule(0.0)
    assert batch is not None
    (post,) = posts(compute(core, batch))
    core.abort(request.key, GONE, 2.0)
    effects = tick(core, 2.0)
    assert CancelTransfer(post.handle) in effects
    lease = core.rooms.records[request.key].sender.legs[0].lease
    tell(core, DECODE, Cancel(request.key, lease, (claim.nonce,)), 2.0)
    assert sent(tick(core, 2.0), CancelAck) == [], "the write may still land"
    core.handle_event(HandleEnded(post.handle, False, failure("transfer_failed", "x")), 3.0)
    assert sent(tick(core, 3.0), CancelAck) == []
    core.handle_event(HandleEnded(post.handle, True), 4.0)
    (ack,) = sent(tick(core, 4.0), CancelAck)
    assert isinstance(ack, CancelAck)
    assert ack.nonce == claim.nonce
    assert core.blocks.ledger()["full"].free == 63


def test_an_unknown_key_is_not_aborted() -> None:
    assert not make_prefill().abort(RoomKey(1, 1), GONE, 0.0)


def test_the_deadline_counts_from_acceptance_also_without_a_handshake() -> None:
    """Rule 8."""
    core = make_prefill()
    request = make_request(remaining_s=5.0)
    core.submit(request, 100.0)
    tick(core, 100.0)
    core.handle_timeout(104.9)
    assert results(tick(core, 104.9)) == []
    core.handle_timeout(105.0)
    (result,) = results(tick(core, 105.0))
    assert result.failure is not None
    assert (result.failure.code, result.failure.http_status) == ("deadline_exceeded", 504)
    assert "Bootstrapping" in result.failure.detail


def test_a_lost_decode_fails_exactly_its_rooms_and_is_not_told() -> None:
    core = make_prefill()
    bound, unbound = make_request(), make_request()
    bind(core, bound)
    core.submit(unbound, 0.0)
    tick(core)
    core.handle_event(PeerLost(DECODE.incarnation, True, "killed"), 1.0)
    effects = tick(core, 1.0)
    (result,) = results(effects)
    assert result.key == bound.key
    assert result.failure is not None
    assert result.failure.code == "peer_lost"
    assert bound.key not in core.rooms.records, "nobody is left to acknowledge anything"
    assert core.live_keys() == [unbound.key]


def test_d59_a_delivery_is_live_until_decode_has_acknowledged_it() -> None:
    """D59: a prefill that stops before would lose a request whose KV decode has."""
    core = make_prefill()
    request = make_request(8)
    grant(core, bind(core, request))
    batch = core.schedule(0.0)
    assert batch is not None
    (post,) = posts(compute(core, batch))
    core.handle_event(HandleEnded(post.handle, True), 2.0)
    effects = tick(core, 2.0)
    assert len(results(effects)) == 1
    assert core.live_keys() == [request.key]
    (status,) = sent(effects, Status)
    assert isinstance(status, Status)
    tell(core, DECODE, StatusAck(status.key, status.lease, StatusKind.DONE), 3.0)
    tick(core, 3.0)
    assert core.live_keys() == []
    assert core.rooms.records == {}


def test_an_outcome_that_nobody_acknowledges_is_forgotten_in_the_end() -> None:
    """Decode may be cut off: it is told until its own deadline, and not for ever."""
    core = make_prefill(CoreLimits(linger_s=30.0, resend_initial_s=1.0, resend_max_s=1.0))
    request = make_request(8, remaining_s=50.0)
    bind(core, request)
    core.abort(request.key, GONE, 0.0)
    effects, closed_s = tick(core), 0
    for second in range(1, 60):
        core.handle_timeout(float(second))
        now_out = tick(core, float(second))
        effects += now_out
        if ForgetPeer(DECODE) in now_out:
            closed_s = second
    assert 20 < len(sent(effects, Status)) < 55
    assert core.rooms.records == {}
    assert closed_s == 50, "what it was told last opened the connection again"


def test_d7_a_replacing_attempt_runs_beside_the_one_that_drains() -> None:
    core = make_prefill()
    first = make_request(8)
    bind(core, first)
    batch = core.schedule(0.0)
    assert batch is not None
    second = make_request(8, key=RoomKey(first.key.room, 99), replaces=first.key.attempt)
    bind(core, second)
    assert state(core, first) is SenderState.DRAINING
    assert state(core, second) is SenderState.WAITING_FOR_INPUT
    with pytest.raises(RoomInUse):
        core.submit(make_request(8, key=RoomKey(first.key.room, 100)), 0.0)
    compute(core, batch)
    again = core.schedule(1.0)
    assert again is not None


def test_the_snapshot_counts_the_queues() -> None:
    core = make_prefill(ONE_AT_A_TIME)
    requests = [make_request(8) for _ in range(3)]
    core.submit(make_request(8), 0.0)
    for request in requests:
        grant(core, bind(core, request))
    batch = core.schedule(0.0)
    assert batch is not None
    compute(core, batch)
    core.abort(requests[0].key, GONE, 1.0)
    tick(core, 1.0)
    shot = core.snapshot()
    assert (shot.bootstrap, shot.waiting, shot.inflight, shot.draining) == (1, 2, 0, 1)
    assert (shot.is_diverged, shot.kv_usage) == (False, "full:3/64")


def test_no_event_about_nothing_known_raises() -> None:
    """Section 4: a peer's fault is a counter, never an exception out of the loop."""
    core = make_prefill()
    key, nonce = RoomKey(1, 1), Nonce(PREFILL.incarnation, 1)
    for message in (Grant(key, nonce), Claim(key, LeaseId(DECODE.incarnation, 1), nonce)):
        tell(core, DECODE, message)
    core.handle_event(HandleEnded(5, True), 0.0)
    core.handle_event(PeerLost(DECODE.incarnation, False, "x"), 0.0)
    core.handle_timeout(1e6)
    assert core.snapshot().num_ignored == 2
    assert not any(isinstance(e, ReportFinished | SendMessage) for e in tick(core))
