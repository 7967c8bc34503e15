"""What both cores keep: rooms with their timers, the vote vector, bounded tables.

A *room record* is one (room, attempt) on this rank: its entity (sender or receiver), its
sequence, its deadlines. :class:`RoomBook` owns the records and the effects they emit; the
queues of a core (bootstrap, waiting, in-flight; preallocation, transfer, running) are
ordered views of them. Nothing here knows which half of a request it serves.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, NamedTuple, TypedDict, TypeVar

from pdcore.config import CoreLimits
from pdcore.errors import Overloaded, RoomInUse, failure
from pdcore.fsm.effects import Effect, ReportFinished
from pdcore.kv.cache import KVBlocks
from pdcore.scheduler.setup import CoreSetup
from pdcore.scheduler.timers import Timers
from pdcore.scheduler.votes import VoteBook, VotingEntity
from pdcore.types import Failure, FinishReason, GenerateRequest, PeerRef, RoomKey

V = TypeVar("V")


class ExpiringTable(Generic[V]):
    """Bounded and expiring: what is only remembered as a courtesy (D6). Safety never
    depends on an entry still being here."""

    __slots__ = ("_cap", "_entries", "_ttl_s", "num_evicted")

    def __init__(self, cap: int, ttl_s: float) -> None:
        self._cap = cap
        self._ttl_s = ttl_s
        self._entries: OrderedDict[object, tuple[float, V]] = OrderedDict()
        self.num_evicted = 0

    def put(self, key: object, value: V, now: float) -> None:
        self._entries.pop(key, None)
        self._entries[key] = (now + self._ttl_s, value)
        self._sweep(now)
        while len(self._entries) > self._cap:
            self._entries.popitem(last=False)
            self.num_evicted += 1

    def get(self, key: object, now: float) -> V | None:
        entry = self._entries.get(key)
        return entry[1] if entry is not None and entry[0] > now else None

    def pop(self, key: object, now: float) -> V | None:
        value = self.get(key, now)
        self._entries.pop(key, None)
        return value

    def _sweep(self, now: float) -> None:
        # One TTL for all: the oldest entry expires first.
        while self._entries:
            key, (expires_s, _) = next(iter(self._entries.items()))
            if expires_s > now:
                return
            del self._entries[key]
            self.num_evicted += 1

    def __len__(self) -> int:
        return len(self._entries)


class RoomRecord:
    """Common half of a prefill and a decode record."""

    __slots__ = (
        "accepted_s",
        "backoff_s",
        "deadline_s",
        "is_reported",
        "is_stuck",
        "key",
        "request",
        "timeline",
    )

    def __init__(self, request: GenerateRequest, now: float) -> None:
        self.request = request
        self.key: RoomKey = request.key
        self.accepted_s = now
        self.deadline_s = now + request.remaining_s
        self.backoff_s = 0.0
        self.is_reported = False
        #: Draining for longer than ``drain_timeout_s``: somebody does not acknowledge.
        self.is_stuck = False
        #: Seconds since acceptance of named points.
        self.timeline: dict[str, float] = {}

    @property
    def entity(self) -> VotingEntity:
        raise TypeError("a room record has an entity: use a subclass")

    @property
    def is_over(self) -> bool:
        """Has its result, and nothing of it can touch blocks any more."""
        raise TypeError("a room record has an end: use a subclass")

    @property
    def is_settled(self) -> bool:
        """Its lifecycle is over, by a tick: it votes no more, and only lingers."""
        raise TypeError("a room record has a lifecycle: use a subclass")

    @property
    def is_draining(self) -> bool:
        """Answered, and somebody may still touch its blocks."""
        raise TypeError("a room record may drain: use a subclass")

    @property
    def seq_id(self) -> int:
        """Under which its blocks are kept."""
        raise TypeError("a room record has a sequence: use a subclass")

    def peers(self) -> list[PeerRef]:
        """The ranks at the other end."""
        raise TypeError("a room record has peers: use a subclass")

    def awaited(self) -> list[PeerRef]:
        """Those of them that may still touch its blocks."""
        raise TypeError("a room record has peers: use a subclass")

    def mark(self, point: str, now: float) -> None:
        self.timeline.setdefault(point, now - self.accepted_s)


R = TypeVar("R", bound=RoomRecord)


class Tombstone(NamedTuple):
    """How a room ended: ``failure`` None means well."""

    failure: Failure | None


class RoomBook(VoteBook[R]):
    """All rooms of one core: records, votes, tombstones, timers, the outbox."""

    def __init__(self, limits: CoreLimits, group_size: int) -> None:
        super().__init__(group_size)
        self.limits = limits
        self.tombstones: ExpiringTable[Tombstone] = ExpiringTable(
            limits.tombstone_cap, limits.tombstone_ttl_s
        )
        self.timers = Timers()
        #: room -> attempts that have not been reported yet.
        self._live: dict[int, set[int]] = {}

    # --- coming and going ---------------------------------------------------------------

    def check_new(self, request: GenerateRequest, now: float) -> None:
        """Raises RoomInUse or Overloaded. A live room is accepted only by the dispatch
        that names the attempt it replaces (D7)."""
        key = request.key
        if self._is_here(key) or self.tombstones.get(key, now) is not None:
            raise RoomInUse(f"room {key.room} attempt {key.attempt} was already dispatched here")
        others = self._live.get(key.room, set()) - {request.replaces or 0}
        if others:
            raise RoomInUse(f"room {key.room} is in use; wait for it or use another room")
        # Rooms, not attempts: an attempt that was replaced has been reported.
        if len(self._live) >= self.limits.max_queued_requests:
            raise Overloaded(
                f"{self.limits.max_queued_requests} requests are queued here already; retry later"
            )

    def _is_here(self, key: RoomKey) -> bool:
        """In a group only what all ranks know alike may decide: not what lingers here."""
        if self.group_size == 1:
            return key in self.records
        return key in self._voters or key.attempt in self._live.get(key.room, ())

    def add(self, record: R) -> None:
        key = record.key
        self.forget(key)  # what may still linger of it
        self.records[key] = record
        if not record.is_settled:
            self._voters[key] = None
        self._live.setdefault(key.room, set()).add(key.attempt)
        self.timers.arm("deadline", key, record.deadline_s)
        self.touch(key)

    def forget(self, key: RoomKey) -> None:
        record = self.records.pop(key, None)
        if record is None:
            return
        for kind in ("deadline", "resend", "drain", "linger", "arrival"):
            self.timers.disarm(kind, key)
        self._dirty.pop(key, None)
        self._voters.pop(key, None)
        self._end(key)

    def _end(self, key: RoomKey) -> None:
        attempts = self._live.get(key.room)
        if attempts is not None:
            attempts.discard(key.attempt)
            if not attempts:
                del self._live[key.room]

    def arm_heartbeat(self, now: float) -> None:
        """While there are rooms, their peers are asked whether they live."""
        if self.records and not self.timers.is_armed("heartbeat", "peers"):
            self.timers.arm("heartbeat", "peers", now + self.limits.heartbeat_interval_s)

    # --- results ------------------------------------------------------------------------

    def report(
        self,
        record: R,
        reason: FinishReason,
        why: Failure | None,
        now: float,
        completion_tokens: int = 0,
    ) -> None:
        """The one terminal result of a record; later calls change nothing (invariant 1)."""
        if record.is_reported:
            return
        record.is_reported = True
        record.mark("finished", now)
        self.timers.disarm("deadline", record.key)
        self.tombstones.put(record.key, Tombstone(why), now)
        self._end(record.key)
        self.out.append(
            ReportFinished(
                record.key,
                reason,
                why,
                len(record.request.prompt_token_ids),
                completion_tokens,
                record.timeline,
            )
        )

    def refuse(self, request: GenerateRequest, why: Failure, now: float) -> None:
        """A request that never becomes a record still has one result."""
        self.tombstones.put(request.key, Tombstone(why), now)
        self.out.append(
            ReportFinished(
                request.key, FinishReason.ERROR, why, len(request.prompt_token_ids), 0, {}
            )
        )

    # --- resending ----------------------------------------------------------------------

    def arm_resend(self, record: R, now: float) -> None:
        """Keep asking while something is unanswered, with back-off (rule 4)."""
        if not self.timers.is_armed("resend", record.key) and record.entity.is_unanswered:
            record.backoff_s = self.limits.resend_initial_s
            self.timers.arm("resend", record.key, now + record.backoff_s)

    def resend(self, record: R, now: float) -> None:
        messages = record.entity.unanswered()
        if messages:
            self.out.extend(messages)
            record.backoff_s = min(record.backoff_s * 2, self.limits.resend_max_s)
            self.timers.arm("resend", record.key, now + record.backoff_s)

    def poll_effects(self) -> list[Effect]:
        out, self.out = self.out, []
        return out


def finish_reason_of(reason: Failure | None) -> FinishReason:
    """A cancelled request was aborted; every other failure is an error."""
    if reason is not None and reason.code == "cancelled":
        return FinishReason.ABORT
    return FinishReason.ERROR


def refusal(
    request: GenerateRequest, setup: CoreSetup, blocks: KVBlocks, *, new_tokens: int
) -> Failure | None:
    """Why this request can never run on this rank, or None: one function for both roles
    (R66), asked before any queue, block or entity exists."""
    num_tokens = len(request.prompt_token_ids)
    limit = min(setup.limits.max_prefill_tokens, setup.max_model_len - 1)
    if num_tokens < 1:
        return failure("invalid_request", "the prompt is empty: send at least one token")
    if num_tokens > limit:
        return failure(
            "prompt_too_long", f"the prompt has {num_tokens} tokens, at most {limit} are served"
        )
    if not blocks.can_ever_fit(num_tokens, new_tokens):
        return failure(
            "prompt_too_long",
            f"the prompt's {num_tokens} tokens do not fit into this rank's KV cache",
        )
    if request.remaining_s <= 0:
        return failure("deadline_exceeded", "the request arrived after its deadline")
    return None


class LedgerTotals(TypedDict):
    """Blocks by state over all manager keys, for metrics."""

    kv_free: int
    kv_held: int
    kv_leased: int
    kv_quarantined: int


def ledger_totals(blocks: KVBlocks) -> LedgerTotals:
    ledgers = list(blocks.ledger().values())
    return LedgerTotals(
        kv_free=sum(ledger.free for ledger in ledgers),
        kv_held=sum(ledger.held for ledger in ledgers),
        kv_leased=sum(ledger.leased for ledger in ledgers),
        kv_quarantined=sum(ledger.quarantined for ledger in ledgers),
    )
