"""Rooms that clients chose: live, lost lately, finished lately (D7).

A client names a room so that it may ask again after its connection broke. The rule: the same
room is live and the request names no ``replaces``: 409. It failed or was cancelled: a new
attempt, which names the one it replaces. It finished within the TTL: the recorded result, if
the request was idempotent (greedy or seeded) and is the same one now, else 409. Rooms that the
router made are known only while they are live.

Tables are bounded, in entries and in bytes, and expire; safety depends on none of them: the
attempt is fresh in any case.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from typing import Final, NamedTuple

import msgspec

from pdcore.errors import RoomInUse
from pdcore.router.limits import RouterLimits

#: Where and how long a request runs is not what it asks.
_NOT_ASKED: Final = frozenset(
    {
        "bootstrap_room",
        "bootstrap_host",
        "bootstrap_port",
        "disagg_prefill_dp_rank",
        "replaces",
        "timeout",
    }
)
#: Of one field of a request.
LONG_BYTES: Final = 64 * 1024


class Recorded(NamedTuple):
    """A result as its client got it. A stream is its events, one after the other."""

    status: int
    content_type: bytes
    body: bytes


class _Result:
    __slots__ = ("digest", "recorded", "until_s")

    def __init__(self, until_s: float) -> None:
        self.until_s = until_s
        self.digest: bytes | None = None
        self.recorded: Recorded | None = None

    @property
    def size_bytes(self) -> int:
        return 0 if self.recorded is None else len(self.recorded.body)


class Rooms:
    """``num_replayed`` and ``size_bytes`` are for /stats."""

    def __init__(self, limits: RouterLimits) -> None:
        self._limits = limits
        self._live: dict[int, int] = {}
        #: Room -> its last attempt, where that one failed or was cancelled.
        self._lost: OrderedDict[int, int] = OrderedDict()
        #: In the order of their end, so that the first is the first to expire.
        self._results: OrderedDict[int, _Result] = OrderedDict()
        self._open_bytes = 0
        self.size_bytes = 0
        self.num_replayed = 0

    # --- live ----------------------------------------------------------------------------

    def ticket(self, room: int) -> int | None:
        return self._live.get(room)

    def last_lost(self, room: int) -> int:
        """The attempt that a dispatch of this room takes the place of; 0: none."""
        return self._lost.get(room, 0)

    def enter(self, room: int, ticket: int) -> None:
        self._live[room] = ticket

    def leave(self, room: int, ticket: int, until_s: float | None) -> None:
        """The request is over. ``until_s``: it finished, and its room came from the client, so
        it is remembered until then; None: it did not, or the room was ours. One that ended
        before its first dispatch replaced nothing: the room's lost attempt is still the last."""
        if self._live.get(room) != ticket:
            return  # replaced by a newer request
        del self._live[room]
        if until_s is None:
            return
        self._lost.pop(room, None)
        self._drop(room)
        self._results[room] = _Result(until_s)
        self._trim()

    def lose(self, room: int, attempt: int) -> None:
        """Remember an attempt that failed or was cancelled, to name it as replaced."""
        self._lost[room] = attempt
        while len(self._lost) > self._limits.max_recent_rooms:
            self._lost.popitem(last=False)

    # --- results -------------------------------------------------------------------------

    def recall(self, room: int, digest: bytes | None, now_s: float) -> Recorded | None:
        """The recorded result of a finished room; None: this room is to be served. Raises
        RoomInUse where there is a result that may not be given again."""
        while self._results and next(iter(self._results.values())).until_s <= now_s:
            self._drop(next(iter(self._results)))
        result = self._results.get(room)
        if result is None or room in self._live:
            return None
        if result.recorded is None:
            raise RoomInUse(
                f"bootstrap_room {room} is finished and its result was not kept, as it was "
                "neither greedy nor seeded, or too large: choose another room"
            )
        if digest is None or digest != result.digest:
            raise RoomInUse(
                f"bootstrap_room {room} was used for another request: choose another room"
            )
        self.num_replayed += 1
        return result.recorded

    def record(self, room: int, digest: bytes, recorded: Recorded) -> None:
        """Keep the result of a room that has just finished, if it is not too large."""
        result = self._results.get(room)
        if result is None or len(recorded.body) > self._limits.max_result_bytes:
            return
        self.size_bytes += len(recorded.body) - result.size_bytes
        result.digest, result.recorded = digest, recorded
        self._trim()

    def recording(self, room: int, digest: bytes) -> Recording:
        return Recording(self, room, digest)

    def open_more(self, num_bytes: int) -> bool:
        """Bytes of streams that are being recorded have the same bound as those kept; negative
        gives back."""
        self._open_bytes += num_bytes
        return self._open_bytes <= self._limits.max_results_bytes

    @property
    def max_result_bytes(self) -> int:
        return self._limits.max_result_bytes

    def _drop(self, room: int) -> None:
        result = self._results.pop(room, None)
        if result is not None:
            self.size_bytes -= result.size_bytes

    def _trim(self) -> None:
        limits = self._limits
        while len(self._results) > limits.max_results or self.size_bytes > limits.max_results_bytes:
            self._drop(next(iter(self._results)))

    def snapshot(self) -> dict[str, int]:
        return {
            "results": len(self._results),
            "results_bytes": self.size_bytes,
            "replayed": self.num_replayed,
        }


class Recording:
    """One result while it is passed on. :meth:`close` exactly once, whatever happened."""

    __slots__ = ("_digest", "_parts", "_room", "_rooms", "_size")

    def __init__(self, rooms: Rooms, room: int, digest: bytes) -> None:
        self._rooms = rooms
        self._room = room
        self._digest = digest
        self._parts: list[bytes] | None = []
        self._size = 0

    def add(self, part: bytes) -> None:
        """One part of a stream. A result that gets too large is let go at once."""
        if self._parts is None:
            return
        self._parts.append(part)
        self._size += len(part)
        if not self._rooms.open_more(len(part)) or self._size > self._rooms.max_result_bytes:
            self.close()

    def keep(self, status: int, content_type: bytes) -> None:
        """The result is complete, and the core has ended its request as done."""
        if self._parts is not None:
            body = b"".join(self._parts)
            self._rooms.record(self._room, self._digest, Recorded(status, content_type, body))
        self.close()

    def close(self) -> None:
        if self._parts is not None:
            self._rooms.open_more(-self._size)
            self._parts = None


def digest_of(path: str, fields: Mapping[str, msgspec.Raw]) -> bytes | None:
    """Identity of what a request asks: equal in any order and spacing of its JSON, but a value
    of more than :data:`LONG_BYTES` counts as it is written: megabytes of token ids would hold
    the router's loop for tenths of a second. None for one that is not idempotent, neither
    greedy nor seeded. A request that says neither may be drawn all the same, by an instance
    whose defaults are not greedy: its answer says so."""
    try:
        if not _is_idempotent(fields):
            return None
        asked = {
            name: raw if len(memoryview(raw)) > LONG_BYTES else msgspec.json.decode(raw)
            for name, raw in fields.items()
            if name not in _NOT_ASKED
        }
        body = msgspec.json.encode([path, asked], order="sorted")
    except (msgspec.DecodeError, RecursionError):
        return None  # the legs refuse it, or it is not worth the trouble
    return hashlib.sha256(body).digest()


def _is_idempotent(fields: Mapping[str, msgspec.Raw]) -> bool:
    values: list[object] = []
    for name in ("seed", "temperature"):
        raw = fields.get(name)
        values.append(None if raw is None else msgspec.json.decode(raw))
    seed, temperature = values
    return seed is not None or temperature is None or temperature == 0
