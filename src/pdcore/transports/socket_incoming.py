"""The receiving half of a connection: bytes into leased memory, and nowhere else.

RECEIVER_ENFORCED: our own thread puts every byte in place, so it looks before each call
whether the lease still stands, and drops the bytes (they must be read all the same) when it
does not. :class:`Placing` says which lease a byte may be on its way for at this very moment;
whoever revokes a lease waits only if it is that one.
"""

from __future__ import annotations

import socket
from typing import Final

import attrs
import numpy as np

from pdcore.kv.plan import Int64Array
from pdcore.transports.regions import RegionTable
from pdcore.transports.socket_reader import FrameReader
from pdcore.transports.socket_vector import Vector
from pdcore.transports.socket_wire import (
    Answer,
    End,
    Kind,
    Write,
    pack_answer,
    pack_revoke,
    unpack_end,
    unpack_write,
)
from pdcore.types import LeaseId

#: Bytes of a write that may not land are read into this much memory, again and again.
_DROP_BYTES: Final = 1 << 16


@attrs.define
class Placing:
    """Shared by all connections of a transport: they take turns on one thread."""

    lease: LeaseId | None = None


@attrs.define
class IncomingCounts:
    """``writes_refused``: transfers of which something was dropped."""

    writes_placed: int = 0
    bytes_placed: int = 0
    writes_refused: int = 0
    bytes_dropped: int = 0


@attrs.frozen
class Placed:
    """What an END means here: the ACK to send, and the notification to report."""

    reply: bytes
    lease: LeaseId
    notify: bytes | None


class Incoming:
    """Used by the transport's thread only. ``replies`` waits to be sent to the sender;
    ``is_behind``: then it is asked to stop all that it still is to, in one go."""

    def __init__(self, regions: RegionTable, placing: Placing, counts: IncomingCounts) -> None:
        self.replies: list[bytes] = []
        self.is_behind = False
        self._regions = regions
        self._placing = placing
        self._counts = counts
        self._write: Write | None = None
        self._vector = Vector([])
        #: The newest transfer of which something was not placed, and why.
        self._refused: tuple[int, str] | None = None
        self._merged: tuple[Int64Array, Int64Array, Int64Array] | None = None
        self._waste: bytearray | None = None

    @property
    def is_placing(self) -> bool:
        """The bytes of a WRITE are what comes next."""
        return self._write is not None

    def recall(self, lease: LeaseId, *, has_backlog: bool) -> None:
        """Ask the sender to stop writing into ``lease``. One that has not taken what was said
        before (``has_backlog``) is asked later: nothing piles up for a peer that is stopped, and
        nothing is free before it has answered."""
        if has_backlog or self.replies:
            self.is_behind = True
        else:
            self.replies.append(pack_revoke(lease))

    def begin(self, body: bytes) -> None:
        """A WRITE frame came: check all of it before its first byte. Raises TransportError
        for one that is malformed."""
        self._write = write = unpack_write(body)
        self._placing.lease = write.lease
        try:
            why = self._why_not(write)
            if why is not None:
                self._refuse(write, why)
                return
            memory = self._regions.arrays[write.region].data
        finally:
            self._placing.lease = None
        stop = write.pieces.sum(axis=1).tolist()
        views = [memory[a:b] for a, b in zip(write.pieces[:, 0].tolist(), stop, strict=True)]
        self._vector = Vector(views)

    def advance(self, sock: socket.socket, reader: FrameReader) -> bool:
        """One call's worth of the bytes of a WRITE; True when they all came. Raises
        BlockingIOError when nothing is there, EOFError at the end of the stream, OSError."""
        write = self._write
        assert write is not None, "begin comes first"
        self._placing.lease = write.lease
        try:
            # After the line above, so that whoever revokes now waits for this call.
            if not self._is_refused(write) and self._regions.granted(write.lease) is None:
                self._refuse(write, "the lease ended while it was written")
            if self._is_refused(write):
                left = self._drop(sock)
            else:
                left = self._place(sock, reader)
        finally:
            self._placing.lease = None
        if not left:
            self._counts.writes_placed += not self._is_refused(write)
            self._write, self._vector = None, Vector([])
        return not left

    def finish(self, body: bytes) -> Placed:
        """An END came: every byte before it is in place, or was dropped. Raises
        TransportError for one that is malformed."""
        end = unpack_end(body)
        why = self._why_not_done(end)
        answer = Answer(end.handle, why is None and end.complete, why or "")
        is_heard = answer.placed and end.notify is not None
        reply = pack_answer(Kind.ACK, answer)
        return Placed(reply, end.lease, end.notify if is_heard else None)

    def _why_not_done(self, end: End) -> str | None:
        if self._refused is not None and self._refused[0] == end.handle:
            return self._refused[1]
        if self._regions.granted(end.lease) is None:
            return _no_lease(end.lease)
        return None

    def _place(self, sock: socket.socket, reader: FrameReader) -> int:
        """Bytes left."""
        vector = self._vector
        # The head that follows comes along: it saves a call per frame.
        count = sock.recvmsg_into([*vector.window(), reader.room_for_head()])[0]
        if count == 0:
            raise EOFError("in the middle of a write")
        placed = min(count, vector.left)
        vector.advance(placed)
        reader.took(count - placed)
        self._counts.bytes_placed += placed
        return vector.left

    def _drop(self, sock: socket.socket) -> int:
        if self._waste is None:
            self._waste = bytearray(_DROP_BYTES)
        with memoryview(self._waste) as whole:
            count = sock.recv_into(whole[: min(self._vector.left, _DROP_BYTES)])
        if count == 0:
            raise EOFError("in the middle of a write")
        self._vector.left -= count
        self._counts.bytes_dropped += count
        return self._vector.left

    def _is_refused(self, write: Write) -> bool:
        return self._refused is not None and self._refused[0] == write.handle

    def _refuse(self, write: Write, why: str) -> None:
        """Nothing more of this transfer is placed; its sender may stop."""
        left = self._vector.left or write.num_bytes
        self._vector = Vector([])
        self._vector.left = left
        if not self._is_refused(write):
            self._refused = write.handle, why
            self._counts.writes_refused += 1
            self.replies.append(pack_answer(Kind.REJECT, Answer(write.handle, False, why)))

    def _why_not(self, write: Write) -> str | None:
        """Lease and bounds (G3), looked up anew for every frame."""
        if self._is_refused(write):
            return "something of it was refused before"
        lease = self._regions.granted(write.lease)
        if lease is None:
            return _no_lease(write.lease)
        ranges = lease.ranges.get(write.region)
        if ranges is None:
            return f"lease {write.lease.counter} does not name region {write.region}"
        starts, ends = self._joined(ranges)
        first, last = write.pieces[:, 0], write.pieces.sum(axis=1)
        at = np.searchsorted(starts, first, side="right") - 1
        # at = -1 (before the first range) wraps to the last range, which starts later.
        inside = (starts[at] <= first) & (last <= ends[at]) if len(starts) else first < 0
        if np.count_nonzero(inside) < len(inside):
            return f"it writes outside lease {write.lease.counter}"
        return None

    def _joined(self, ranges: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Starts and ends of the lease's ranges; those that touch are one. Kept for the
        frames that follow."""
        kept = self._merged
        if kept is None or kept[0] is not ranges:
            starts, ends = ranges[:, 0], ranges[:, 1]
            if len(starts):
                gap = starts[1:] > ends[:-1]
                starts = starts[np.concatenate(([True], gap))]
                ends = ends[np.concatenate((gap, [True]))]
            kept = self._merged = ranges, starts, ends
        return kept[1], kept[2]


def _no_lease(lease: LeaseId) -> str:
    return f"lease {lease.counter} is not granted (any more)"
