"""The sending half of a connection: transfers in turn, as frames, until each was answered.

Transfers of one session go out first in, first out, each as WRITE frames of about a chunk
and one END. The next one starts before the END of the former is answered. The receiver
answers every END with one ACK, and only that, or the end of the connection, ends a transfer.
A transfer that is to stop ends with an END that says so; what was sent before is in place,
or dropped, when the ACK comes, so that the ACK is also the quiesced mark.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from typing import Final

import attrs
import numpy as np

from pdcore.errors import TransportError
from pdcore.kv.plan import Int64Array
from pdcore.transports.base import HandleStatus
from pdcore.transports.check import CopyPlan, expand_rows
from pdcore.transports.copy import ByteArray, cut_pieces, few_rows
from pdcore.transports.socket_vector import Vector
from pdcore.transports.socket_wire import (
    CHUNK_BYTES,
    MAX_PIECES,
    Answer,
    End,
    Kind,
    pack,
    pack_end,
    pack_write,
)
from pdcore.types import LeaseId

#: Rows of a plan that are expanded into pieces at once.
_ROWS_AT_ONCE: Final = 4 * MAX_PIECES
#: Transfers that a session may have at once; a submit that would exceed it is refused.
MAX_JOBS: Final = 4096
#: Revoked leases remembered for each session; the oldest go first.
MAX_REVOKED: Final = 4096


@attrs.define(eq=False)
class Job:
    """One handle. ``stop`` is set by the owner's thread and read by the transport's; setting
    an attribute is atomic. ``is_complete`` once an END said that all was sent."""

    handle: int
    lease: LeaseId
    frames: Iterator[Vector] = attrs.field(repr=False)
    notify: bytes | None = attrs.field(default=None, repr=False)
    local_regions: tuple[int, ...] = ()
    stop: tuple[HandleStatus, str] | None = None
    is_started: bool = False
    is_complete: bool = False


@attrs.frozen
class Ended:
    """What became of a job. ``quiesced``: no byte of it can land any more."""

    job: Job
    status: HandleStatus
    detail: str
    quiesced: bool = True


def write_frames(
    handle: int,
    lease: LeaseId,
    plan: CopyPlan,
    local: Mapping[int, ByteArray],
    chunk_bytes: int = CHUNK_BYTES,
    rows_at_once: int = _ROWS_AT_ONCE,
) -> Iterator[Vector]:
    """The WRITE frames of a checked plan, built one at a time: head and table are bytes of
    our own, the KV bytes are views of the registered memory."""
    for pair in plan.pairs:
        source = local[pair.local_region].data
        for pieces in few_rows(pair.pieces, rows_at_once):
            start, into, width = cut_pieces(expand_rows(pieces), chunk_bytes)
            done = np.cumsum(width)
            at, sent = 0, 0
            while at < len(width):
                end = int(np.searchsorted(done, sent + chunk_bytes, side="right"))
                # One piece more than fits, rather than an empty frame.
                end = min(max(end, at + 1), at + MAX_PIECES)
                yield _write(handle, lease, pair.remote_region, source, start, into, width, at, end)
                at, sent = end, int(done[end - 1])


def _write(
    handle: int,
    lease: LeaseId,
    region: int,
    source: memoryview,
    start: Int64Array,
    into: Int64Array,
    width: Int64Array,
    at: int,
    end: int,
) -> Vector:
    table = np.stack((into[at:end], width[at:end]), axis=1)
    views = [memoryview(pack_write(handle, lease, region, table))]
    stop = (start[at:end] + width[at:end]).tolist()
    views += [source[a:b] for a, b in zip(start[at:end].tolist(), stop, strict=True)]
    return Vector(views)


class Outgoing:
    """Used by the transport's thread only, but for ``num_waiting``, and to look into
    ``revoked``: leases that the receiver wants back."""

    def __init__(self) -> None:
        self.revoked: OrderedDict[LeaseId, None] = OrderedDict()
        self._jobs: deque[Job] = deque()
        self._awaiting: OrderedDict[int, Job] = OrderedDict()
        #: Said after the last transfer: BYE or DISCONNECT.
        self._farewell: Kind | None = None
        self._has_said_farewell = False
        self._has_given_up = False

    @property
    def num_waiting(self) -> int:
        return len(self._jobs) + len(self._awaiting)

    @property
    def has_more(self) -> bool:
        """There is something to send."""
        return bool(self._jobs) or (self._farewell is not None and not self._has_said_farewell)

    @property
    def is_over(self) -> bool:
        """Everything was said, the farewell included."""
        return self._has_said_farewell

    def add(self, job: Job) -> None:
        self._jobs.append(job)

    def note_revoked(self, lease: LeaseId) -> None:
        self.revoked[lease] = None
        if len(self.revoked) > MAX_REVOKED:
            self.revoked.popitem(last=False)

    def say_farewell(self, kind: Kind, stop: tuple[HandleStatus, str]) -> None:
        """Stop all transfers and end the conversation after them. Idempotent; BYE stands."""
        if self._farewell is not Kind.BYE:
            self._farewell = kind
        for job in (*self._jobs, *self._awaiting.values()):
            if job.stop is None:
                job.stop = stop

    def next_frame(self) -> tuple[Vector | None, Ended | None]:
        """What to send now, and a job that ended without a word to the peer."""
        if not self._jobs:
            return self._last_words(), None
        job = self._jobs[0]
        if job.stop is None:
            job.is_started = True
            frame = next(job.frames, None)
            if frame is not None:
                return frame, None
            job.is_complete = True
        self._jobs.popleft()
        if not job.is_started and job.stop is not None:
            return None, Ended(job, *job.stop)
        self._awaiting[job.handle] = job
        end = End(job.handle, job.lease, job.is_complete, job.notify if job.is_complete else None)
        return Vector([memoryview(pack_end(end))]), None

    def answered(self, kind: Kind, answer: Answer) -> Ended | None:
        """REJECT: stop sending it. ACK: how it ended. Raises TransportError for an answer to
        something that was not asked."""
        if kind is Kind.REJECT:
            for job in (*self._jobs, *self._awaiting.values()):
                if job.handle == answer.handle and job.stop is None:
                    job.stop = HandleStatus.FAILED, answer.reason
            return None
        if self._has_given_up:
            return None
        found = next(iter(self._awaiting.values()), None)
        if found is None or found.handle != answer.handle:
            raise TransportError(f"ACK of handle {answer.handle}, which was not to be answered")
        del self._awaiting[found.handle]
        if answer.placed and found.is_complete:
            return Ended(found, HandleStatus.DONE, "")
        if found.stop is not None:
            return Ended(found, *found.stop)
        return Ended(found, HandleStatus.FAILED, answer.reason or "the receiver placed nothing")

    def give_up(self, why: str, *, fenced: bool) -> list[Ended]:
        """The connection is over. ``fenced``: and the receiver reads nothing of it any more;
        otherwise only transfers that never began are quiesced."""
        ended = []
        self._has_given_up = True
        for job in (*self._awaiting.values(), *self._jobs):
            status, detail = job.stop or (HandleStatus.FAILED, why)
            ended.append(Ended(job, status, detail, fenced or not job.is_started))
        self._jobs.clear()
        self._awaiting.clear()
        return ended

    def _last_words(self) -> Vector | None:
        if self._farewell is None or self._has_said_farewell:
            return None
        self._has_said_farewell = True
        return Vector([memoryview(pack(self._farewell))])
