"""bounded tables, the vote vector and the one refusal function."""

from __future__ import annotations

import attrs
import pytest

from pdcore.config import CoreLimits
from pdcore.errors import Overloaded, RoomInUse, failure
from pdcore.fsm.effects import Effect, ReportFinished
from pdcore.kv.cache import KVBlocks
from pdcore.scheduler.queues import (
    ExpiringTable,
    RoomRecord,
    finish_reason_of,
    ledger_totals,
    refusal,
)
from pdcore.types import FinishReason, RoomKey
from tests.unit.scheduler.books import add, make_book
from tests.unit.scheduler.kit import make_decode, make_prefill, make_request, make_setup

# --- tables -----------------------------------------------------------------------------


def test_an_expiring_table_is_bounded_and_forgets_the_oldest() -> None:
    table: ExpiringTable[str] = ExpiringTable(2, 10.0)
    table.put("a", "A", 0.0)
    table.put("b", "B", 1.0)
    table.put("a", "A2", 2.0)
    table.put("c", "C", 3.0)
    assert table.get("b", 3.0) is None, "refreshing made a the younger one"
    assert table.get("a", 3.0) == "A2"
    assert (len(table), table.num_evicted) == (2, 1)


def test_an_entry_expires_at_its_time_and_not_before() -> None:
    table: ExpiringTable[str] = ExpiringTable(8, 10.0)
    table.put("a", "A", 0.0)
    assert table.get("a", 9.999) == "A"
    assert table.get("a", 10.0) is None
    assert table.pop("a", 10.0) is None
    table.put("b", "B", 11.0)
    table.put("c", "C", 22.0)
    assert len(table) == 1, "putting sweeps what has expired"
    assert table.pop("c", 23.0) == "C"
    assert table.pop("c", 23.0) is None


# --- coming and going -------------------------------------------------------------------


def test_d7_a_live_room_belongs_to_one_attempt_unless_it_is_replaced() -> None:
    """D7: the same dispatch twice, and another one of a live room, are refused; the dispatch
    that names the attempt it replaces is taken."""
    book = make_book()
    add(book, 1, attempt=10)
    book.check_new(make_request(key=RoomKey(2, 10)), 0.0)
    for key, replaces in ((RoomKey(1, 10), None), (RoomKey(1, 11), None), (RoomKey(1, 11), 99)):
        with pytest.raises(RoomInUse):
            book.check_new(make_request(key=key, replaces=replaces), 0.0)
    book.check_new(make_request(key=RoomKey(1, 11), replaces=10), 0.0)


def test_d7_a_room_is_free_again_when_its_attempt_has_its_result() -> None:
    """Draining goes on beside the next attempt; the same attempt never comes twice."""
    book = make_book(tombstone_ttl_s=50.0)
    record = add(book, 1, attempt=10)
    book.report(record, FinishReason.ERROR, failure("peer_lost", "gone"), 1.0)
    book.check_new(make_request(key=RoomKey(1, 11)), 2.0)
    with pytest.raises(RoomInUse, match="already dispatched"):
        book.check_new(make_request(key=RoomKey(1, 10)), 2.0)
    book.forget(record.key)
    with pytest.raises(RoomInUse, match="already dispatched"):
        book.check_new(make_request(key=RoomKey(1, 10)), 40.0)
    book.check_new(make_request(key=RoomKey(1, 10)), 60.0)


def test_a_full_queue_is_refused_until_somebody_has_a_result() -> None:
    book = make_book(max_queued_requests=2)
    first = add(book, 1)
    add(book, 2)
    with pytest.raises(Overloaded, match="2 requests"):
        book.check_new(make_request(), 0.0)
    book.report(first, FinishReason.STOP, None, 1.0)
    book.check_new(make_request(), 1.0)


def test_a_record_is_reported_once() -> None:
    """Invariant 1: later outcomes change nothing; the deadline is disarmed with the first."""
    book = make_book()
    record = add(book, 1)
    record.mark("admitted", 0.5)
    book.report(record, FinishReason.LENGTH, None, 2.0, completion_tokens=3)
    book.report(record, FinishReason.ERROR, failure("internal", "late"), 3.0)
    (result,) = [e for e in book.poll_effects() if isinstance(e, ReportFinished)]
    assert (result.reason, result.failure) == (FinishReason.LENGTH, None)
    assert (result.prompt_tokens, result.completion_tokens) == (8, 3)
    assert result.timeline == {"admitted": 0.5, "finished": 2.0}
    assert not book.timers.is_armed("deadline", record.key)
    tombstone = book.tombstones.get(record.key, 3.0)
    assert tombstone is not None
    assert tombstone.failure is None


def test_forgetting_a_room_leaves_nothing_of_it() -> None:
    book = make_book()
    record = add(book, 1)
    for kind in ("resend", "drain", "linger"):
        book.timers.arm(kind, record.key, 9.0)
    book.forget(record.key)
    book.forget(record.key)
    assert (len(book.timers), book.records, book._dirty, book._live) == (0, {}, {}, {})


def test_resending_backs_off_and_stops_when_it_is_answered() -> None:
    """Rule 4: 50 ms to 5 s, until answered."""
    book = make_book(resend_initial_s=1.0, resend_max_s=3.0)
    record = add(book, 1)
    book.arm_resend(record, 0.0)
    assert not book.timers.is_armed("resend", record.key), "nothing is open"
    question: Effect = ReportFinished(record.key, FinishReason.STOP, None, 0, 0, {})
    record.entity.open = [question]
    book.arm_resend(record, 0.0)
    book.arm_resend(record, 0.9)
    due, now, sent = [], 0.0, 0
    for _ in range(4):
        moment = book.timers._armed["resend", record.key]
        due.append(moment - now)
        now = moment
        assert list(book.timers.pop_due(now)) == [("resend", record.key)]
        book.resend(record, now)
        sent += len(book.poll_effects())
    assert due == [1.0, 2.0, 3.0, 3.0]
    assert sent == 4
    record.entity.open = []
    list(book.timers.pop_due(1e3))
    book.resend(record, now)
    assert book.poll_effects() == []
    assert not book.timers.is_armed("resend", record.key)


def test_a_base_record_has_no_entity() -> None:
    with pytest.raises(TypeError, match="subclass"):
        _ = RoomRecord(make_request(), 0.0).entity


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        (None, FinishReason.ERROR),
        (failure("cancelled", "x"), FinishReason.ABORT),
        (failure("deadline_exceeded", "x"), FinishReason.ERROR),
    ],
)
def test_only_a_cancelled_request_counts_as_aborted(reason, expected: FinishReason) -> None:
    assert finish_reason_of(reason) is expected


# --- the refusal ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_tokens", "remaining_s", "max_model_len", "num_blocks", "code"),
    [
        (8, 1.0, 512, 64, None),
        (0, 1.0, 512, 64, "invalid_request"),
        (64, 1.0, 512, 64, None),
        (65, 1.0, 512, 64, "prompt_too_long"),
        (9, 1.0, 10, 64, None),
        (10, 1.0, 10, 64, "prompt_too_long"),
        (11, 1.0, 512, 4, None),
        (12, 1.0, 512, 4, "prompt_too_long"),
        (8, 0.0, 512, 64, "deadline_exceeded"),
        (8, -3.0, 512, 64, "deadline_exceeded"),
        (65, -3.0, 512, 64, "prompt_too_long"),
    ],
)
def test_r66_the_refusal_table(
    num_tokens: int, remaining_s: float, max_model_len: int, num_blocks: int, code: str | None
) -> None:
    """R66, D11: max_prefill_tokens 64, one token of the model's length left for output, and
    three usable blocks of four tokens that must hold the prompt and one new token."""
    setup = make_setup(limits=CoreLimits(max_prefill_tokens=64), max_model_len=max_model_len)
    blocks = KVBlocks(setup.spec, num_blocks, max_model_len)
    request = make_request(num_tokens, remaining_s=remaining_s)
    reason = refusal(request, setup, blocks, new_tokens=1)
    assert (None if reason is None else reason.code) == code


def test_r66_both_roles_refuse_before_anything_exists() -> None:
    """One result each, no record, no block, no timer; the attempt is remembered."""
    limits = CoreLimits(max_prefill_tokens=16)
    for core in (make_prefill(limits), make_decode(limits)):
        request = make_request(17)
        core.submit(request, 0.0)
        (result,) = core.poll_effects()
        assert isinstance(result, ReportFinished)
        assert result.failure is not None
        assert (result.failure.code, result.failure.http_status) == ("prompt_too_long", 413)
        assert core.rooms.records == {}
        assert core.poll_deadline() is None
        with pytest.raises(RoomInUse):
            core.submit(attrs.evolve(request, prompt_token_ids=(1, 2)), 1.0)


def test_the_ledger_of_all_keys_is_summed() -> None:
    core = make_prefill(num_blocks=9)
    assert core.blocks.allocate_slots(1, 0, 9)
    assert core.blocks.allocate_slots(2, 0, 4)
    core.blocks.lease(2)
    assert ledger_totals(core.blocks) == {
        "kv_free": 4,
        "kv_held": 3,
        "kv_leased": 1,
        "kv_quarantined": 0,
    }
