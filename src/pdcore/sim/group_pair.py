"""One decode rank, its prefill rank and the wire between them: half of a group world.

Both entities are the production ones. The wire is a monotone set: a message that was sent
once may arrive at any time, any number of times, in any order, or never; so it loses,
repeats, delays and reorders, and resending needs no move of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Final, NamedTuple

from pdcore.control.messages import (
    Cancel,
    CancelAck,
    Claim,
    Grant,
    Handshake,
    PeerMessage,
    Refuse,
    Status,
    StatusAck,
    StatusKind,
)
from pdcore.errors import failure
from pdcore.fsm.commit import commit_receiver, commit_sender
from pdcore.fsm.effects import Effect, SendMessage
from pdcore.fsm.events import HandleEnded
from pdcore.fsm.legs import CancelFrom, FirstToken, HandshakeFrom, KvReady
from pdcore.fsm.receiver import RECEIVER, Receiver
from pdcore.fsm.sender import SENDER, Sender
from pdcore.fsm.states import ReceiverState, SenderState
from pdcore.fsm.targets import Admission, CancelAckFrom, ClaimFrom, StatusFrom
from pdcore.sim.firing import row_id, row_taken
from pdcore.sim.interned import Ids, Interned, Stepped
from pdcore.types import Failure, Incarnation, LeaseId, PeerRef, RoomKey

KEY: Final = RoomKey(1, 1)
NUM_TOKENS: Final = 4
IDS_HASH: Final = 5
DECODE: Final = PeerRef("decode:1", 0, Incarnation(b"d" * 16), "tcp://decode:1")
PREFILL: Final = PeerRef("prefill:1", 0, Incarnation(b"p" * 16), "tcp://prefill:1")
LEASE: Final = LeaseId(DECODE.incarnation, 1)
TOKEN: Final = FirstToken(9, None, NUM_TOKENS, IDS_HASH)
ABORT: Final[Failure] = failure("cancelled", "aborted")
LATE: Final[Failure] = failure("deadline_exceeded", "late")
BROKEN: Final[Failure] = failure("transfer_failed", "broken")
ADMISSION: Final = Admission(
    Handshake(KEY, LEASE, b"", {}, 0, NUM_TOKENS, IDS_HASH, 1, 0.0, 1.0), {}
)

#: Bits of a pair's net that are no messages: chunks whose forward pass has begun, and
#: whether all KV has landed.
STARTED: Final = (1, 2)
WRITTEN: Final = 4
_NUM_FLAGS: Final = 3
#: Everything that can be on a wire, one room, lease and nonce being all there is.
_NAMES: Final = (
    "HANDSHAKE",
    "CLAIM",
    "GRANT",
    "REFUSE",
    "STATUS DONE",
    "STATUS FAILED",
    "STATUS REJECTED",
    "STATUS DUMMY",
    "CANCEL of its nonce",
    "CANCEL without a nonce",
    "ACK of its nonce",
    "ACK without a nonce",
)
_TICK_EVENTS: Final = ("advanced", "failed", "completed", "quiesced")


class Pair(NamedTuple):
    """Numbers of the two entities, bits of the wire, and what each has going in a tick that
    is not atomic: 0 nothing, 1 + a vote cast, 10 + a result not applied yet."""

    decode: int
    prefill: int
    net: int
    decode_vote: int = 0
    prefill_vote: int = 0


class PairMove(NamedTuple):
    """``{rank}`` in the label is filled in by the world."""

    label: str
    is_fault: bool
    pair: Pair
    rows: tuple[str, ...]


def sender_key(sender: Sender) -> Hashable:
    """Without the words of a failure and without which answers came (they only decide what
    is sent again)."""
    legs = tuple(
        (
            rank,
            leg.nonce.counter,
            leg.granted,
            tuple(sorted(leg.live)),
            leg.posted_tokens,
            leg.told,
            leg.cancelled,
        )
        for rank, leg in sorted(sender.legs.items())
    )
    return (
        sender.state, sender.failure is None, sender.is_computing, sender.ready_tokens,
        sender.first_token is None, sender.num_required, legs,
    )  # fmt: skip


def receiver_key(receiver: Receiver) -> Hashable:
    targets = tuple(
        (rank, target.nonce, target.over, target.record is None)
        for rank, target in sorted(receiver.targets.items())
    )
    return (
        receiver.state, receiver.failure is None, receiver.admission is None,
        receiver.wants_admission, targets,
    )  # fmt: skip


class Wire:
    """Messages by bit, and the message that each bit stands for."""

    def __init__(self) -> None:
        self._messages: dict[int, tuple[str, PeerMessage]] = {}

    def bits(self, effects: Iterable[Effect]) -> int:
        out = 0
        for effect in effects:
            if isinstance(effect, SendMessage) and (name := name_of(effect.message)):
                bit = _NUM_FLAGS + _NAMES.index(name)
                self._messages.setdefault(bit, (name, effect.message))
                out |= 1 << bit
        return out

    def on(self, net: int) -> Iterator[tuple[str, PeerMessage]]:
        for bit in range(_NUM_FLAGS, _NUM_FLAGS + len(_NAMES)):
            if net >> bit & 1:
                yield self._messages[bit]


def name_of(message: PeerMessage) -> str:
    """ "" for what only stops a resend: an answer to a status, and "queued"."""
    match message:
        case StatusAck():
            return ""
        case Status(kind=StatusKind.QUEUED):
            return ""
        case Status():
            return f"STATUS {message.kind.name}"
        case Cancel():
            return "CANCEL of its nonce" if message.nonces else "CANCEL without a nonce"
        case CancelAck():
            return "ACK without a nonce" if message.nonce is None else "ACK of its nonce"
        case _:
            return type(message).__name__.upper()


def is_writing(sender: Sender) -> bool:
    """A write into the decode rank's blocks may land, now or later."""
    return any(leg.live for leg in sender.legs.values())


class PairRules:
    """What one pair does by itself. Sub-classes of the entities may be given: a known-bad
    variant overrides a guard or an action."""

    def __init__(
        self,
        sender: type[Sender] = Sender,
        receiver: type[Receiver] = Receiver,
        *,
        num_chunks: int = 1,
    ) -> None:
        self.num_chunks = num_chunks
        self.wire = Wire()
        self.senders: Interned[Sender] = Interned(SENDER, sender_key)
        self.receivers: Interned[Receiver] = Interned(RECEIVER, receiver_key)
        half = receiver(KEY, LEASE, NUM_TOKENS, IDS_HASH)
        half.wants_admission = True  # one request: its blocks are always there
        self.start = Pair(
            self.receivers.number(half),
            self.senders.number(sender(KEY, PREFILL.incarnation, Ids())),
            0,
        )
        self._moves: dict[Pair, tuple[PairMove, ...]] = {}
        self._places: dict[Pair, tuple[str, str, int, int, int]] = {}

    # --- local moves --------------------------------------------------------------------

    def moves(self, pair: Pair) -> tuple[PairMove, ...]:
        """Everything that happens on one side alone, or between the two; ticks are not."""
        known = self._moves.get(pair)
        if known is None:
            every = (*self._decode_moves(pair), *self._prefill_moves(pair))
            known = tuple(move for move in every if move.pair != pair)
            self._moves[pair] = known
        return known

    def _decode_moves(self, pair: Pair) -> Iterator[PairMove]:
        receiver = self.receivers.entity(pair.decode)
        if receiver.state is ReceiverState.BOOTSTRAPPING and not receiver.targets:
            yield self.decode(pair, "topology_mapped", [PREFILL], "learns the route")
        yield self.decode(pair, "failed_locally", ABORT, "is aborted", is_fault=True)
        yield self.decode(pair, "deadline_expired", LATE, "meets its deadline", is_fault=True)
        for name, message in self.wire.on(pair.net):
            payload: object
            match message:
                case Claim():
                    event, payload = "claim_received", ClaimFrom(PREFILL, message)
                case Status():
                    event, payload = "status_received", StatusFrom(PREFILL, message)
                case CancelAck():
                    event, payload = "cancel_acked", CancelAckFrom(PREFILL, message)
                case _:
                    continue
            yield self.decode(pair, event, payload, f"gets {name}")

    def _prefill_moves(self, pair: Pair) -> Iterator[PairMove]:
        sender = self.senders.entity(pair.prefill)
        # A handshake may never come (decode failed before it sent one): then this timer is
        # what is sure (rule 8). In later states nothing may have to wait for it.
        is_late = sender.state is not SenderState.BOOTSTRAPPING
        yield self.prefill(pair, "failed_locally", ABORT, "is aborted", is_fault=True)
        yield self.prefill(pair, "deadline_expired", LATE, "meets its deadline", is_fault=is_late)
        if sender.is_computing:
            is_last = bool(pair.net & STARTED[self.num_chunks - 1])
            ready = KvReady(NUM_TOKENS, TOKEN) if is_last else KvReady(NUM_TOKENS // 2)
            label = "has computed all" if is_last else "has computed a chunk"
            yield self.prefill(pair, "compute_ended", ready, label)
            broken = KvReady(0, failure=BROKEN)
            yield self.prefill(pair, "compute_ended", broken, "fails to compute", is_fault=True)
        for handle in (h for leg in sender.legs.values() for h in sorted(leg.live)):
            label = f"has written {handle}"
            written = self.prefill(pair, "handle_ended", HandleEnded(handle, True), label)
            yield written._replace(pair=self._landed(written.pair))
            for quiesced, how in ((True, "fails to write"), (False, "fails but still writes")):
                ended, label = HandleEnded(handle, quiesced, BROKEN), f"{how} {handle}"
                yield self.prefill(pair, "handle_ended", ended, label, is_fault=True)
        for name, message in self.wire.on(pair.net):
            match message:
                case Handshake():
                    event, payload = "handshake_received", HandshakeFrom(DECODE, message)
                    yield self.prefill(pair, event, payload, f"gets {name}")
                case Cancel():
                    event, cancel = "cancel_received", CancelFrom(DECODE, message)
                    yield self.prefill(pair, event, cancel, f"gets {name}")
                case Grant():
                    yield self.prefill(pair, "claim_granted", message.nonce, f"gets {name}")
                case Refuse():
                    yield self.prefill(pair, "claim_refused", message.nonce, f"gets {name}")
                case _:
                    continue

    def _landed(self, pair: Pair) -> Pair:
        legs = self.senders.entity(pair.prefill).legs.values()
        is_all = all(leg.posted_tokens == NUM_TOKENS and not leg.live for leg in legs)
        return pair._replace(net=pair.net | WRITTEN) if is_all else pair

    def decode(
        self, pair: Pair, event: str, payload: object, label: str, *, is_fault: bool = False
    ) -> PairMove:
        done = self.receivers.step(pair.decode, event, payload, (event, label))
        after = pair._replace(decode=done.number, net=pair.net | self._sent_decode(done))
        return PairMove(f"D{{rank}} {label}", is_fault, after, (done.row,) if done.row else ())

    def prefill(
        self, pair: Pair, event: str, payload: object, label: str, *, is_fault: bool = False
    ) -> PairMove:
        done = self.senders.step(pair.prefill, event, payload, (event, label))
        after = pair._replace(prefill=done.number, net=pair.net | self._sent_prefill(done))
        return PairMove(f"P{{rank}} {label}", is_fault, after, (done.row,) if done.row else ())

    # --- ticks --------------------------------------------------------------------------

    def commit_decode(self, pair: Pair, outcome: int) -> PairMove:
        """The decode rank's share of a tick: the production rule of :mod:`pdcore.fsm.commit`."""

        def commit(receiver: Receiver) -> Stepped:
            rows = {e: row_taken(RECEIVER, receiver, e) for e in _TICK_EVENTS}
            effects = commit_receiver(receiver, outcome, lambda: ADMISSION)
            found = (row for row in rows.values() if row and row.dest is receiver.state)
            row = next(found, None) if effects is not None else None
            return Stepped(0, effects or (), row_id(RECEIVER, row) if row else "")

        return self.change_decode(pair, ("tick", outcome), commit)

    def commit_prefill(self, pair: Pair, outcome: int) -> PairMove:
        def commit(sender: Sender) -> Stepped:
            rows = {e: row_taken(SENDER, sender, e) for e in _TICK_EVENTS}
            effects = commit_sender(sender, outcome)
            found = (row for row in rows.values() if row and row.dest is sender.state)
            row = next(found, None) if effects is not None else None
            return Stepped(0, effects or (), row_id(SENDER, row) if row else "")

        return self.change_prefill(pair, ("tick", outcome), commit)

    def change_decode(
        self, pair: Pair, name: Hashable, change: Callable[[Receiver], Stepped]
    ) -> PairMove:
        done = self.receivers.change(pair.decode, name, change)
        after = pair._replace(decode=done.number, net=pair.net | self._sent_decode(done))
        return PairMove("", False, after, (done.row,) if done.row else ())

    def change_prefill(
        self, pair: Pair, name: Hashable, change: Callable[[Sender], Stepped]
    ) -> PairMove:
        done = self.senders.change(pair.prefill, name, change)
        after = pair._replace(prefill=done.number, net=pair.net | self._sent_prefill(done))
        return PairMove("", False, after, (done.row,) if done.row else ())

    def _sent_decode(self, done: Stepped) -> int:
        again = self.receivers.entity(done.number).unanswered()
        return self.wire.bits((*done.effects, *again))

    def _sent_prefill(self, done: Stepped) -> int:
        return self.wire.bits((*done.effects, *self.senders.entity(done.number).unanswered()))

    def place(self, pair: Pair) -> tuple[str, str, int, int, int]:
        """Orders pairs, in every run alike."""
        known = self._places.get(pair)
        if known is None:
            names = self.receivers.name(pair.decode), self.senders.name(pair.prefill)
            known = (*names, *pair[2:])
            self._places[pair] = known
        return known

    # --- looking ------------------------------------------------------------------------

    def show(self, pair: Pair) -> str:
        wire = ", ".join(name for name, _ in self.wire.on(pair.net))
        votes = f" votes {pair.decode_vote},{pair.prefill_vote}" if any(pair[3:]) else ""
        return (
            f"{self.receivers.entity(pair.decode)!r} | {self.senders.entity(pair.prefill)!r} | "
            f"wire: {wire}{votes}"
        )
