"""SGLang PR38961: pages come back when every writer has acknowledged for itself, and only then."""

from __future__ import annotations

import random

import msgspec
import pytest

from pdcore.config import CoreLimits
from pdcore.control.codec import decode_frame
from pdcore.control.memory import FaultPlan
from pdcore.control.messages import Cancel, CancelAck, Grant, Status, StatusKind
from pdcore.fsm.effects import PostTransfer
from pdcore.fsm.events import HandleEnded, StepCompleted
from pdcore.fsm.sender import Sender
from pdcore.testing.world import World, make_world
from pdcore.types import Nonce, RoomKey, StepOutput
from tests.scenarios.reports.kit import FIVE, check_serves, check_whole
from tests.unit.scheduler.kit import (
    DECODE,
    handshake_of,
    make_decode,
    make_prefill,
    make_request,
    sent,
    start,
    tell,
    tick,
)


def check_every_canceller_is_answered(num_ranks: int) -> None:
    """So many decode ranks of one request cancel at once, while their writes run."""
    core = make_prefill()
    request = make_request()
    core.submit(request, 0.0)
    handshake = msgspec.structs.replace(
        handshake_of(start(make_decode(), request)), num_required=num_ranks
    )
    peers = [DECODE._replace(rank=rank) for rank in range(num_ranks)]
    for peer in peers:
        tell(core, peer, handshake)
    tick(core)
    legs = core.rooms.records[request.key].sender.legs
    nonces = {rank: leg.nonce for rank, leg in legs.items()}
    for peer in peers:
        tell(core, peer, Grant(request.key, nonces[peer.rank]))
    tick(core)
    batch = core.schedule(0.0)
    assert batch is not None
    core.handle_event(StepCompleted(batch.batch_id, StepOutput([[7]])), 0.0)
    posts = [effect for effect in tick(core) if isinstance(effect, PostTransfer)]
    assert len(posts) == num_ranks
    for peer in peers:
        tell(core, peer, Cancel(request.key, handshake.lease, (nonces[peer.rank],)))
    assert sent(tick(core), CancelAck) == [], "acknowledged while a write may still land"
    answered: list[Nonce | None] = []
    for post in posts:
        core.handle_event(HandleEnded(post.handle, quiesced=True), 0.0)
        answered += [m.nonce for m in sent(tick(core), CancelAck) if isinstance(m, CancelAck)]
    assert sorted(map(str, answered)) == sorted(map(str, nonces.values()))
    assert core.blocks.audit()["full"].free == core.blocks.audit()["full"].total


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_every_rank_that_cancels_gets_its_own_acknowledgement(num_ranks: int) -> None:
    """SGLang PR38961: N cancels of one request give N acknowledgements, each when its own
    write is quiet; none overwrites or drops another's."""
    check_every_canceller_is_answered(num_ranks)


def test_a_sender_that_remembers_one_canceller_only_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SGLang PR38961: the last one to cancel takes the place of those before it."""
    due = Sender._acks_due

    def last_only(self: Sender):
        cancelled = [leg for leg in self.legs.values() if leg.cancelled]
        for leg in cancelled[:-1]:
            leg.cancelled = False
        return due(self)

    monkeypatch.setattr(Sender, "_acks_due", last_only)
    with pytest.raises(AssertionError):
        check_every_canceller_is_answered(2)


# --- the rule as a property ---------------------------------------------------------------


class Witness:
    """Reads both ends' wires: which nonces were granted, and which of them prefill ended; and
    looks at the fabric for what a prefill that died may still write."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.dead: set[bytes] = set()
        self.granted: dict[RoomKey, set[Nonce]] = {}
        self.ended: set[Nonce] = set()
        self.num_released = 0
        for rank in world.ranks.values():
            self.listen(rank.worker.ports.channel)
        rooms = world.decode.worker.core.rooms
        blocks = rooms.blocks
        release, unlease = rooms.release, blocks.unlease
        by_seq = {}

        def admit(record, now: float, admit=rooms.admit):
            by_seq[record.seq.seq_id] = record.key
            return admit(record, now)

        def released(record) -> None:
            self.check(record.key)
            release(record)

        def unleased(seq_id: int) -> None:
            self.check(by_seq[seq_id])
            unlease(seq_id)

        vars(rooms).update(admit=admit, release=released)
        vars(blocks)["unlease"] = unleased

    def restart_prefill(self, *, late: bool) -> None:
        self.dead.add(self.world.prefill.worker.core.setup.me.incarnation)
        self.world.restart("prefill", late=late)
        self.listen(self.world.prefill.worker.ports.channel)

    def listen(self, channel) -> None:
        send = channel.send

        def heard(to: str, data: bytes) -> bool:
            for message in decode_frame(data).messages:
                if isinstance(message, Grant):
                    self.granted.setdefault(message.key, set()).add(message.nonce)
                elif isinstance(message, CancelAck) and message.nonce is not None:
                    self.ended.add(message.nonce)
                elif isinstance(message, Status) and message.kind is StatusKind.DONE:
                    assert message.nonce is not None
                    self.ended.add(message.nonce)
            return bool(send(to, data))

        vars(channel)["send"] = heard

    def check(self, key: RoomKey) -> None:
        writing = {action.sender for action in self.world.fabric.pending()}
        for nonce in self.granted.get(key, set()) - self.ended:
            is_fenced = nonce.incarnation in self.dead and nonce.incarnation not in writing
            assert is_fenced, f"{key} gave its pages back while {nonce} may write"
        self.num_released += 1


def aborts_on_a_bad_network(world: World, seed: int, restarts: int = 0) -> Witness:
    witness = Witness(world)
    rng = random.Random(seed)
    keys = []
    moments = rng.sample(range(5, 40), restarts)
    for i in range(40):
        if i in moments:
            witness.restart_prefill(late=rng.random() < 0.7)
        me = world.prefill.worker.core.setup.me.incarnation
        world.fabric.faults(me).late_landing = rng.random() < 0.7
        keys.append(world.submit([rng.randrange(3, 900)] * rng.randrange(1, 14), sampling=FIVE))
        for _ in range(rng.randrange(8)):
            world.step()
            world.clock.advance(0.01)
            if world.fabric.pending() and rng.random() < 0.6:
                world.fabric.step(rng.randrange(8))
        if rng.random() < 0.7:
            world.abort(rng.choice(keys[-8:]), at=rng.choice(["prefill", "decode"]))
    check_whole(world)
    return witness


LIMITS = CoreLimits(prefill_chunk_tokens=8, num_metadata_slots=8)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("restarts", [0, 3])
def test_pages_come_back_only_after_every_writers_own_word(seed: int, restarts: int) -> None:
    """SGLang PR38961: for every release, on a network that loses, doubles and reorders, with
    writes that go on after their cancel and after the death of their process: each nonce that
    was granted has been acknowledged or reported Done by the process that held it, or that
    process is dead and nothing of it can land any more."""
    faults = FaultPlan(drop=0.2, duplicate=0.2, reorder=0.3, max_delay_s=0.05)
    world = make_world(num_blocks=40, stepped=True, limits=LIMITS, faults=faults, seed=seed)
    witness = aborts_on_a_bad_network(world, seed, restarts)
    assert witness.num_released >= 10
    assert sum(map(len, witness.granted.values())) >= 10
    check_serves(world)


def test_a_decode_that_releases_with_its_answer_is_caught() -> None:
    """SGLang PR38961: whoever waits for the acknowledgement is cleared with the request."""
    world = make_world(num_blocks=40, stepped=True, limits=LIMITS)
    rooms = world.decode.worker.core.rooms
    quarantine = rooms.quarantine

    def hasty(record) -> None:
        quarantine(record)
        rooms.release(record)

    vars(rooms)["quarantine"] = hasty
    with pytest.raises(AssertionError, match="gave its pages back"):
        aborts_on_a_bad_network(world, 1)
