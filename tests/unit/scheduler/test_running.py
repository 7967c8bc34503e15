"""Running sequences: retraction that ends, coming back, blocks in flight."""

from __future__ import annotations

import pytest

from pdcore.config import CoreLimits
from pdcore.engine.simulated import SimulatedConfig, simulated_tokens
from pdcore.errors import failure
from pdcore.fsm.effects import Effect, ReportFinished, ReportTokens
from pdcore.fsm.events import StepCompleted
from pdcore.kv.metadata import MetadataRecord
from pdcore.scheduler.decode import DecodeCore
from pdcore.scheduler.decode_record import DecodeRecord
from pdcore.scheduler.running import Running
from pdcore.testing.world import World, make_world
from pdcore.types import (
    Batch,
    FinishReason,
    LeaseId,
    Nonce,
    Phase,
    RoomKey,
    SamplingParams,
    StepOutput,
)
from tests.unit.scheduler.kit import DECODE, PREFILL, make_decode, make_request, results


def arrive(core: DecodeCore, num_tokens: int, token: int = 50, **changes: object) -> DecodeRecord:
    """A request whose KV is here, without the way it took."""
    request = make_request(num_tokens, **changes)
    seq_id = 1000 + request.key.room
    record = DecodeRecord(request, LeaseId(DECODE.incarnation, seq_id), seq_id, 0.0, 0.0)
    core.rooms.add(record)
    assert core.blocks.allocate_slots(seq_id, num_tokens, 1)
    metadata = MetadataRecord(
        room=request.key.room,
        attempt=request.key.attempt,
        nonce=Nonce(PREFILL.incarnation, 1),
        output_token_id=token,
        logprob=-0.5,
        num_tokens=num_tokens,
        ids_hash=0,
    )
    core.running.start(record, metadata, 0.0)
    return record


def finish_step(running: Running, batch: Batch, token: int = 60) -> None:
    rows = [[token] if sample else None for sample in batch.sample]
    running.complete(StepCompleted(batch.batch_id, StepOutput(rows)), 1.0)


def told(effects: list[Effect]) -> list[tuple[RoomKey, list[int]]]:
    found = []
    for effect in effects:
        if isinstance(effect, ReportTokens):
            rows = zip(effect.keys, effect.token_ids, strict=True)
            found.extend((key, list(ids)) for key, ids in rows)
    return found


def test_the_first_token_is_told_with_its_logprob_and_may_be_the_last() -> None:
    """D18: the finish check runs on the token that prefill sampled."""
    core = make_decode()
    goes_on = arrive(core, 8)
    length = arrive(core, 8, max_tokens=1)
    eos = arrive(core, 8, token=2)
    effects = core.poll_effects()
    (first, *_) = [e for e in effects if isinstance(e, ReportTokens)]
    assert first.logprobs is not None
    assert [list(row or ()) for row in first.logprobs] == [[-0.5]]
    ends = {r.key: r.reason for r in results(effects)}
    assert ends == {length.key: FinishReason.LENGTH, eos.key: FinishReason.STOP}
    assert len(core.running) == 1
    assert core.blocks.ledger()["full"].held == 3
    assert goes_on.key in core.rooms.records


def test_one_batch_is_in_flight_at_a_time() -> None:
    core = make_decode()
    arrive(core, 8)
    batch = core.running.schedule(0.0)
    assert batch is not None
    assert batch.phase is Phase.DECODE
    assert core.running.schedule(0.0) is None
    core.running.complete(StepCompleted(batch.batch_id + 7, StepOutput([[1]])), 0.0)
    assert core.running.schedule(0.0) is None, "an answer to another batch is none"
    finish_step(core.running, batch)
    assert core.running.schedule(0.0) is not None


def test_a_sequence_that_joins_while_a_batch_is_in_flight_is_in_the_next() -> None:
    core = make_decode()
    arrive(core, 8, max_tokens=9)
    batch = core.running.schedule(0.0)
    assert batch is not None
    arrive(core, 8, max_tokens=9)
    finish_step(core.running, batch)
    batch = core.running.schedule(0.0)
    assert batch is not None
    assert len(batch) == 2


def retracted(core: DecodeCore) -> tuple[DecodeRecord, DecodeRecord]:
    """Eight usable blocks: both fill four of them, then one must give up its own."""
    first, second = arrive(core, 15, max_tokens=40), arrive(core, 14, max_tokens=40)
    for _ in range(20):
        batch = core.running.schedule(1.0)
        assert batch is not None
        finish_step(core.running, batch)
        if core.running.resuming:
            break
    assert len(core.running.resuming) == 1
    return first, second


def test_r72_the_victim_waits_and_comes_back_by_a_prefill_of_all_its_tokens() -> None:
    """R72, D8: into fresh blocks; what it is owed is kept from newcomers."""
    core = make_decode(num_blocks=9)
    first, second = retracted(core)
    (victim,) = core.running.resuming.values()
    stays = second if victim is first else first
    length = victim.seq.num_tokens
    assert victim.seq.seq_id not in core.blocks
    assert core.running.owed() == [{"full": -(-(length + 1) // 4)}]
    assert len(core.running) == 2, "it still runs, as far as anybody can see"
    core.running.stop(stays, FinishReason.ABORT, failure("cancelled", "x"), 2.0)
    core.poll_effects()
    batch = core.running.schedule(2.0)
    assert batch is not None
    assert (batch.phase, batch.seq_ids) == (Phase.PREFILL, [victim.seq.seq_id])
    assert (batch.num_tokens, batch.num_computed_tokens) == (length, [0])
    finish_step(core.running, batch, token=91)
    assert told(core.poll_effects()) == [(victim.key, [91])]
    assert not core.running.resuming
    batch = core.running.schedule(2.0)
    assert batch is not None
    assert batch.phase is Phase.DECODE
    core.blocks.audit()


def test_a_long_come_back_is_chunked() -> None:
    core = make_decode(CoreLimits(prefill_chunk_tokens=8), num_blocks=9)
    first, second = retracted(core)
    (victim,) = core.running.resuming.values()
    stays = second if victim is first else first
    core.running.stop(stays, FinishReason.ABORT, failure("cancelled", "x"), 2.0)
    chunks = []
    while victim.seq.seq_id in core.running.resuming:
        batch = core.running.schedule(2.0)
        assert batch is not None
        chunks.append(batch.num_tokens)
        finish_step(core.running, batch)
    assert len(chunks) == -(-sum(chunks) // 8)
    assert len(chunks) > 1


@pytest.mark.parametrize("in_flight", [False, True])
def test_a_retracted_request_can_be_ended(in_flight: bool) -> None:
    core = make_decode(num_blocks=9)
    first, second = retracted(core)
    (victim,) = core.running.resuming.values()
    stays = second if victim is first else first
    core.running.stop(stays, FinishReason.ABORT, failure("cancelled", "x"), 2.0)
    batch = core.running.schedule(2.0) if in_flight else None
    core.poll_effects()
    core.running.stop(victim, FinishReason.ABORT, failure("cancelled", "x"), 2.0)
    core.running.stop(victim, FinishReason.ABORT, failure("cancelled", "again"), 2.0)
    (result,) = results(core.poll_effects())
    assert result.key == victim.key
    if batch is not None:
        assert core.blocks.ledger()["full"].held > 0, "the pass still writes them"
        finish_step(core.running, batch)
        assert told(core.poll_effects()) == []
    assert core.blocks.ledger()["full"].free == 8
    assert core.running.schedule(3.0) is None


def test_a_failed_come_back_fails_that_request_only() -> None:
    """D45."""
    core = make_decode(num_blocks=9)
    first, second = retracted(core)
    (victim,) = core.running.resuming.values()
    stays = second if victim is first else first
    core.running.stop(stays, FinishReason.ABORT, failure("cancelled", "x"), 2.0)
    batch = core.running.schedule(2.0)
    assert batch is not None
    core.poll_effects()
    core.running.complete(StepCompleted(batch.batch_id, StepOutput([[]])), 2.0)
    (result,) = results(core.poll_effects())
    assert (result.key, result.failure and result.failure.code) == (victim.key, "internal")
    assert core.blocks.ledger()["full"].free == 8


def test_a_request_that_outgrew_the_pool_is_a_503_and_never_a_200() -> None:
    """D8, D9: the seed returned the stump as success."""
    core = make_decode(num_blocks=4)
    record = arrive(core, 7, max_tokens=100)
    while (batch := core.running.schedule(1.0)) is not None:
        finish_step(core.running, batch)
    (result,) = results(core.poll_effects())
    assert result.key == record.key
    assert result.failure is not None
    assert (result.failure.code, result.failure.http_status) == ("out_of_memory", 503)
    assert result.reason is FinishReason.ERROR
    assert result.completion_tokens > 0
    assert core.blocks.ledger()["full"].free == 3


def crowded(max_retractions: int) -> World:
    """Room for one and a half of the two requests."""
    model = SimulatedConfig(block_size=4, max_model_len=256, verify_all=True)
    limits = CoreLimits(num_reserved_decode_tokens=0, max_retractions=max_retractions)
    return make_world(model=model, num_blocks=19, prefill_blocks=64, limits=limits)


@pytest.mark.parametrize("max_retractions", [0, 1, 9])
def test_retraction_is_bounded_and_ends_in_tokens_or_a_503(max_retractions: int) -> None:
    """Invariant 7: whatever the bound, every request ends, with all its tokens or with
    out_of_memory after tokens that are right."""
    world = crowded(max_retractions)
    long = SamplingParams(max_tokens=40)
    keys = [world.submit([i] * 12, sampling=long) for i in (20, 30, 40)]
    world.run(lambda: all(world.decode.result(k) for k in keys))
    codes = []
    for key, i in zip(keys, (20, 30, 40), strict=True):
        result = world.decode.result(key)
        assert result is not None
        expected = simulated_tokens(world.model, [i] * 12, 40)
        spoken = world.decode.tokens(key)
        codes.append(None if result.failure is None else result.failure.http_status)
        if result.failure is None:
            assert spoken == expected
        else:
            assert (result.finish_reason, codes[-1]) == ("error", 503)
            assert spoken == expected[: len(spoken)]
    assert None in codes
    if max_retractions == 0:
        assert 503 in codes
    world.settle()
    ledger = world.decode.worker.core.blocks.audit()["full"]
    assert ledger.free == ledger.total
    assert not any(isinstance(e, ReportFinished) for e in world.decode.worker.core.poll_effects())
