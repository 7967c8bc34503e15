"""One connection of the socket transport, and what its thread tells the owner about it."""

from __future__ import annotations

import socket
import time
from collections import deque
from typing import Final

import attrs

from pdcore.transports.base import Completion, PeerDied
from pdcore.transports.socket_address import Home
from pdcore.transports.socket_greeting import Greeting
from pdcore.transports.socket_incoming import Incoming
from pdcore.transports.socket_outgoing import Ended, Outgoing
from pdcore.transports.socket_reader import FrameReader
from pdcore.transports.socket_vector import Vector
from pdcore.transports.socket_wire import Welcome
from pdcore.types import UNKNOWN_INCARNATION, Incarnation, LeaseId

#: Answers that a sender has not read; nothing more is read from it until it does.
MAX_REPLIES: Final = 1024


@attrs.frozen
class NoteCame:
    """A notification; it wakes nobody once its lease is over."""

    incarnation: Incarnation
    lease: LeaseId
    payload: bytes


#: Completions come from threads of a transport that is built upon this one.
Told = Ended | NoteCame | PeerDied | Completion


@attrs.define(eq=False)
class Link:
    """``half``: which end of the conversation we are; a Greeting until a caller was welcomed.
    ``incarnation`` and ``home`` are the peer's, unknown while it is greeted. ``is_open``:
    a session may use it (read by the owner's thread, too). ``is_mute``: nothing more is sent.
    ``owed``: transfers that ended but may still land; told again when they cannot.
    ``welcome``: what the peer told us, where we are the sender."""

    sock: socket.socket
    half: Outgoing | Incoming | Greeting
    reader: FrameReader = attrs.field(repr=False)
    incarnation: Incarnation = UNKNOWN_INCARNATION
    home: Home | None = attrs.field(default=None, repr=False)
    number: int = 0
    welcome: Welcome = attrs.field(default=Welcome({}, b""), repr=False)
    is_open: bool = True
    is_mute: bool = False
    out: deque[Vector] = attrs.field(factory=deque, repr=False)
    owed: list[Ended] = attrs.field(factory=list, repr=False)
    #: When something last moved (monotonic seconds); of a caller: when it came.
    moved_s: float = attrs.field(factory=time.monotonic)

    def moved(self) -> None:
        """Something moved. A caller has its time in all, however often it says a little."""
        if not isinstance(self.half, Greeting):
            self.moved_s = time.monotonic()

    @property
    def wants_to_send(self) -> bool:
        if self.is_mute:
            return False
        if self.out:
            return True
        if isinstance(self.half, Outgoing):
            return self.half.has_more
        return isinstance(self.half, Incoming) and (self.half.is_behind or bool(self.half.replies))

    @property
    def may_read(self) -> bool:
        if isinstance(self.half, Incoming):
            return len(self.out) + len(self.half.replies) < MAX_REPLIES
        return True

    @property
    def has_deadline(self) -> bool:
        """It may wait for too long, if nothing comes."""
        if isinstance(self.half, Outgoing) and self.half.num_waiting:
            return True
        return self.is_mute or isinstance(self.half, Greeting)

    def is_stalled(self, now: float, stall_s: float) -> bool:
        """Transfers wait for the peer, and nothing has moved for ``stall_s``."""
        waits = isinstance(self.half, Outgoing) and self.half.num_waiting > 0
        return waits and now - self.moved_s > stall_s
