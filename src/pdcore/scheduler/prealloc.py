"""The preallocation queue of decode: rooms without a route, and rooms without blocks (R69).

``pending`` rooms wait for the route of their prefill instance, fetched once per address for
all of them; ``waiting`` rooms are mapped and wait for blocks and a metadata slot. Nobody
who does not fit blocks those behind (no head-of-line blocking).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence

from pdcore.errors import failure
from pdcore.fsm.effects import FetchTopology
from pdcore.fsm.events import TopologyFetched
from pdcore.scheduler.admission import AdmissionLine
from pdcore.scheduler.decode_record import DecodeRecord
from pdcore.scheduler.decode_rooms import DecodeRooms
from pdcore.scheduler.topologies import TopologyEntry
from pdcore.types import Failure, PeerRef, RoomKey


class Preallocation:
    """See the module."""

    def __init__(self, rooms: DecodeRooms) -> None:
        self.rooms = rooms
        self.limits = rooms.limits
        self.topologies = rooms.topologies
        #: bootstrap address -> rooms that wait for its route.
        self.pending: dict[str, dict[RoomKey, None]] = {}
        #: Mapped, in order of arrival.
        self.waiting: OrderedDict[RoomKey, DecodeRecord] = OrderedDict()
        self.line: AdmissionLine[RoomKey] = AdmissionLine()
        self._offered: tuple[int, ...] = ()
        #: Offered last: only their votes change, however many wait.
        self._chosen: set[RoomKey] = set()

    def add(self, record: DecodeRecord, now: float) -> None:
        """Only the newcomer is looked at: those who wait for the same route go on waiting
        for it, and a burst of requests must not cost its square."""
        bootstrap = record.request.bootstrap
        entry = self.topologies.lookup(bootstrap, now)
        if not self._map(record, entry, now):
            self.pending.setdefault(bootstrap, {})[record.key] = None
        self._fetch(bootstrap, entry, now)

    def record(self, event: TopologyFetched, now: float) -> None:
        self.topologies.record(event.bootstrap, event.route, event.failure, now)
        self.resolve(event.bootstrap, now)

    def resolve(self, bootstrap: str, now: float) -> None:
        """Move pending rooms of this address on, as far as its route is known."""
        pending = self.pending.get(bootstrap)
        if not pending:
            self.pending.pop(bootstrap, None)
            return
        entry = self.topologies.lookup(bootstrap, now)
        for key in list(pending):
            record = self.rooms.records.get(key)
            if record is None or self._map(record, entry, now):
                del pending[key]
        if not pending:
            del self.pending[bootstrap]
        self._fetch(bootstrap, entry, now)

    def _fetch(self, bootstrap: str, entry: TopologyEntry, now: float) -> None:
        """Ask for the route where it is wanted: now, or when its interval is over."""
        if self.topologies.needs_fetch(bootstrap, now):
            # An old route is used meanwhile: the lifecycles notice if it is wrong.
            self.rooms.out.append(FetchTopology(bootstrap))
        elif self.pending.get(bootstrap) and not entry.is_fetching:
            self.rooms.timers.arm("topology", bootstrap, now + self.limits.topology_retry_s)

    def _map(self, record: DecodeRecord, entry: TopologyEntry, now: float) -> bool:
        """True when this room no longer waits for the route."""
        receiver, request = record.receiver, record.request
        reason = receiver.failure or entry.refusal
        if reason is None and entry.route is None:
            if now - record.accepted_s < self.limits.topology_ttl_s:
                return False
            reason = entry.problem or failure("unreachable", "the prefill route did not come")
        elif reason is None and entry.route is not None:
            targets = self.topologies.targets_of(
                entry, entry.route, request.key.room, request.prefill_dp_rank
            )
            if request.prefill and entry.route.instance != request.prefill:
                reason = failure(
                    "incompatible",
                    f"{request.bootstrap} serves {entry.route.instance}, the request names "
                    f"{request.prefill}",
                )
            elif isinstance(targets, Failure):
                reason = targets
            else:
                peers, record.num_required = targets
                record.verification.route = entry.route
                reason = self._may_use(record, peers, now)
                if reason is None:
                    record.mark("mapped", now)
                    self.rooms.emit(record, receiver.topology_mapped(peers), now)
                    return True
        if reason is not None:
            self.rooms.emit(record, receiver.failed_locally(reason), now)
        return True

    def _may_use(
        self, record: DecodeRecord, peers: Sequence[PeerRef], now: float
    ) -> Failure | None:
        """A peer that is silent, failing or stuck gets no handshake (D25, rule 6): the
        request fails at once, while another pair may still serve it."""
        key = record.key
        for peer in peers:
            why = self.rooms.why_no_work(peer, key, now)
            if why is not None:
                return why
        for peer in peers:
            self.rooms.breakers.begin(peer.incarnation, key, now)
        return None

    def enter(self, record: DecodeRecord) -> None:
        """Mapped: join the end of the admission line."""
        self.waiting[record.key] = record
        seq = record.seq
        self.line.add(record.key, self.rooms.blocks.need(seq.seq_id, seq.num_prompt_tokens, 1))

    def leave(self, key: RoomKey) -> None:
        """Admitted, failed or gone; idempotent."""
        self.waiting.pop(key, None)
        self.line.discard(key)

    def may_offer(self, num_owed: int, num_unseated: int = 0) -> bool:
        """Somebody waits, there is a place, and what the budget depends on has changed since
        the last offer. Without a place only an offer that was not taken up is withdrawn."""
        if not self.waiting or not (self._chosen or self.rooms.slots.available > num_unseated):
            return False
        return self._offered != self._budgeted(num_owed)

    def offer(self, owed: Collection[Mapping[str, int]], num_unseated: int = 0) -> None:
        """Vote for who fits now: the earlier first, nobody blocking those behind. ``owed``
        is kept for retracted sequences, which come before newcomers. ``num_unseated``
        sequences have their KV and wait for a place in the batch: each takes the place of a
        newcomer, so that holders stay bounded by max_running + num_metadata_slots (D49)."""
        if not self.waiting:
            return
        self._offered = self._budgeted(len(owed))
        budget = self.rooms.blocks.budget(self.limits.num_reserved_decode_tokens)
        for need in owed:
            budget.earmark(need)
        chosen = set(self.line.offer(budget, self.rooms.slots.available - num_unseated))
        for key in self._chosen - chosen:
            # Those still waiting: who was admitted has left.
            if key in self.waiting:
                self.waiting[key].receiver.wants_admission = False
        for key in chosen:
            self.waiting[key].receiver.wants_admission = True
            self.rooms.touch(key)
        self._chosen = chosen

    def _budgeted(self, num_owed: int) -> tuple[int, ...]:
        """Quarantine takes a holder, and with it its head-room, away without freeing a
        block; an aborted sequence that was to come back is owed nothing any more."""
        blocks, slots = self.rooms.blocks, self.rooms.slots
        counts = (len(self.waiting), num_owed, slots.available, blocks.num_holders)
        return (*counts, *blocks.num_free.values())
