"""Parts for the tests of torchdist: the two ends of a control connection, and both ends of
the protocol played by hand, over real groups."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import attrs
import numpy as np

from pdcore.kv.plan import Int64Array
from pdcore.testing.transport_harness import Pair, RegistryHarness
from pdcore.transports.descriptor import EndpointDescriptor, decode
from pdcore.transports.torchdist_channel import Channel
from pdcore.transports.torchdist_courier import Limits, Line, build_group
from pdcore.transports.torchdist_group import Backend, PairGroup, Staging, Work
from pdcore.transports.torchdist_sender import open_channel
from pdcore.transports.torchdist_wire import (
    Address,
    ChunkHead,
    Hello,
    Kind,
    Meeting,
    Welcome,
    decode_address,
    decode_chunk,
    decode_hello,
    encode_key,
)
from pdcore.transports.torchdist_witness import NOBODY
from pdcore.types import Incarnation, LeaseId

HOST = "127.0.0.1"
THEM = Incarnation(b"t" * 16)
LIMITS = Limits(chunk_bytes=1 << 16, stall_timeout_s=20.0, connect_timeout_s=5.0)
#: Of a frame that is sure to come.
SOON_S = 20.0


def sockets() -> tuple[socket.socket, socket.socket]:
    with socket.create_server((HOST, 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        return one, listener.accept()[0]


@contextmanager
def channels() -> Iterator[tuple[Channel, Channel]]:
    one, other = (Channel(sock) for sock in sockets())
    try:
        yield one, other
    finally:
        one.close()
        other.close()


@contextmanager
def bell() -> Iterator[int]:
    fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    try:
        yield fd
    finally:
        os.close(fd)


def warm_up() -> None:
    """torch keeps a few descriptors and threads from its first use on."""
    pair = Pair(RegistryHarness("torchdist"), 4096)
    pair.submit(pair.lease(), pair.batch((0, 0, 4096)))
    pair.sender.transport.close()
    pair.receiver.transport.close()


def rows(*pieces: tuple[int, int, int]) -> Int64Array:
    """A table of (region, offset, bytes)."""
    return np.array([(*piece, 1, piece[2]) for piece in pieces], np.int64).reshape(-1, 5)


@attrs.define
class HandSender:
    """A peer that sends whatever it likes, over a real group."""

    line: Line
    group: PairGroup | None
    staging: Staging
    wake: int

    def announce(
        self,
        lease: LeaseId,
        num_bytes: int,
        table: Int64Array,
        notify: bytes | None = None,
    ) -> Kind:
        """What the receiver answers to this chunk."""
        head = ChunkHead(lease, num_bytes, table, True, notify)
        self.line.send(Kind.CHUNK, head.encode())
        return self.hear()

    def deliver(self, data: bytes) -> None:
        self.staging.host[: len(data)] = np.frombuffer(data, np.uint8)
        assert self.group is not None
        self.group.send(self.staging, len(data), SOON_S)
        self.line.send(Kind.SENT)

    def hear(self) -> Kind:
        return self.line.reply(*Kind)[0]

    def die(self) -> None:
        """As a process that is killed: without a word."""
        self.group = None
        self.line.channel.close()

    def close(self) -> None:
        self.line.channel.close()
        os.close(self.wake)


def send_by_hand(
    descriptor: bytes, backend: Backend, me: Incarnation = THEM, number: int = 0
) -> HandSender:
    """Connect to a real receiver; everything up to the group is as it should be."""
    found = decode(descriptor, "torchdist")
    address = decode_address(found.blob)
    channel, _ = open_channel(me, found, address, SOON_S, number=number)
    wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    line = Line(channel, wake, SOON_S)
    group, chunk_bytes = build_group(line, backend)
    return HandSender(line, group, Staging(chunk_bytes, backend.device), wake)


class HandReceiver:
    """A peer that answers what the test says, for one caller. ``region`` 1 has ``size_bytes``."""

    def __init__(self, backend: Backend, size_bytes: int = 1 << 20) -> None:
        self.backend = backend
        self._listener = socket.create_server((HOST, 0))
        self._regions = {1: size_bytes}
        address = Address(
            backend.name, HOST, self._listener.getsockname()[1], secrets.token_bytes(16)
        )
        self.descriptor = EndpointDescriptor("torchdist", THEM, self._regions, address.encode())
        self.channel: Channel | None = None
        self.refusal = b""
        self._group: PairGroup | None = None
        self._staging = Staging(1 << 16, backend.device)
        self._thread = threading.Thread(target=self._welcome)
        self._thread.start()

    def _welcome(self) -> None:
        try:
            self.channel = Channel(self._listener.accept()[0])
        except OSError:
            return  # closed: nobody came
        assert self.hear()[0] is Kind.HELLO
        if self.refusal:
            self.say(Kind.REFUSED, self.refusal)
        else:
            self.say(Kind.WELCOME, Welcome(NOBODY, self._regions).encode())

    def welcomed(self) -> None:
        self._thread.join(SOON_S)

    def asked_anew(self, kind: Kind) -> Hello:
        """Answer so to who calls next; what it said."""
        other = Channel(self._listener.accept()[0])
        frame = other.receive(None, time.monotonic() + SOON_S)
        assert frame is not None
        body = Welcome(NOBODY, {}).encode() if kind is Kind.WELCOME else b"not you"
        other.send(kind, body, timeout_s=SOON_S)
        other.close()
        return decode_hello(frame[1])

    def hang_up(self) -> None:
        """Nobody listens here any more."""
        self._listener.close()

    def join_group(self) -> None:
        self.welcomed()
        assert self.hear()[0] is Kind.JOIN
        key = secrets.token_bytes(16)
        self.say(Kind.GROUP, Meeting(1 << 16, key).encode())

        def tell(key: str, value: bytes) -> None:
            self.say(Kind.KEY, encode_key(key, value))

        self._group = PairGroup(self.backend, 1, key, tell, lambda: self.hear()[1])

    def ready(self) -> tuple[ChunkHead, Work]:
        """Let one chunk be announced, and post its receive."""
        kind, body = self.hear()
        assert kind is Kind.CHUNK
        assert self._group is not None
        head = decode_chunk(body)
        work = self._group.post(self._staging, head.num_bytes)
        self.say(Kind.READY)
        return head, work

    def take(self) -> tuple[ChunkHead, bytes]:
        """Let one chunk come, up to SENT, and say nothing about its place."""
        head, work = self.ready()
        assert self._group is not None
        assert self.hear()[0] is Kind.SENT
        self._group.finish(work, self._staging, head.num_bytes, SOON_S)
        return head, self._staging.host[: head.num_bytes].tobytes()

    def die_ready(self) -> None:
        """As a process that is killed just when it promised to receive."""
        self._group = None
        kind, _ = self.hear()
        assert kind is Kind.CHUNK
        self.say(Kind.READY)
        assert self.channel is not None
        self.channel.close()

    def say(self, kind: Kind, body: bytes = b"") -> None:
        assert self.channel is not None
        self.channel.send(kind, body, timeout_s=SOON_S)

    def hear(self) -> tuple[Kind, bytes]:
        """Raises LinkOver when the sender said goodbye."""
        assert self.channel is not None
        frame = self.channel.receive(None, time.monotonic() + SOON_S)
        assert frame is not None, "nothing came"
        return frame

    def close(self) -> None:
        # Wakes a thread that still waits for its caller.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(SOON_S)
        self._listener.close()
        if self.channel is not None:
            self.channel.close()
        self._group = None
