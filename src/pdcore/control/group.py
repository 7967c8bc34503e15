"""The links within a group of ranks on one host: a star over ZeroMQ, the hub in its middle.

The leader names a fresh link for every life of a group: ``ipc://@name#secret``, an abstract
socket that needs no file and no port. Whoever does not know the secret is not heard. There are
no heartbeats and no time-outs here: a link on one host breaks only with one of its processes,
which the leader sees, and a rank that was stopped for a minute must find everything that was
said to it. Messages are bounded by what a round can hold: one ballot a rank.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Final

import attrs
import msgspec
import zmq

from pdcore.control.ballots import MAX_GROUP_BYTES
from pdcore.control.link import LINK_OPTIONS, WorkerId, pack_identity, unpack_identity
from pdcore.control.zmq import OwnerCheck, Socket, configure, new_context
from pdcore.errors import ConfigError, GroupBroken
from pdcore.scheduler.lockstep import HUB

_SECRET_BYTES: Final = 16
#: How often a rank that waits for the others looks whether it was told to stop, in seconds.
_LOOK_S: Final = 0.1
_OPTIONS: Final = attrs.evolve(LINK_OPTIONS, max_message_bytes=MAX_GROUP_BYTES)


class _Hello(msgspec.Struct, frozen=True, array_like=True):
    """A rank is there, and can hold so many KV blocks."""

    num_blocks: int


class ZmqGroupPort:
    """One rank's end; the worker loop owns it. ``member.rank`` counts within the group.

    Raises ConfigError for a malformed link, and at the hub when it is taken."""

    def __init__(
        self,
        link: str,
        member: WorkerId,
        size: int,
        *,
        thread_id: Callable[[], int] | None = None,
    ) -> None:
        where, secret = _split(link)
        self._owner = OwnerCheck("the link to its group", thread_id)
        self._rank, self._size, self._secret = member.rank, size, secret
        self._is_hub = member.rank == HUB
        self._identities: dict[int, bytes] = {}
        self._context = new_context(16)
        self._socket: Socket = self._context.socket(zmq.ROUTER if self._is_hub else zmq.DEALER)
        configure(self._socket, _OPTIONS)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, 0)
        try:
            if self._is_hub:
                self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
                self._socket.bind(where)
            else:
                self._socket.setsockopt(zmq.ROUTING_ID, pack_identity(member, secret))
                self._socket.connect(where)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"the link of the group cannot be opened: {error}") from None

    def meet(
        self, num_blocks: int, timeout_s: float, is_told_to_stop: Callable[[], bool] = bool
    ) -> int:
        """Wait for all ranks of this life; the KV blocks that each of them can hold. Once,
        before anything else. Raises GroupBroken when they have not met in time, and when this
        rank was told to stop meanwhile: another one may load its model for minutes."""
        until_s = time.monotonic() + timeout_s
        if not self._is_hub:
            self.send(HUB, msgspec.msgpack.encode(_Hello(num_blocks)))
            ((_, data),) = self._await(1, until_s, is_told_to_stop)
            return _read_hello(data).num_blocks
        others = self._await(self._size - 1, until_s, is_told_to_stop)
        least = min([num_blocks, *(_read_hello(data).num_blocks for _, data in others)])
        for rank in range(self._size):
            if rank != HUB:
                self.send(rank, msgspec.msgpack.encode(_Hello(least)))
        return least

    def send(self, rank: int, data: bytes) -> None:
        """See :class:`pdcore.group_worker.GroupPort`."""
        self._owner.check()
        try:
            if self._is_hub:
                self._socket.send_multipart([self._identities[rank], data], zmq.DONTWAIT)
            else:
                self._socket.send(data, zmq.DONTWAIT)
        except (KeyError, zmq.ZMQError) as error:
            raise GroupBroken(f"rank {rank} of the group cannot be reached: {error}") from None

    def receive(self) -> list[tuple[int, bytes]]:
        self._owner.check()
        return self._take(math.inf)

    def poll_interest(self) -> tuple[Socket, int]:
        """For :class:`pdcore.control.zmq.Poller`."""
        return self._socket, zmq.POLLIN

    def close(self) -> None:
        """Idempotent. What was said last still leaves: others play the same round."""
        self._socket.close(linger=200)
        self._context.term()

    def _await(
        self, count: int, until_s: float, is_told_to_stop: Callable[[], bool]
    ) -> list[tuple[int, bytes]]:
        found: list[tuple[int, bytes]] = []
        while len(found) < count:
            wait_s = min(until_s - time.monotonic(), _LOOK_S)
            if is_told_to_stop():
                raise GroupBroken(f"rank {self._rank} was told to stop before its group had met")
            if wait_s <= 0:
                raise GroupBroken(
                    f"rank {self._rank} of the group met {len(found)} of {count} ranks in time"
                )
            if self._socket.poll(int(wait_s * 1000) + 1):
                # No more than that: the hub may begin its first round before we look.
                found += self._take(count - len(found))
        return found

    def _take(self, limit: float) -> list[tuple[int, bytes]]:
        """At most ``limit`` messages, in order; the others stay where they are."""
        found: list[tuple[int, bytes]] = []
        while len(found) < limit:
            try:
                parts = self._socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                break
            sender = self._sender(parts)
            if sender is not None:
                found.append((sender, parts[-1]))
        return found

    def _sender(self, parts: list[bytes]) -> int | None:
        """The rank that speaks; None for a stranger."""
        if not self._is_hub:
            return HUB if len(parts) == 1 else None
        member = unpack_identity(parts[0], self._secret)
        if member is None or len(parts) != 2 or not 0 < member.rank < self._size:
            return None
        self._identities[member.rank] = parts[0]
        return member.rank

    def __repr__(self) -> str:
        return f"ZmqGroupPort(rank={self._rank}/{self._size})"


def _split(link: str) -> tuple[str, bytes]:
    where, _, secret = link.partition("#")
    try:
        raw = bytes.fromhex(secret)
    except ValueError:
        raw = b""
    if len(raw) != _SECRET_BYTES or not where.startswith("ipc://@"):
        raise ConfigError(
            f"group link {where!r} must be ipc://@name#secret, as the leader names it"
        )
    return where, raw


def _read_hello(data: bytes) -> _Hello:
    try:
        return msgspec.msgpack.decode(data, type=_Hello)
    except msgspec.DecodeError as error:
        raise GroupBroken(f"a rank of the group did not introduce itself: {error}") from None
