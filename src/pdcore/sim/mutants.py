"""Known-bad variants of the product: each undoes one rule, and the proofs must notice.

A proof proves little until it has been seen to find something. ``pdcore verify`` runs these
by name; :func:`planted` puts one into this process for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, TypeVar

import attrs
import msgspec

from pdcore.control.messages import Cancel, CancelAck, StatusKind
from pdcore.errors import ConfigError, failure
from pdcore.fsm.effects import ConnectPeer, Effect, PostTransfer, SendMessage
from pdcore.fsm.events import MessageReceived
from pdcore.fsm.legs import CancelFrom, SenderFacts
from pdcore.fsm.rank import Rank
from pdcore.fsm.receiver import Receiver
from pdcore.fsm.sender import Sender
from pdcore.fsm.states import ReceiverState, SenderState
from pdcore.fsm.targets import ClaimFrom, ReceiverFacts, StatusFrom, Target
from pdcore.scheduler.decode_record import DecodeRecord
from pdcore.scheduler.decode_rooms import DecodeInbox, DecodeRooms
from pdcore.scheduler.lockstep import Voting
from pdcore.scheduler.prefill_rooms import PrefillInbox
from pdcore.scheduler.queues import Tombstone
from pdcore.types import UNKNOWN_INCARNATION, Nonce, PeerRef

Inbox = TypeVar("Inbox", PrefillInbox, DecodeInbox)

#: A replaced attribute: of which class, by what name, and what stands there instead.
Patch = tuple[type, str, object]


@attrs.frozen
class Mutant:
    """``undoes`` names the rule. No patches: the world that plants it does so itself."""

    name: str
    undoes: str
    patches: tuple[Patch, ...] = ()


# --- what they do ---------------------------------------------------------------------


def _release_at_once(rooms: DecodeRooms, record: DecodeRecord) -> None:
    rooms.release(record)


def _any_is_done(receiver: ReceiverFacts) -> bool:
    return receiver.failure is None and any(
        target.record is not None for target in receiver.targets.values()
    )


def _for_whoever_lives_here(
    receive: Callable[[PrefillInbox, MessageReceived, float], None],
) -> Callable[[PrefillInbox, MessageReceived, float], None]:
    """A cancel is answered by whoever lives at its address now."""

    def received(inbox: PrefillInbox, event: MessageReceived, now: float) -> None:
        if isinstance(event.message, Cancel):
            event = msgspec.structs.replace(event, to_incarnation=UNKNOWN_INCARNATION)
        receive(inbox, event, now)

    return received


def _acknowledge_everything(inbox: PrefillInbox, payload: CancelFrom, now: float) -> None:
    message = payload.message  # every nonce that is named, unless it is at work here
    record = inbox.rooms.records.get(message.key)
    held = set() if record is None else {leg.nonce for leg in record.sender.legs.values()}
    if record is not None:
        inbox.rooms.emit(record, record.sender.cancel_received(payload), now)
    nonces: list[Nonce | None] = [n for n in message.nonces if n not in held]
    for nonce in nonces or ([None] if record is None else []):
        ack = CancelAck(message.key, message.lease, nonce)
        inbox.rooms.out.append(SendMessage(payload.peer, ack))


def _address_only(
    receive: Callable[[Inbox, MessageReceived, float], None],
) -> Callable[[Inbox, MessageReceived, float], None]:
    def received(inbox: Inbox, event: MessageReceived, now: float) -> None:
        receive(inbox, msgspec.structs.replace(event, to_incarnation=UNKNOWN_INCARNATION), now)

    return received


def _grant_to_any_life(receiver: ReceiverFacts, payload: ClaimFrom) -> bool:
    target = receiver.targets.get(payload.peer.rank)
    return (
        target is not None
        and receiver.failure is None
        and payload.message.lease.counter == receiver.lease.counter
        and target.nonce in (None, payload.message.nonce)
    )


def _is_its_rank(receiver: ReceiverFacts, peer: PeerRef) -> bool:
    return peer.rank in receiver.targets


def _claim_nothing(sender: Sender, payload: None) -> Sequence[Effect]:
    """The handshake is the permission: no claim, no grant."""
    out: list[Effect] = []
    for leg in sender.legs.values():
        leg.granted = True
        out.append(ConnectPeer(leg.peer, leg.handshake.endpoint))
    return out


def _least_state(vote: Callable[[ReceiverFacts], int]) -> Callable[[ReceiverFacts], int]:
    """Failed is the lowest state: one rank that is quiet makes all of them free at once."""

    def voted(receiver: ReceiverFacts) -> int:
        own = vote(receiver)
        return 2 - own if receiver.state is ReceiverState.DRAINING else own  # quiet is least

    return voted


def _all_have_answered(receiver: ReceiverFacts) -> bool:
    return all(target.over or target.cancel_answered for target in receiver.targets.values())


def _done_without_grant(receiver: ReceiverFacts, payload: StatusFrom) -> bool:
    target = receiver.targets.get(payload.peer.rank)
    return (
        target is not None
        and payload.message.kind is StatusKind.DONE
        and payload.message.lease == receiver.lease
    )


def _leave_a_tombstone(
    cancel: Callable[[PrefillInbox, CancelFrom, float], None],
) -> Callable[[PrefillInbox, CancelFrom, float], None]:
    """A cancel that overtakes its request is remembered, as long as there is room."""

    def cancelled(inbox: PrefillInbox, payload: CancelFrom, now: float) -> None:
        key = payload.message.key
        if key not in inbox.rooms.records:
            gone = failure("cancelled", "cancelled before it came")
            inbox.rooms.tombstones.put(key, Tombstone(gone), now)
        cancel(inbox, payload, now)

    return cancelled


def _grant_without_lease(receiver: ReceiverFacts, payload: ClaimFrom) -> bool:
    target = receiver.targets.get(payload.peer.rank)
    return (
        target is not None
        and receiver.failure is None
        and target.peer.incarnation == payload.peer.incarnation
        and target.nonce in (None, payload.message.nonce)
    )


def _grant_again(receiver: ReceiverFacts, payload: ClaimFrom) -> bool:
    """One *live* claim at a time: a place that is free again is given again."""
    target = receiver.targets.get(payload.peer.rank)
    return (
        target is not None
        and receiver.failure is None
        and payload.message.lease == receiver.lease
        and target.peer.incarnation == payload.peer.incarnation
        and (target.over or target.nonce in (None, payload.message.nonce))
    )


def _acknowledge_between_chunks(sender: Sender, payload: CancelFrom) -> Sequence[Effect]:
    """Nothing is being written at this moment, so say so, and go on."""
    leg = sender.legs.get(payload.peer.rank)
    if leg is None or leg.lease != payload.message.lease:
        return sender._ack_unheld(payload)
    leg.cancelled = True
    return sender._acks_due()


def _news_ends_the_claim(receiver: Receiver, payload: StatusFrom) -> Sequence[Effect]:
    target = receiver.targets[payload.peer.rank]
    if payload.message.kind is StatusKind.QUEUED:
        return ()
    target.answered = target.over = True
    receiver.failure = (
        receiver.failure or payload.message.failure or failure("prefill_failed", "no reason")
    )
    return receiver.acknowledge(payload)


def _post_after_failure(sender: Sender, payload: object) -> Sequence[Effect]:
    """Until the tick that drains it, Transferring is Transferring."""
    out: list[Effect] = []
    for leg in sender.legs.values():
        if leg.granted and leg.posted_tokens < sender.ready_tokens:
            handle = next(sender.ids)
            start, leg.posted_tokens = leg.posted_tokens, sender.ready_tokens
            leg.live.add(handle)
            count = sender.ready_tokens - start
            out.append(PostTransfer(handle, sender.key, leg.peer, leg.lease, start, count))
    return out


def _done_when_posted(sender: SenderFacts) -> bool:
    token = sender.first_token
    return (
        token is not None
        and sender.failure is None
        and all(leg.posted_tokens >= token.num_tokens for leg in sender.legs.values())
    )


def _compute_does_not_count(sender: SenderFacts) -> bool:
    return not any(leg.live for leg in sender.legs.values())


def _deaf_when_done(
    record_cancel: Callable[[Sender, CancelFrom], Sequence[Effect]],
) -> Callable[[Sender, CancelFrom], Sequence[Effect]]:
    def recorded(sender: Sender, payload: CancelFrom) -> Sequence[Effect]:
        return () if sender.state is SenderState.DONE else record_cancel(sender, payload)

    return recorded


def _never_done_while_draining(
    is_done: Callable[[Receiver, StatusFrom], bool],
) -> Callable[[Receiver, StatusFrom], bool]:
    def asked(receiver: Receiver, payload: StatusFrom) -> bool:
        return receiver.failure is None and is_done(receiver, payload)

    return asked


# --- the list -------------------------------------------------------------------------

_MUTANTS: Final = (
    Mutant(
        "free-on-abort",
        "Draining: decode's blocks go back when the request ends, not when its writers do (D3)",
        ((DecodeRooms, "quarantine", _release_at_once),),
    ),
    Mutant(
        "max-merged-status",
        "rule 3, section 9: the furthest rank's word counts for all of them (D2)",
        (
            (ReceiverFacts, "is_locally_done", property(_any_is_done)),
            (Voting, "merge", lambda voting, vectors: tuple(map(max, *vectors))),
        ),
    ),
    Mutant(
        "no-incarnation",
        "section 2: whoever lives at an address answers for whoever lived there (D32)",
        (
            (PrefillInbox, "receive", _address_only(PrefillInbox.receive)),
            (PrefillInbox, "_cancel", _acknowledge_everything),
            (ReceiverFacts, "_is_target", _is_its_rank),
            (DecodeInbox, "receive", _address_only(DecodeInbox.receive)),
            (ReceiverFacts, "may_grant", _grant_to_any_life),
        ),
    ),
    Mutant(
        "no-claim-tombstones",
        "the claim: a handshake permits writing, cancels are remembered in an evictable table",
        (
            (Sender, "send_claims", _claim_nothing),
            (ReceiverFacts, "are_writers_over", property(_all_have_answered)),
            (ReceiverFacts, "is_done_of_grant", _done_without_grant),
            (PrefillInbox, "_cancel", _leave_a_tombstone(PrefillInbox._cancel)),
        ),
    ),
    Mutant(
        "claim-without-lease",
        "rule 1: a claim names no lease, so one for a former receiver's blocks is granted",
        ((ReceiverFacts, "may_grant", _grant_without_lease),),
    ),
    Mutant(
        "one-live-claim",
        "rule 1: a rank is granted a second nonce when its first has ended",
        ((ReceiverFacts, "may_grant", _grant_again),),
    ),
    Mutant(
        "ack-between-chunks",
        "rule 9: a cancel is acknowledged while nothing is in flight, and sending goes on",
        ((Sender, "record_cancel", _acknowledge_between_chunks),),
    ),
    Mutant(
        "restart-acks-for-predecessor",
        "rule 2: a process acknowledges nonces of the process that was here before it",
        (
            (PrefillInbox, "receive", _for_whoever_lives_here(PrefillInbox.receive)),
            (PrefillInbox, "_cancel", _acknowledge_everything),
            (ReceiverFacts, "_is_target", _is_its_rank),
        ),
    ),
    Mutant(
        "failed-is-ack",
        "rule 3: an early Failed ends the claim",
        ((Receiver, "record_news", _news_ends_the_claim),),
    ),
    Mutant(
        "no-poison",
        "rule 9: who failed locally goes on posting until the tick",
        ((Sender, "post_ready", _post_after_failure),),
    ),
    Mutant(
        "done-when-posted",
        "rule 9: Done is told when everything is posted, not when it has quiesced",
        ((SenderFacts, "is_locally_done", property(_done_when_posted)),),
    ),
    Mutant(
        "free-while-computing",
        "section 3: a forward pass does not count like a handle (D4)",
        ((SenderFacts, "is_quiet", property(_compute_does_not_count)),),
    ),
    Mutant(
        "deaf",
        "rule 3: Done is not heard while draining, and who is Done answers no cancel",
        (
            (Sender, "record_cancel", _deaf_when_done(Sender.record_cancel)),
            (
                ReceiverFacts,
                "is_done_of_grant",
                _never_done_while_draining(ReceiverFacts.is_done_of_grant),
            ),
        ),
    ),
    Mutant(
        "send-once",
        "rule 4: nothing is sent again (D26)",
        (
            (Sender, "unanswered", lambda sender: []),
            (Receiver, "unanswered", lambda receiver: []),
        ),
    ),
    Mutant(
        "min-over-states",
        "section 9: a group reduces lifecycle states, not votes",
        ((ReceiverFacts, "vote", _least_state(ReceiverFacts.vote)),),
    ),
    Mutant(
        "short-period",
        "decision 25: a death is taken for the writer's own word (D3)",
        ((Target, "died", property(lambda target: False, lambda target, died: None)),),
    ),
    Mutant(
        "replaced-comes-back",
        "section 2: an old registration undoes a restart (D32)",
        ((Rank, "is_not_replaced", lambda rank, payload: True),),
    ),
    *(
        Mutant(name, undoes)
        for name, undoes in (
            ("no-release-vote", "section 9: Draining is left without asking every rank"),
            ("unknown-is-failure", "section 10: a broken connection to prefill fails it"),
            ("any-attempt", "section 10: outcomes of a replaced attempt count"),
            ("no-retry-cancels", "section 10: a lost attempt is not cancelled"),
            ("silence-kills", "section 3: a silent peer is declared dead (D3)"),
            ("ready-too-early", "one ready worker makes an instance ready (D33)"),
            ("lost-in-silence", "a dead worker's requests are not failed (D45)"),
        )
    ),
)

MUTANTS: Final[dict[str, Mutant]] = {mutant.name: mutant for mutant in _MUTANTS}


def find_mutant(name: str) -> Mutant:
    """Raises ConfigError with the names there are."""
    mutant = MUTANTS.get(name)
    if mutant is None:
        raise ConfigError(f"no mutant {name!r}; there are: {', '.join(MUTANTS)}")
    return mutant


@contextmanager
def planted(name: str) -> Iterator[None]:
    """The product with this mutant in it, until the block ends; "" plants nothing."""
    patches = find_mutant(name).patches if name else ()
    #: Where it was inherited, it is inherited again.
    former = [(cls, attribute, vars(cls).get(attribute)) for cls, attribute, _ in patches]
    for cls, attribute, value in patches:
        setattr(cls, attribute, value)
    try:
        yield
    finally:
        for cls, attribute, value in former:
            if value is None:
                delattr(cls, attribute)
            else:
                setattr(cls, attribute, value)
