"""Frames out of a stream, into one buffer that holds at most one of them."""

from __future__ import annotations

import socket
from collections.abc import Collection

from pdcore.errors import TransportError
from pdcore.transports.socket_wire import HEAD, Kind, unpack_head


class FrameReader:
    """Reads what one connection sends. ``allowed``: the kinds that may come now.

    Never reads past the end of a frame, so that the bytes which follow a WRITE stay in the
    kernel until it is known where they belong.
    """

    __slots__ = ("_buffer", "_have", "_kind", "_need", "allowed")

    def __init__(self, allowed: Collection[Kind]) -> None:
        self.allowed = allowed
        self._buffer = bytearray(HEAD.size)
        self._have = 0
        self._need = HEAD.size
        self._kind: Kind | None = None

    @property
    def is_between_frames(self) -> bool:
        return self._have == 0

    def room_for_head(self) -> memoryview:
        """Where the head of the next frame goes, for a call that reads it along with the
        bytes before it; tell :meth:`took` how much came. Only between frames."""
        return memoryview(self._buffer)[: HEAD.size]

    def took(self, count: int) -> None:
        self._have += count

    def receive(self, sock: socket.socket) -> tuple[Kind, bytes] | None:
        """The next frame, or None when more of it must come (something did come).

        Raises BlockingIOError when nothing is there, EOFError at the end of the stream,
        TransportError for a frame that is malformed or not allowed now, OSError.
        """
        while True:
            if self._have < self._need:
                with memoryview(self._buffer) as whole, whole[self._have : self._need] as room:
                    count = sock.recv_into(room)
                if count == 0:
                    raise EOFError("in the middle of a frame" if self._have else "")
                self._have += count
                if self._have < self._need:
                    return None
            if self._kind is None:
                kind, size = unpack_head(memoryview(self._buffer)[: HEAD.size])
                if kind not in self.allowed:
                    raise TransportError(f"unexpected {kind.name} frame")
                self._kind, self._need = kind, HEAD.size + size
                if len(self._buffer) < self._need:
                    self._buffer = bytearray(self._need)
            if self._have == self._need:
                frame = self._kind, bytes(memoryview(self._buffer)[HEAD.size : self._need])
                self._have, self._need, self._kind = 0, HEAD.size, None
                return frame
