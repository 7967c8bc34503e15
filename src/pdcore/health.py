"""What a worker says of itself: counters, ledger, and why its rank is not ready.

Two things are watched here that nobody asks for: garbage on the wire, of which one line and
then one sum per interval is logged, and the ledger, which is recounted whenever the rank has
come to rest. A rank whose ledger does not add up says so until it is restarted: who owns
which block is not known any more, so it must not go on as if nothing had happened.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final, Protocol

import msgspec

from pdcore.control.messages import WorkerHealth
from pdcore.errors import CodecError, OwnershipError
from pdcore.scheduler.ledger import Rooms, accounts, audit
from pdcore.scheduler.setup import CoreSetup
from pdcore.types import Batch, RoomKey

log = logging.getLogger(__name__)

#: One line about garbage frames in so many seconds.
GARBAGE_LOG_S: Final = 60.0
#: Peers named in one report; the rest is only counted.
MAX_NAMED: Final = 32


class Watched(Protocol):
    """The part of a core that is looked at."""

    setup: CoreSetup

    @property
    def rooms(self) -> Rooms: ...

    def live_keys(self) -> list[RoomKey]: ...

    def snapshot(self) -> msgspec.Struct: ...


class LoopCounters(msgspec.Struct):
    """Totals of this process, for /metrics."""

    steps: int = 0
    batch_tokens: int = 0
    frames_received: int = 0
    frames_garbage: int = 0
    audits: int = 0


class Watch:
    """Owned by the worker loop's thread. ``now`` is monotonic time (seconds)."""

    def __init__(self) -> None:
        self.counters = LoopCounters()
        #: What a recount found; never taken back.
        self.damage: str | None = None
        self._audited: tuple[int, int] | None = None
        self._next_log_s = float("-inf")
        self._num_unsaid = 0

    def ran(self, batch: Batch) -> None:
        """A step of the engine is over."""
        self.counters.steps += 1
        self.counters.batch_tokens += batch.num_tokens

    def garbage_frame(self, error: CodecError, now: float) -> None:
        """Count it; whoever sends many of them must not fill the disk."""
        self.counters.frames_garbage += 1
        self._num_unsaid += 1
        if now >= self._next_log_s:
            log.warning("dropped %d control frames, the last one: %s", self._num_unsaid, error)
            self._next_log_s = now + GARBAGE_LOG_S
            self._num_unsaid = 0

    def audit_at_rest(self, core: Watched) -> None:
        """Recount the ledger if no request is left and something happened since last time."""
        done = (self.counters.steps, self.counters.frames_received)
        if self.damage is not None or done == self._audited or core.live_keys():
            return
        self._audited = done
        self.counters.audits += 1
        try:
            audit(core.rooms, at_rest=True)
        except OwnershipError as error:
            self.damage = f"the ledger of KV blocks does not add up: {error}; restart this worker"
            log.critical("%s", self.damage)

    def health(self, core: Watched, reasons: Sequence[str], now: float) -> WorkerHealth:
        """``reasons``: why the rank is not ready, as far as others know."""
        totals = {
            **msgspec.structs.asdict(core.snapshot()),
            **msgspec.structs.asdict(self.counters),
        }
        counters = {k: float(v) for k, v in totals.items() if not isinstance(v, str)}
        problems = list(reasons)
        for name, count in list(core.rooms.stuck_on().items())[:MAX_NAMED]:
            rooms = "1 room waits" if count == 1 else f"{count} rooms wait"
            problems.append(f"{rooms} for {name}, which does not acknowledge")
        if counters.get("is_diverged"):
            problems.append("the ranks of its group held different requests: restart it")
        if self.damage is not None:
            problems.append(self.damage)
        return WorkerHealth(
            core.setup.me.rank,
            problems,
            counters,
            {key: account._asdict() for key, account in accounts(core.rooms).items()},
            dict(list(core.rooms.refused_peers(now).items())[:MAX_NAMED]),
        )
