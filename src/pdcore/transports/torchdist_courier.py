"""How the sending thread of a torchdist pair talks to the receiver, and carries one job.

It waits for the peer on the control connection, where it also hears of new jobs, of
closing and of the peer's end; only for a chunk whose receive is posted does it wait inside
torch.distributed. A transfer cannot be called back within a chunk: a stop is seen between
two.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Mapping
from typing import Final

import attrs

from pdcore.transports.base import HandleStatus
from pdcore.transports.check import CopyPlan
from pdcore.transports.copy import ByteArray
from pdcore.transports.torchdist_channel import AFTERMATH_S, Channel, End, LinkOver
from pdcore.transports.torchdist_chunks import Chunk, cut, gather
from pdcore.transports.torchdist_group import Backend, GroupFailed, PairGroup, Staging
from pdcore.transports.torchdist_wire import (
    MAX_CHUNK_BYTES,
    MIN_CHUNK_BYTES,
    ChunkHead,
    Kind,
    decode_meeting,
    encode_key,
)
from pdcore.types import LeaseId

CHUNK_BYTES: Final = 1 << 20
STALL_TIMEOUT_S: Final = 10.0
CONNECT_TIMEOUT_S: Final = 1.0

Stop = tuple[HandleStatus, str]


@attrs.frozen
class Limits:
    """``chunk_bytes``: staged at once; of the two sides of a pair the smaller one counts.
    ``stall_timeout_s``: a peer that makes no progress for so long fails the transfers of
    its session. ``connect_timeout_s`` bounds ``connect``."""

    chunk_bytes: int = attrs.field(
        default=CHUNK_BYTES,
        validator=[attrs.validators.ge(MIN_CHUNK_BYTES), attrs.validators.le(MAX_CHUNK_BYTES)],
    )
    stall_timeout_s: float = attrs.field(default=STALL_TIMEOUT_S, validator=attrs.validators.gt(0))
    connect_timeout_s: float = attrs.field(
        default=CONNECT_TIMEOUT_S, validator=attrs.validators.gt(0)
    )


@attrs.define(eq=False)
class Job:
    """One handle. ``stop`` is set by the owner's thread and read by the link's; the first
    one to be seen wins. ``arrays`` are the source regions, pinned until it is quiesced."""

    handle: int
    lease: LeaseId
    plan: CopyPlan = attrs.field(repr=False)
    arrays: Mapping[int, ByteArray] = attrs.field(repr=False)
    notify: bytes | None = attrs.field(default=None, repr=False)
    stop: Stop | None = None


class Line:
    """The control connection as the sender uses it. ``is_in_doubt``: a chunk was sent and
    may yet be placed, for all that we know. The owner sets two marks and then rings
    ``wake``: ``is_leaving``, wait for the peer only while there is a doubt; ``is_hurried``,
    do not wait for it at all."""

    def __init__(self, channel: Channel, wake: int, stall_timeout_s: float) -> None:
        self.channel = channel
        self.is_in_doubt = False
        self.is_leaving = False
        self.is_hurried = False
        self._wake = wake
        self._stall_timeout_s = stall_timeout_s

    def send(self, kind: Kind, body: bytes = b"") -> None:
        """Raises LinkOver."""
        try:
            self.channel.send(kind, body, timeout_s=self._stall_timeout_s)
        except LinkOver as over:
            self.is_in_doubt &= over.end is End.LOST
            raise

    def idle(self) -> None:
        """Wait until the owner rings. Raises LinkOver."""
        answer = self._receive(None)
        if answer is not None:
            raise LinkOver(End.LOST, f"the peer sent {answer[0].name} unasked")

    def reply(self, *wanted: Kind, is_owed: bool = False) -> tuple[Kind, bytes]:
        """The peer's next frame. ``is_owed``: the peer counts on us, so wait for it also when
        leaving. Raises LinkOver, also when none comes in time."""
        deadline = time.monotonic() + self._stall_timeout_s
        while not self.is_hurried and (is_owed or self.is_in_doubt or not self.is_leaving):
            answer = self._receive(deadline)
            if answer is None:
                if time.monotonic() >= deadline:
                    raise LinkOver(End.LOST, f"no progress for {self._stall_timeout_s:g} s")
            elif answer[0] in wanted:
                return answer
            elif answer[0] is not Kind.KEY:  # one more than the group needed
                raise LinkOver(End.LOST, f"the peer answered {answer[0].name}")
        raise LinkOver(End.DISCONNECTED, "closed before the peer answered")

    def await_end(self) -> None:
        """The group broke, usually by the peer's death: give the connection a moment to
        prove it. Raises LinkOver when it does."""
        deadline = time.monotonic() + AFTERMATH_S
        while not self.is_hurried and time.monotonic() < deadline:
            self._receive(deadline)

    def resolve(self, deadline: float) -> LinkOver | None:
        """Wait for the end of the doubt; how the connection ended if that was it.
        ``is_in_doubt`` stays True when nobody can tell."""
        while self.is_in_doubt and not self.is_hurried and time.monotonic() < deadline:
            try:
                self._receive(deadline)
            except LinkOver as over:
                return over
        return None

    def rest(self, deadline: float) -> None:
        """Wait for the owner alone: the connection has said its last."""
        bell = select.poll()
        bell.register(self._wake, select.POLLIN)
        if bell.poll(max(0, int((deadline - time.monotonic()) * 1000))):
            os.eventfd_read(self._wake)

    def _receive(self, deadline: float | None) -> tuple[Kind, bytes] | None:
        try:
            answer = self.channel.receive(self._wake, deadline)
        except LinkOver as over:
            self.is_in_doubt &= over.end is End.LOST
            raise
        if answer is not None and answer[0] in (Kind.PLACED, Kind.REJECTED):
            self.is_in_doubt = False
        return answer


def build_group(line: Line, backend: Backend) -> tuple[PairGroup, int]:
    """Our half of the group, and the largest chunk the receiver takes. Raises LinkOver when
    it gives up or does not answer, GroupFailed."""
    line.send(Kind.JOIN)
    meeting = decode_meeting(line.reply(Kind.GROUP)[1])

    def tell(key: str, value: bytes) -> None:
        line.send(Kind.KEY, encode_key(key, value))

    def hear() -> bytes:
        # It has our address by now: leaving it alone with that would hold it up.
        return line.reply(Kind.KEY, is_owed=True)[1]

    try:
        return PairGroup(backend, 0, meeting.key, tell, hear), meeting.chunk_bytes
    except GroupFailed:
        line.await_end()
        raise


def start(line: Line, backend: Backend, limits: Limits) -> Courier:
    """Raises LinkOver, GroupFailed."""
    group, chunk_bytes = build_group(line, backend)
    staging = Staging(min(limits.chunk_bytes, chunk_bytes), backend.device)
    return Courier(line, group, staging, limits.stall_timeout_s)


class Courier:
    """Carries jobs one after the other. The bytes of a chunk are gathered while the
    receiver puts the one before it in place."""

    def __init__(
        self,
        line: Line,
        group: PairGroup,
        staging: Staging,
        timeout_s: float,
    ) -> None:
        self._line = line
        self._group = group
        self._staging = staging
        self._timeout_s = timeout_s

    def carry(self, job: Job) -> Stop:
        """How it ended; nothing of it lands any more. Raises LinkOver (then it may, see
        ``Line.is_in_doubt``) and GroupFailed."""
        is_owed = False
        for chunk in cut(job.plan, len(self._staging.host)):
            if job.stop is None:
                gather(chunk, job.arrays, self._staging.host)
            rejected = self._placed() if is_owed else None
            is_owed = False
            if rejected is not None:
                return HandleStatus.FAILED, rejected
            if job.stop is not None:
                return job.stop
            rejected = self._send(chunk, job)
            if rejected is not None:
                return HandleStatus.FAILED, rejected
            is_owed = True
        rejected = self._placed()
        return (HandleStatus.DONE, "") if rejected is None else (HandleStatus.FAILED, rejected)

    def _send(self, chunk: Chunk, job: Job) -> str | None:
        """None when the chunk is on its way, else why the receiver does not want it."""
        notify = job.notify if chunk.is_last else None
        head = ChunkHead(job.lease, chunk.num_bytes, chunk.table, chunk.is_last, notify)
        # Nothing follows an empty chunk: its notification may come from here on.
        self._line.is_in_doubt = not chunk.num_bytes
        self._line.send(Kind.CHUNK, head.encode())
        if not chunk.num_bytes:
            return None
        kind, body = self._line.reply(Kind.READY, Kind.REJECTED)
        if kind is Kind.REJECTED:
            return body.decode(errors="replace")
        try:
            self._group.send(self._staging, chunk.num_bytes, self._timeout_s)
        except GroupFailed:
            self._line.await_end()
            raise
        self._line.is_in_doubt = True
        self._line.send(Kind.SENT)
        return None

    def _placed(self) -> str | None:
        kind, body = self._line.reply(Kind.PLACED, Kind.REJECTED)
        return body.decode(errors="replace") if kind is Kind.REJECTED else None
