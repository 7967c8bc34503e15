"""A Done is held back until what was written has been compared."""

from __future__ import annotations

import attrs
import pytest

from pdcore.control.messages import (
    CancelAck,
    Claim,
    Handshake,
    Route,
    Status,
    StatusAck,
    StatusKind,
)
from pdcore.errors import IncompatibleError, failure
from pdcore.fsm.effects import VerifyBlocks
from pdcore.fsm.events import BlocksVerified, TopologyFetched
from pdcore.fsm.states import ReceiverState
from pdcore.kv.metadata import MetadataRecord, encode_record, hash_token_ids
from pdcore.scheduler.decode import DecodeCore
from pdcore.scheduler.decode_record import DecodeRecord
from pdcore.scheduler.route import route_of
from pdcore.scheduler.verifying import source_of
from pdcore.topology import ParallelLayout
from pdcore.types import CRC32, LeaseId, Nonce, RoomKey
from tests.unit.scheduler.kit import (
    PREFILL,
    handshake_of,
    make_decode,
    make_request,
    make_setup,
    results,
    sent,
    start,
    tell,
    tick,
)

NONCE = Nonce(PREFILL.incarnation, 1)


def granted(num_tokens: int = 9) -> tuple[DecodeCore, RoomKey, LeaseId]:
    """A decode rank that asks for checksums, and a request whose KV may be written."""
    core = make_decode(integrity=CRC32)
    request = make_request(num_tokens)
    lease = handshake_of(start(core, request)).lease
    tell(core, PREFILL, Claim(request.key, lease, NONCE), 0.0)
    tick(core, 0.0)
    return core, request.key, lease


def done(core: DecodeCore, key: RoomKey, lease: LeaseId, ends: tuple[int, ...]) -> Status:
    prompt = core.rooms.records[key].request.prompt_token_ids
    record = MetadataRecord(
        *key, NONCE, 5, None, len(prompt), hash_token_ids(prompt), sent_until=ends, sums=b"sums"
    )
    return Status(key, lease, StatusKind.DONE, NONCE, None, encode_record(record))


def test_a_done_is_compared_once_and_goes_on_with_the_answer() -> None:
    core, key, lease = granted()
    message = done(core, key, lease, (4, 9))
    tell(core, PREFILL, message, 0.0)
    (effect,) = [e for e in tick(core, 0.0) if isinstance(e, VerifyBlocks)]
    assert (effect.key, effect.lease, effect.rank, effect.sums) == (key, lease, 0, b"sums")
    assert [plan.groups[0].tokens for plan in effect.part.plans()] == [[0], [4, 8]]
    tell(core, PREFILL, message, 0.1)
    assert tick(core, 0.1) == []
    core.handle_event(BlocksVerified(key, lease, 0, ""), 0.2)
    assert [m.kind for m in sent(tick(core, 0.2), StatusAck)] == [StatusKind.DONE]
    assert core.rooms.records[key].receiver.state is ReceiverState.DONE
    # A late repetition is acknowledged, and nothing is compared again.
    tell(core, PREFILL, message, 0.3)
    assert [type(e).__name__ for e in tick(core, 0.3)] == ["SendMessage"]


def test_what_is_wrong_is_the_request_s_failure_and_ends_the_claim() -> None:
    core, key, lease = granted()
    tell(core, PREFILL, done(core, key, lease, (9,)), 0.0)
    tick(core, 0.0)
    core.handle_event(BlocksVerified(key, lease, 0, "the KV is wrong"), 0.1)
    receiver = core.rooms.records[key].receiver
    assert receiver.failure is not None
    assert (receiver.failure.code, receiver.failure.detail) == ("corrupted", "the KV is wrong")
    assert receiver.targets[0].over


@pytest.mark.parametrize("ends", [(), (8,), (10,), (4, 10)])
def test_sums_of_something_else_fail_it_at_once(ends: tuple[int, ...]) -> None:
    core, key, lease = granted()
    tell(core, PREFILL, done(core, key, lease, ends), 0.0)
    effects = tick(core, 0.0)
    assert not [e for e in effects if isinstance(e, VerifyBlocks)]
    (result,) = results(effects)
    failure = result.failure
    assert failure is not None
    assert failure.code == "corrupted"
    assert f"of 9 tokens and sent those of {ends[-1] if ends else 0}" in failure.detail


def test_answers_that_nobody_waits_for_change_nothing() -> None:
    core, key, lease = granted()
    for event in (
        BlocksVerified(key, lease, 0, "no such Done"),
        BlocksVerified(RoomKey(9, 9), lease, 0, "no such room"),
        BlocksVerified(key, LeaseId(lease.incarnation, 99), 0, "no such lease"),
    ):
        core.handle_event(event, 0.0)
    assert core.rooms.records[key].receiver.failure is None


def granted_by_one_of_two() -> tuple[DecodeCore, RoomKey, LeaseId]:
    """Two prefill ranks are asked, and only the first has claimed."""
    core = make_decode(integrity=CRC32)
    request = make_request(9)
    core.submit(request, 0.0)
    tick(core, 0.0)
    both = route(ParallelLayout(2, cp_size=2, all_cp_ranks=True))
    core.handle_event(TopologyFetched(request.bootstrap, both), 0.0)
    lease = sent(tick(core, 0.0), Handshake)[0].lease
    tell(core, PREFILL, Claim(request.key, lease, NONCE), 0.0)
    tick(core, 0.0)
    return core, request.key, lease


def check_blame(core: DecodeCore, key: RoomKey, lease: LeaseId) -> None:
    """The request is cancelled while its Done is compared, prefill acknowledges, the blocks go
    back to the pool, and the thread that still reads them finds what others wrote there."""
    tell(core, PREFILL, done(core, key, lease, (9,)), 0.0)
    assert [e for e in tick(core, 0.0) if isinstance(e, VerifyBlocks)]
    assert core.abort(key, failure("cancelled", "the client left"), 0.1)
    tick(core, 0.1)
    tell(core, PREFILL, CancelAck(key, lease, NONCE), 0.2)
    tick(core, 0.2)
    ledger = core.blocks.audit()["full"]
    assert ledger.free == ledger.total
    # It is still known: the other rank has not answered its cancel.
    assert key in core.rooms.records
    blamed: list[str] = []
    vars(core.rooms)["peer_failed"] = lambda peer, detail, now: blamed.append(detail)
    core.handle_event(BlocksVerified(key, lease, 0, "not what was sent"), 0.3)
    assert blamed == []


def test_d25_what_is_read_in_freed_blocks_blames_nobody() -> None:
    """D25: a peer is not shed for what somebody else wrote into blocks that were free again."""
    check_blame(*granted_by_one_of_two())


def test_d25_blame_for_freed_blocks_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: whatever was found counts."""
    core, key, lease = granted_by_one_of_two()
    monkeypatch.setattr(DecodeRecord, "is_settled", False)
    with pytest.raises(AssertionError):
        check_blame(core, key, lease)


def route(layout: ParallelLayout) -> Route:
    setups = [
        attrs.evolve(make_setup(PREFILL._replace(rank=rank)), layout=layout)
        for rank in range(layout.world_size)
    ]
    return route_of(setups)


def test_what_a_prefill_rank_holds_follows_from_its_route() -> None:
    """R4, R21, R58: its share of the blocks, by its number."""
    setup = make_setup()
    shared = ParallelLayout(2, cp_size=2, all_cp_ranks=True)
    assert [source_of(setup, route(shared), rank)[1] for rank in (0, 1)] == [(0, 2), (1, 2)]
    first_only = ParallelLayout(2, cp_size=2)
    spec, share = source_of(setup, route(first_only), 0)
    assert share == (0, 1)
    assert spec == setup.spec


def test_sizes_that_cannot_be_are_refused() -> None:
    bad = route(ParallelLayout(1))
    bad.block_sizes["full"] = 0
    with pytest.raises(IncompatibleError, match="block_size 0"):
        source_of(make_setup(), bad, 0)
