"""One process life of a prefill rank: see :mod:`pdcore.sim.actors`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from pdcore.fsm.effects import Effect, PostTransfer
from pdcore.fsm.events import Event, HandleEnded, RequestRefused, StepCompleted
from pdcore.fsm.sender import Sender
from pdcore.fsm.states import SenderState
from pdcore.scheduler.prefill import PrefillCore
from pdcore.scheduler.prefill_rooms import PrefillRecord
from pdcore.sim.actors import (
    NOW,
    WHY,
    Actor,
    ActorEvent,
    Offer,
    Write,
    common_key,
    entity_number,
    make_blocks,
)
from pdcore.sim.places import TOKEN, Place, Shape, life_of, setup_of
from pdcore.types import Batch, LeaseId, StepOutput


class PrefillActor(Actor):
    """Events beyond the common ones: ``submit``, ``refuse`` (the shell did not take the
    request), ``compute`` and ``computed`` (a forward pass begins and ends), ``ended`` (what
    the transport says of a handle), ``unpark``."""

    __slots__ = ("_core", "batch", "landed", "posted", "unsure", "writes")

    def __init__(self, place: Place, life: int, shape: Shape) -> None:
        super().__init__(place, life, shape)
        self._core = PrefillCore(setup_of(place, life, shape), make_blocks(place, life, shape))
        self.batch: Batch | None = None
        #: Handles the transport still works on.
        self.writes: dict[int, Write] = {}
        #: Of these, the ones reported failed while bytes may still land.
        self.unsure: set[int] = set()
        #: Tokens of each handle, and those that have landed, by lease.
        self.posted: dict[int, tuple[LeaseId, int]] = {}
        self.landed: dict[LeaseId, int] = {}

    @property
    def core(self) -> PrefillCore:
        return self._core

    @property
    def holds_nothing(self) -> bool:
        return not self.writes and self.batch is None

    def _apply(self, event: ActorEvent) -> None:
        core = self._core
        match event:
            case ("submit", int() as index):
                core._ids = itertools.count(entity_number(index, self.created[index]) + 1)
                self._submit(index)
            case ("refuse", int() as index):
                core.handle_event(RequestRefused(self._key(index), WHY), NOW)
            case ("compute",):
                core._ids = itertools.count(1)  # only the batch takes its number from here
                self.batch = core.schedule(NOW)
            case ("computed", bool() as is_good):
                batch, self.batch = self.batch, None
                assert batch is not None
                output = StepOutput([[TOKEN] if sample else None for sample in batch.sample])
                done = StepCompleted(batch.batch_id, output if is_good else None)
                core.handle_event(done, NOW)
            case ("ended", int() as handle, str() as how):
                self._end(handle, how)
            case ("unpark", int() as index):
                core.inbox.parked.pop(self._key(index), NOW)
            case _:
                super()._apply(event)

    def exposed(self) -> Iterator[str]:
        """A write reads its source blocks, a forward pass fills them (D4)."""
        core = self._core
        for handle in self.writes:
            record = core.rooms.records.get(core.rooms._handles[handle])
            if record is None or record.seq.seq_id not in core.blocks:
                yield f"{self.place.name}: write {handle} reads blocks that are back in the pool"
        for record in core.rooms.records.values():
            if record.sender.state is SenderState.DONE:
                yield from self._unwritten(record.sender)
        for seq_id in self.batch.seq_ids if self.batch is not None else ():
            if seq_id not in core.blocks:
                yield f"{self.place.name}: a forward pass fills blocks that are back in the pool"

    def _unwritten(self, sender: Sender) -> Iterator[str]:
        """Done means that every token of every leg has landed (rule 9)."""
        for leg in sender.legs.values():
            count, wanted = self.landed.get(leg.lease, 0), self.shape.num_tokens
            if count != wanted:
                name = f"{self.place.name}: lease {leg.lease.counter}"
                yield f"{name} is Done with {count} of {wanted} tokens written"

    def _end(self, handle: int, how: str) -> None:
        """``done``; ``failed`` with nothing of it left; ``gone`` the same, because its
        target is; ``unsure``: failed, may still land."""
        is_quiet = how != "unsure"
        if is_quiet:
            del self.writes[handle]
            self.unsure.discard(handle)
        else:
            self.unsure.add(handle)
        lease, num_tokens = self.posted[handle]
        if how == "done":
            self.landed[lease] = self.landed.get(lease, 0) + num_tokens
        why = None if how == "done" else WHY
        self._core.handle_event(HandleEnded(handle, is_quiet, why), NOW)

    def _carry_out(self, effect: Effect) -> Iterator[Event]:
        """Cutting a session, cancelling: its handles end, which they may at any moment."""
        if isinstance(effect, PostTransfer):
            lease = effect.lease
            self.posted[effect.handle] = (lease, effect.num_tokens)
            self.writes[effect.handle] = Write(
                self.me.incarnation, lease.incarnation, lease.counter
            )
        yield from ()

    def offers(self) -> Iterator[Offer]:
        yield from super().offers()
        core = self._core
        for index, dispatch in enumerate(self.shape.dispatches):
            name = f"request {dispatch.key.room}.{dispatch.key.attempt}"
            if self.created[index] == 0 and core.rooms.tombstones.get(dispatch.key, NOW) is None:
                needs = ("dispatch", index)
                yield Offer(("refuse", index), f"{name} is refused", True, needs)
            if core.inbox.parked.get(dispatch.key, NOW) and self.shape.num_entities > 1:
                yield Offer(("unpark", index), f"what is parked for {name} is evicted", True)
        if self.batch is not None:
            yield Offer(("computed", True), "a forward pass ends", False)
            yield Offer(("computed", False), "a forward pass fails", True)
        elif core.waiting:
            yield Offer(("compute",), "a forward pass begins", False)
        for handle, write in self.writes.items():
            yield from self._endings(handle, write)

    def _endings(self, handle: int, write: Write) -> Iterator[Offer]:
        """A write to a process that lives may be done; whatever happens, it ends."""
        name = f"write {handle} to {life_of(write.target)}"
        target = write.target
        if handle not in self.unsure:
            yield Offer(("ended", handle, "done"), f"{name} is done", False, ("lives", target))
            yield Offer(("ended", handle, "failed"), f"{name} fails", True)
            yield Offer(("ended", handle, "unsure"), f"{name} fails, not quiesced", True)
        else:
            yield Offer(("ended", handle, "failed"), f"{name} quiesces", False)
        yield Offer(
            ("ended", handle, "gone"), f"{name} ends with its target", False, ("over", target)
        )

    def key(self) -> tuple[object, ...]:
        core = self._core
        records = tuple(self._record_key(record) for record in core.rooms.records.values())
        parked = tuple(
            tuple((type(h).__name__, h.peer.incarnation, h.message.lease.counter) for h in found)
            for found in (core.inbox.parked.get(d.key, NOW) or () for d in self.shape.dispatches)
        )
        batch = None if core._batch is None else tuple(c.seq.seq_id for c in core._batch[1])
        return (
            common_key(self),
            records,
            parked,
            tuple(core.waiting),
            batch,
            tuple(self.writes.items()),
            tuple(sorted(self.unsure)),
            self._landed_key(),
        )

    def _landed_key(self) -> tuple[int, ...]:
        """Only of who may still be Done: everything else is news to nobody."""
        senders = [record.sender for record in self._core.rooms.records.values()]
        return tuple(
            self.landed.get(leg.lease, 0)
            for sender in senders
            if sender.failure is None
            for leg in sender.legs.values()
        )

    def _record_key(self, record: PrefillRecord) -> tuple[object, ...]:
        seq = record.seq
        return (
            record.key,
            _sender_key(record.sender),
            record.is_reported,
            record.is_stuck,
            seq.num_computed_tokens,
            seq.is_prefill_done,
            seq.seq_id in self._core.blocks,
        )


def _sender_key(sender: Sender) -> tuple[object, ...]:
    legs = tuple(
        (
            rank,
            leg.peer.incarnation,
            leg.lease.counter,
            leg.nonce.counter,
            leg.granted,
            tuple(sorted(leg.live)),
            leg.posted_tokens,
            leg.told,
            leg.acked,
            leg.cancelled,
        )
        for rank, leg in sender.legs.items()
    )
    return (
        sender.state.value,
        sender.failure is not None,
        legs,
        sender.num_required,
        sender.ready_tokens,
        sender.first_token is not None,
        sender.is_computing,
    )
