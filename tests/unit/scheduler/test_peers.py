"""Liveness per pair: who is silent, who came back, who is proved to be another process."""

from __future__ import annotations

import pytest

from pdcore.config import CoreLimits
from pdcore.control.messages import Heartbeat
from pdcore.engine.simulated import simulated_tokens
from pdcore.fsm.effects import Effect, ForgetPeer, SendMessage
from pdcore.fsm.states import PeerState, ReceiverState
from pdcore.scheduler.breaker import Breakers
from pdcore.scheduler.peers import PeerBook
from pdcore.testing.world import World, make_world
from pdcore.transports.base import Revocation
from pdcore.types import Incarnation, PeerRef, RoomKey, SamplingParams

PROMPT = list(range(10, 70))
FIVE = SamplingParams(max_tokens=5)
#: Prefill computes this prompt in eight steps, so a test can stop in the middle.
CHUNKS = CoreLimits(prefill_chunk_tokens=8)


def peer(name: str, life: int = 1, rank: int = 0) -> PeerRef:
    return PeerRef(name, rank, Incarnation(bytes([life] * 16)), f"tcp://{name}:1")


A, B = peer("a"), peer("b", 2)


def asked(effects: list[Effect]) -> dict[str, int]:
    """Instance -> heartbeat sequence."""
    found = {}
    for effect in effects:
        assert isinstance(effect, SendMessage)
        assert isinstance(effect.message, Heartbeat)
        found[effect.to.instance] = effect.message.sequence
    return found


def test_every_needed_peer_is_asked_once_per_interval() -> None:
    book = PeerBook(3)
    beats, suspects = book.beat([A, B, A, A])
    assert asked(beats).keys() == {"a", "b"}
    assert suspects == []
    again, _ = book.beat([A, B])
    sequences = [*asked(beats).values(), *asked(again).values()]
    assert len(set(sequences)) == 4


def test_d48_silence_makes_suspect_once_and_any_message_recovers() -> None:
    """D48: three intervals without a message; reversible."""
    book = PeerBook(3)
    told = []
    for _ in range(6):
        book.heard(B.incarnation)
        told.append(book.beat([A, B])[1])
    # The first interval only starts to ask.
    assert told == [[], [], [], [A], [], []]
    assert book.suspects() == [A]
    assert book.peers[B.incarnation].state is PeerState.HEALTHY
    book.heard(A.incarnation)
    assert book.beat([A, B])[1] == []
    assert book.suspects() == []
    assert asked(book.beat([A])[0]).keys() == {"a"}, "a suspect is still asked"


def test_a_peer_without_rooms_is_forgotten() -> None:
    """Bounded by the rooms; coming back starts afresh."""
    book = PeerBook(1)
    book.beat([A])
    book.beat([A])
    assert book.suspects() == [A]
    book.beat([])
    assert book.peers == {}
    book.heard(A.incarnation)
    book.beat([A])
    assert book.suspects() == []


def test_another_life_that_answers_proves_the_restart() -> None:
    book = PeerBook(3)
    sequence = asked(book.beat([A, B])[0])["a"]
    reborn = peer("a", life=9)
    died = book.answered(reborn, sequence)
    assert died is not None
    assert died.peer == A
    assert "restarted" in died.detail
    assert book.peers[A.incarnation].state is PeerState.DEAD
    assert not book.peers[A.incarnation].is_fenced, "death is no fence"
    assert book.answered(reborn, sequence) is None, "told once"
    assert asked(book.beat([A, B])[0]).keys() == {"b"}, "the dead are not asked"
    assert book.suspects() == []


@pytest.mark.parametrize(
    ("sender", "offset"),
    [
        (A, 0),
        (peer("c", life=9), 0),
        (peer("a", life=9, rank=1), 0),
        (peer("a", life=9), 100),
    ],
    ids=["the same life", "another instance", "another rank", "a number never asked"],
)
def test_what_proves_nothing(sender: PeerRef, offset: int) -> None:
    book = PeerBook(3)
    sequence = asked(book.beat([A, B])[0])["a"]
    assert book.answered(sender, sequence + offset) is None
    assert book.peers[A.incarnation].state is not PeerState.DEAD


def test_an_answer_of_a_former_interval_proves_nothing() -> None:
    """A late frame is no evidence about now."""
    book = PeerBook(3)
    old = asked(book.beat([A])[0])["a"]
    book.beat([A])
    assert book.answered(peer("a", life=9), old) is None


def test_a_death_that_the_transport_saw_ends_the_asking() -> None:
    book = PeerBook(3)
    book.beat([A])
    book.died(A.incarnation, "killed", True)
    book.died(B.incarnation, "never known here", True)
    assert book.peers[A.incarnation].is_fenced
    assert book.beat([A])[0] == []


# --- in a world -------------------------------------------------------------------------


def until_granted(world: World) -> RoomKey:
    """Prefill holds a grant and computes; it has written nothing."""
    key = world.submit(PROMPT, sampling=FIVE)
    records = world.decode.worker.core.rooms.records
    world.run(lambda: any(t.nonce for r in records.values() for t in r.receiver.targets.values()))
    assert world.fabric.pending() == []
    return key


def until_posted(world: World) -> RoomKey:
    key = world.submit(PROMPT, sampling=FIVE)
    world.run(lambda: any(a.kind == "move" for a in world.fabric.pending()))
    return key


def drained(world: World) -> bool:
    while world.fabric.step() is not None:
        pass
    return not any(rank.worker.core.live_keys() for rank in world.ranks.values())


def code(world: World, key: RoomKey) -> str | None:
    result = world.decode.result(key)
    assert result is not None
    return None if result.failure is None else result.failure.code


def check_next_request_works(world: World) -> None:
    key = world.submit(PROMPT, sampling=FIVE)
    world.run(lambda: drained(world) and world.decode.result(key) is not None)
    assert code(world, key) is None
    assert world.decode.tokens(key) == simulated_tokens(world.model, PROMPT, 5)


def check_all_back(world: World) -> None:
    world.run(lambda: drained(world))
    for rank in world.ranks.values():
        ledger = rank.worker.core.blocks.audit()["full"]
        assert ledger.free == ledger.total
    slots = world.decode.worker.core.rooms.slots
    assert slots.available == slots.capacity


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("until", [until_granted, until_posted])
def test_d39_a_prefill_that_restarts_fails_its_requests_fast_and_serves_the_next(
    until, late: bool
) -> None:
    """D39, SGLang I6215, I16903, PR6263: the client of the lost request hears of it long before its
    deadline, and the next request goes to the new process, whatever the route cache says."""
    world = make_world(stepped=True, num_blocks=40, limits=CHUNKS)
    key = until(world)
    start = world.clock.monotonic()
    world.restart("prefill", late=late)
    world.run(lambda: world.decode.result(key) is not None)
    assert code(world, key) == "peer_lost"
    assert world.clock.monotonic() - start < 3.0
    check_next_request_works(world)
    check_all_back(world)


def test_a_restart_while_nothing_runs_costs_no_request() -> None:
    """A route that names a dead process is forgotten when the transport sees the death, not
    when a request has been lost to it."""
    world = make_world()
    world.run_request(PROMPT, FIVE)
    world.restart("prefill")
    world.step()
    assert world.run_request(PROMPT, FIVE) == simulated_tokens(world.model, PROMPT, 5)


def test_a_request_that_has_its_kv_does_not_need_prefill_any_more() -> None:
    world = make_world()
    key = world.submit(PROMPT, sampling=SamplingParams(max_tokens=30))
    world.run(lambda: len(world.decode.tokens(key)) > 2)
    world.restart("prefill")
    world.run(lambda: world.decode.result(key) is not None)
    assert code(world, key) is None
    assert world.decode.tokens(key) == simulated_tokens(world.model, PROMPT, 30)


@pytest.mark.parametrize("until", [until_granted, until_posted])
def test_a_decode_that_restarts_fails_prefill_fast(until) -> None:
    """Prefill holds blocks for nobody."""
    world = make_world(stepped=True, num_blocks=40, limits=CHUNKS)
    key = until(world)
    world.restart("decode")
    world.run(lambda: world.prefill.result(key) is not None)
    result = world.prefill.result(key)
    assert result is not None
    assert result.failure is not None
    assert result.failure.code in ("peer_lost", "transfer_failed")
    check_next_request_works(world)
    check_all_back(world)


def test_a_writer_that_dies_before_it_wrote_costs_no_block() -> None:
    """It was granted and had posted nothing. It connects before it claims, so its death is
    seen and fenced: without that its blocks would stay out for ever."""
    world = make_world(stepped=True, num_blocks=40, limits=CHUNKS)
    until_granted(world)
    start = world.clock.monotonic()
    world.restart("prefill")
    world.run(lambda: drained(world))
    assert world.clock.monotonic() - start < 1.0
    check_all_back(world)


def test_a_silent_writer_keeps_its_blocks() -> None:
    """Silence is no proof (rule 2): a stopped prefill may write when it goes on."""
    world = make_world(stepped=True, num_blocks=40, limits=CHUNKS)
    key = until_granted(world)
    silent = world.ranks.pop("prefill")
    world.abort(key)
    stop = world.clock.monotonic() + 100.0
    world.run(lambda: world.clock.monotonic() > stop)
    assert world.decode.worker.core.blocks.audit()["full"].quarantined > 0
    world.ranks["prefill"] = silent
    check_all_back(world)


def test_on_a_quarantine_transport_the_period_frees_the_blocks_of_a_dead_writer() -> None:
    """Rule 2: fence or quarantine. The period counts from the proof of death."""
    world = make_world(stepped=True, num_blocks=40, limits=CHUNKS, revocation=Revocation.QUARANTINE)
    until_posted(world)
    start = world.clock.monotonic()
    world.restart("prefill", late=True)
    world.run(lambda: not world.decode.worker.core.live_keys())
    period_s = world.decode.worker.core.setup.quarantine_s
    assert period_s <= world.clock.monotonic() - start < period_s + 5.0
    check_all_back(world)


def test_a_dead_writer_seen_by_the_transport_waits_for_its_last_byte() -> None:
    """Death without fence: not even the drain time frees what may still be written."""
    world = make_world(stepped=True, num_blocks=40, limits=CHUNKS)
    key = until_posted(world)
    world.restart("prefill", late=True)
    stop = world.clock.monotonic() + 100.0
    world.run(lambda: world.clock.monotonic() > stop)
    record = world.decode.worker.core.rooms.records[key]
    assert record.receiver.state is ReceiverState.DRAINING
    assert world.decode.worker.core.blocks.audit()["full"].quarantined > 0
    check_all_back(world)


# --- no new work ------------------------------------------------------------------------


def test_the_dead_and_the_silent_that_nobody_needs_lose_their_connections() -> None:
    """vllm #58063: nothing of a process that is gone is kept. A successor at the same
    address keeps the connection, and a living peer without rooms keeps its own."""
    book = PeerBook(1)
    book.beat([A, B])
    book.died(A.incarnation, "killed", True)
    book.heard(B.incarnation)
    assert book.beat([])[0] == [ForgetPeer(A)]
    book.beat([A])
    book.died(A.incarnation, "killed", True)
    reborn = peer("a", life=9)
    assert not any(isinstance(e, ForgetPeer) for e in book.beat([reborn])[0])
    book.beat([reborn])
    assert book.suspects() == [reborn]
    assert book.beat([])[0] == [ForgetPeer(reborn)]


def test_a_fence_after_the_death_is_recorded() -> None:
    book = PeerBook(1)
    book.beat([A])
    book.died(A.incarnation, "killed", False)
    assert not book.peers[A.incarnation].is_fenced
    book.died(A.incarnation, "its last write landed", True)
    assert book.peers[A.incarnation].is_fenced


def test_a_suspect_recovers_with_its_first_word() -> None:
    book = PeerBook(1)
    book.beat([A])
    book.beat([A])
    assert book.state_of(A.incarnation) is PeerState.SUSPECT
    book.heard(A.incarnation)
    assert book.state_of(A.incarnation) is PeerState.HEALTHY
    assert book.state_of(B.incarnation) is PeerState.UNKNOWN


def refused(world: World, name: str) -> dict[str, str]:
    """Whom this rank gives no work now, as its leader and the routers hear it."""
    return world.ranks[name].worker.core.rooms.refused_peers(world.clock.monotonic())


def until_suspect(world: World, monkeypatch: pytest.MonkeyPatch) -> float:
    """Prefill's worker is stopped while a granted room depends on it, its leader goes on;
    returns when it was noticed."""
    until_granted(world)
    monkeypatch.setattr(world.prefill.worker, "step", lambda max_wait_s: False)
    peers = world.decode.worker.core.rooms.peers
    world.run(lambda: bool(peers.suspects()))
    return world.clock.monotonic()


def why(world: World, key: RoomKey) -> str:
    result = world.decode.result(key)
    assert result is not None
    assert result.failure is not None
    return result.failure.detail


def check_a_suspect_gets_no_new_work(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    noticed_s = until_suspect(world, monkeypatch)
    key = world.submit(PROMPT, sampling=FIVE, to=("decode",))
    world.run(lambda: world.decode.result(key) is not None)
    assert code(world, key) == "unavailable"
    assert world.clock.monotonic() - noticed_s < 1.0
    assert why(world, key) == "prefill rank 0: it has not answered 5 heartbeats in a row"


def test_a_suspect_gets_no_new_work_and_gets_it_again_with_its_first_word(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Suspect stops new work at once, frees nothing, and is reversible."""
    world = make_world(stepped=True, num_blocks=60, limits=CHUNKS)
    check_a_suspect_gets_no_new_work(world, monkeypatch)
    monkeypatch.undo()
    assert refused(world, "decode").keys() == {"prefill"}
    world.run(lambda: drained(world))
    check_next_request_works(world)
    assert refused(world, "decode") == {}
    check_all_back(world)


def test_a_suspect_that_gets_work_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: silence is noticed and nothing follows."""
    world = make_world(stepped=True, num_blocks=60, limits=CHUNKS)
    rooms = world.decode.worker.core.rooms
    rooms.why_no_work = lambda *_: None
    with pytest.raises(AssertionError):
        check_a_suspect_gets_no_new_work(world, monkeypatch)


def test_who_waits_for_a_peer_that_fell_silent_fails_at_once() -> None:
    """Handshake silence: nobody answered, nothing was granted, another pair may serve it. Its
    blocks come back at once. Who was granted waits on."""
    world = make_world(stepped=True, num_blocks=60, limits=CHUNKS)
    granted = until_granted(world)
    silent = world.ranks.pop("prefill")
    key = world.submit(PROMPT, sampling=FIVE, to=("decode",))
    world.run(lambda: world.decode.result(key) is not None)
    assert code(world, key) == "unavailable"
    core = world.decode.worker.core
    assert core.rooms.records[key].receiver.state is ReceiverState.FAILED
    assert world.decode.result(granted) is None
    assert core.blocks.audit()["full"].leased > 0
    world.ranks["prefill"] = silent
    check_all_back(world)


def outcome(world: World) -> str | None:
    """Of one request; what decode refuses is cancelled at prefill, as the router does."""
    key = world.submit(PROMPT, sampling=FIVE)
    world.run(lambda: world.fabric.step() is None and world.decode.result(key) is not None)
    world.abort(key, at="prefill")
    world.run(lambda: drained(world))
    return code(world, key)


def check_a_broken_pair_is_left_alone(world: World) -> None:
    """Every transfer fails by itself; handshakes, claims and heartbeats go on."""
    incarnation = world.prefill.worker.core.setup.me.incarnation
    codes = []
    for _ in range(6):
        world.fabric.faults(incarnation).fail_after_chunks = 0
        codes.append(outcome(world))
    assert codes == ["transfer_failed"] * 3 + ["unavailable"] * 3


def test_d25_transfers_that_fail_stop_new_work_until_one_succeeds() -> None:
    """D25, vllm PR #55471: the pair is broken while both ends are well. After the cool-down
    one request tries it, and its success closes the breaker on both sides."""
    world = make_world(stepped=True, num_blocks=60)
    check_a_broken_pair_is_left_alone(world)
    incarnation = world.prefill.worker.core.setup.me.incarnation
    world.fabric.faults(incarnation).fail_after_chunks = None
    assert refused(world, "decode").keys() == {"prefill"}
    assert refused(world, "prefill").keys() == {"decode"}
    world.clock.advance(10.0)
    check_next_request_works(world)
    for rank in world.ranks.values():
        assert rank.worker.core.rooms.refused_peers(world.clock.monotonic()) == {}
    check_all_back(world)


def test_d25_the_seeds_rule_is_caught_in_a_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """D25: any message closes the breaker, so it never bites."""
    monkeypatch.setattr(Breakers, "heard", Breakers.succeeded)
    with pytest.raises(AssertionError):
        check_a_broken_pair_is_left_alone(make_world(stepped=True, num_blocks=60))


def stuck_with_much(share: float) -> World:
    """Prefill is stopped in the middle of a write of 16 of decode's 39 blocks, the client has
    left, and the time to drain is over."""
    limits = CoreLimits(
        drain_timeout_s=1.0, quarantine_share=share, heartbeat_misses=1000, prefill_chunk_tokens=8
    )
    world = make_world(stepped=True, num_blocks=40, limits=limits)
    key = until_posted(world)
    stopped = world.prefill.worker
    world.ranks["prefill"] = world.prefill
    vars(stopped)["step"] = lambda max_wait_s: False
    world.abort(key)
    world.run(lambda: bool(world.decode.worker.core.rooms.stuck_on()))
    assert world.decode.worker.core.rooms.stuck_on() == {"prefill rank 0": 1}
    return world


def check_a_stuck_peer_gets_no_more_blocks(world: World) -> None:
    before = world.decode.worker.core.blocks.ledger()["full"]
    key = world.submit(PROMPT, sampling=FIVE, to=("decode",), timeout_s=5.0)
    world.run(lambda: world.decode.result(key) is not None)
    assert code(world, key) == "unavailable"
    assert why(world, key) == (
        "prefill rank 0: it does not acknowledge earlier transfers and keeps too many blocks out"
    )
    assert world.decode.worker.core.blocks.ledger()["full"] == before, "not even a handshake"


def test_rule_6_past_its_share_a_stuck_peer_gets_no_more_handshakes() -> None:
    """Rule 6: each one would pin more of the pool for a peer that does not give it back."""
    check_a_stuck_peer_gets_no_more_blocks(stuck_with_much(0.4))


def test_rule_6_below_its_share_it_still_gets_work() -> None:
    """The mutant of the bound: with a larger share the same world hands out more blocks."""
    with pytest.raises(AssertionError):
        check_a_stuck_peer_gets_no_more_blocks(stuck_with_much(0.5))


def test_rule_6_when_it_has_acknowledged_everything_goes_on() -> None:
    world = stuck_with_much(0.4)
    del vars(world.prefill.worker)["step"]
    world.run(lambda: drained(world))
    assert world.decode.worker.core.rooms.stuck_on() == {}
    check_next_request_works(world)
    check_all_back(world)
