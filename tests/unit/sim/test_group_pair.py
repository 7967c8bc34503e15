"""Half of a group world: production entities, and a wire that keeps every message."""

from __future__ import annotations

import pytest

from pdcore.control.messages import Cancel, CancelAck, Grant, Status, StatusAck, StatusKind
from pdcore.fsm.legs import FAILED, QUIESCED, READY
from pdcore.fsm.states import ReceiverState, SenderState
from pdcore.sim.group_pair import KEY, LEASE, PREFILL, Pair, PairRules, Wire, is_writing, name_of
from pdcore.types import Nonce

NONCE = Nonce(PREFILL.incarnation, 1)


@pytest.fixture
def rules() -> PairRules:
    return PairRules()


def take(rules: PairRules, pair: Pair, text: str) -> Pair:
    found = [move.pair for move in rules.moves(pair) if text in move.label]
    assert found, f"{text!r} is not among {[m.label for m in rules.moves(pair)]}"
    return found[0]


def admitted(rules: PairRules) -> Pair:
    pair = take(rules, rules.start, "learns the route")
    for _ in range(2):
        pair = rules.commit_decode(pair, READY).pair
    return pair


def granted(rules: PairRules) -> Pair:
    pair = take(rules, admitted(rules), "gets HANDSHAKE")
    pair = rules.commit_prefill(pair, READY).pair
    return take(rules, take(rules, pair, "gets CLAIM"), "gets GRANT")


def test_admission_puts_the_handshake_on_the_wire(rules: PairRules) -> None:
    pair = admitted(rules)
    assert rules.receivers.entity(pair.decode).state is ReceiverState.TRANSFERRING
    assert [name for name, _ in rules.wire.on(pair.net)] == ["HANDSHAKE"]


def test_a_message_stays_on_the_wire_and_may_come_again(rules: PairRules) -> None:
    pair = granted(rules)
    names = [name for name, _ in rules.wire.on(pair.net)]
    assert names == ["HANDSHAKE", "CLAIM", "GRANT"]
    # Coming again changes nothing, so it is no move.
    assert not [move for move in rules.moves(pair) if "gets" in move.label]


def test_a_tick_takes_a_row_of_the_production_table(rules: PairRules) -> None:
    pair = granted(rules)
    failed = rules.commit_decode(pair, FAILED)
    assert failed.rows == ("receiver: row Transferring --failed--> Draining",)
    ended = rules.commit_decode(failed.pair, QUIESCED)
    assert rules.receivers.entity(ended.pair.decode).state is ReceiverState.FAILED
    assert rules.commit_decode(ended.pair, READY).rows == ()


def test_a_write_is_possible_from_the_post_on_until_it_has_quiesced(rules: PairRules) -> None:
    pair = rules.prefill(granted(rules), "compute_started", None, "").pair
    pair = rules.commit_prefill(take(rules, pair, "has computed"), READY).pair
    assert rules.senders.entity(pair.prefill).state is SenderState.TRANSFERRING
    broken = take(rules, pair, "fails but still writes")
    written = take(rules, pair, "has written")
    entities = [rules.senders.entity(found.prefill) for found in (pair, broken, written)]
    assert [is_writing(sender) for sender in entities] == [True, True, False]


def test_waiting_for_a_handshake_ends_by_its_own_timer(rules: PairRules) -> None:
    """Rule 8, protocol models Q5 DLP: prefill's timer runs while it waits for the handshake; in
    later states a deadline is a fault, nothing may need it."""
    early = [m for m in rules.moves(rules.start) if m.label == "P{rank} meets its deadline"]
    late = [m for m in rules.moves(granted(rules)) if m.label == "P{rank} meets its deadline"]
    assert [m.is_fault for m in (*early, *late)] == [False, True]


def test_what_only_stops_a_resend_is_no_message() -> None:
    assert name_of(StatusAck(KEY, LEASE, StatusKind.DONE)) == ""
    assert name_of(Status(KEY, LEASE, StatusKind.QUEUED)) == ""
    assert name_of(Cancel(KEY, LEASE, (NONCE,))) == "CANCEL of its nonce"
    assert name_of(Cancel(KEY, LEASE, ())) == "CANCEL without a nonce"
    assert name_of(CancelAck(KEY, LEASE, None)) == "ACK without a nonce"
    assert name_of(Grant(KEY, NONCE)) == "GRANT"


def test_places_order_pairs_in_every_run_alike() -> None:
    """Numbers are given out as states are met; an order by them would make a replay differ."""
    one, two = PairRules(), PairRules()
    failed = take(two, two.start, "D{rank} is aborted")
    routed = [take(rules, rules.start, "learns the route") for rules in (one, two)]
    assert one.place(routed[0]) == two.place(routed[1])
    assert two.place(failed) != two.place(routed[1])


def test_a_wire_keeps_the_first_message_of_a_name() -> None:
    wire = Wire()
    assert wire.bits([]) == 0
    assert list(wire.on(0)) == []
