"""How the conformance suite gets transports: two in this process, and peers that can be
killed, stopped and restarted.

A new transport needs no harness of its own: :class:`RegistryHarness` takes its name and
starts real processes. :class:`LoopbackHarness` plays the same parts inside one process.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Mapping
from types import TracebackType
from typing import Protocol

import numpy as np

from pdcore.errors import PeerGone, TransportError
from pdcore.kv.plan import Int64Array, WriteBatch
from pdcore.testing.transport_peer import Json, encode_event, encode_lease, pattern
from pdcore.testing.transport_watch import Watched
from pdcore.transports.base import PeerSession, Region, RemoteLease, Revocation, Transport
from pdcore.transports.loopback import LoopbackTransport
from pdcore.transports.loopback_fabric import LoopbackFabric
from pdcore.transports.registry import load
from pdcore.types import Incarnation, LeaseId

#: Longest wait for an answer of a peer process; a hang is a failed check, not a stuck one.
PEER_TIMEOUT_S = 60.0


class RemotePeer(Protocol):
    """A transport with a process life of its own. Requests raise TransportError as the
    transport's methods do."""

    incarnation: Incarnation

    def allocate(self, size_bytes: int) -> int: ...
    def fill(self, region: int, seed: int) -> None: ...
    def checksum(self, region: int) -> int: ...
    def descriptor(self) -> bytes: ...
    def connect(self, descriptor: bytes) -> None: ...
    def grant(self, lease: RemoteLease) -> None: ...
    def submit(
        self,
        local: int,
        remote: int,
        pieces: Int64Array,
        lease: RemoteLease,
        notify: bytes | None = None,
    ) -> int: ...
    def events(self) -> list[Json]:
        """What its transport reported since the last call; drives it where needed."""
        ...

    def kill(self) -> None: ...
    def stop(self) -> None: ...
    def resume(self) -> None: ...
    def close(self) -> None: ...


class TransportHarness(Protocol):
    """What :func:`pdcore.testing.conformance.run_conformance` needs."""

    name: str
    #: Connect/close cycles of the growth check.
    cycles: int
    #: How long "nothing more happens" is watched.
    quiet_s: float

    def create(self) -> Transport:
        """A fresh transport with an incarnation of its own, in this process."""
        ...

    def peer(self) -> RemotePeer: ...

    def successor(self, peer: RemotePeer) -> RemotePeer:
        """A new life of a peer that is dead, at the same address where the transport lets one
        choose it."""
        ...


class Pair:
    """A sender and a receiver in this process, connected, with one region each."""

    def __init__(self, harness: TransportHarness, size_bytes: int = 1 << 16) -> None:
        self.sender = Watched(harness.create())
        self.receiver = Watched(harness.create())
        self.quiet_s = harness.quiet_s
        self.source = self.sender.transport.allocate(size_bytes)
        self.target = self.receiver.transport.allocate(size_bytes)
        self.source.buffer[:] = pattern(size_bytes, 1)
        self.session = self.sender.transport.connect(self.receiver.transport.descriptor())
        self._leases = 0

    def lease(self, *ranges: tuple[int, int], region: Region | None = None) -> RemoteLease:
        """Granted by the receiver; ranges are (start, end), default the whole target."""
        target = self.target if region is None else region
        return self.lease_of({target: list(ranges) or [(0, target.size_bytes)]})

    def lease_of(self, parts: dict[Region, list[tuple[int, int]]]) -> RemoteLease:
        self._leases += 1
        lease = make_lease(
            self.receiver.transport.incarnation,
            self._leases,
            {region.region_id: rows for region, rows in parts.items()},
        )
        self.receiver.transport.grant(lease)
        return lease

    def batch(self, *pieces: tuple[int, ...]) -> WriteBatch:
        """Source to target; pieces as (local, remote, bytes[, rows, lstride, rstride])."""
        return make_batch(self.source, self.target, *pieces)

    def submit(self, lease: RemoteLease, *batches: WriteBatch, notify: bytes | None = None) -> int:
        return self.sender.transport.submit(self.session, batches, lease, notify)

    def __enter__(self) -> Pair:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        left = self.sender.transport.close() + self.receiver.transport.close()
        if error is None:
            assert not left, f"close left {left}"


def make_batch(source: Region, target: Region, *pieces: tuple[int, ...]) -> WriteBatch:
    rows = [(*piece, *(1, 0, 0)[len(piece) - 3 :]) for piece in pieces]
    array = np.array(rows, np.int64).reshape(-1, 6)
    return WriteBatch(source.region_id, target.region_id, array)


def make_lease(
    incarnation: Incarnation, counter: int, ranges: dict[int, list[tuple[int, int]]]
) -> RemoteLease:
    arrays = {region: np.array(rows, np.int64).reshape(-1, 2) for region, rows in ranges.items()}
    return RemoteLease(LeaseId(incarnation, counter), arrays)


class LoopbackHarness:
    """Peers are endpoints of a fabric that dies, stops and resumes them."""

    def __init__(
        self, revocation: Revocation = Revocation.SENDER_ACK, *, cycles: int = 1000
    ) -> None:
        self.name = "loopback"
        self.cycles = cycles
        self.quiet_s = 0.0
        self.revocation = revocation
        self._fabric = LoopbackFabric()
        self._addresses: dict[Incarnation, str] = {}

    def create(self) -> Transport:
        incarnation = Incarnation(os.urandom(16))
        return LoopbackTransport(incarnation, self._fabric, revocation=self.revocation)

    def peer(self) -> RemotePeer:
        return self._peer_at(f"peer-{len(self._addresses)}")

    def successor(self, peer: RemotePeer) -> RemotePeer:
        return self._peer_at(self._addresses[peer.incarnation])

    def _peer_at(self, address: str) -> RemotePeer:
        incarnation = Incarnation(os.urandom(16))
        self._addresses[incarnation] = address
        transport = LoopbackTransport(
            incarnation, self._fabric, revocation=self.revocation, address=address
        )
        return LoopbackPeer(transport)


class LoopbackPeer:
    def __init__(self, transport: LoopbackTransport) -> None:
        self.incarnation = transport.incarnation
        self._transport = transport
        self._fabric = transport.fabric
        self._regions: dict[int, Region] = {}
        self._session: PeerSession | None = None
        self._record = Watched(transport)

    def allocate(self, size_bytes: int) -> int:
        region = self._transport.allocate(size_bytes)
        self._regions[region.region_id] = region
        return region.region_id

    def fill(self, region: int, seed: int) -> None:
        self._regions[region].buffer[:] = pattern(self._regions[region].size_bytes, seed)

    def checksum(self, region: int) -> int:
        return zlib.crc32(self._regions[region].buffer)

    def descriptor(self) -> bytes:
        return self._transport.descriptor()

    def connect(self, descriptor: bytes) -> None:
        self._session = self._transport.connect(descriptor)

    def grant(self, lease: RemoteLease) -> None:
        self._transport.grant(lease)

    def submit(
        self,
        local: int,
        remote: int,
        pieces: Int64Array,
        lease: RemoteLease,
        notify: bytes | None = None,
    ) -> int:
        assert self._session is not None, "connect first"
        batch = WriteBatch(local, remote, pieces)
        return self._transport.submit(self._session, [batch], lease, notify)

    def events(self) -> list[Json]:
        if self._fabric.faults(self.incarnation).stopped:
            return []
        return [encode_event(event) for event in self._transport.poll()]

    def kill(self) -> None:
        self._fabric.die(self.incarnation)

    def stop(self) -> None:
        self._fabric.faults(self.incarnation).stopped = True

    def resume(self) -> None:
        self._fabric.faults(self.incarnation).stopped = False

    def close(self) -> None:
        self._transport.close()


class RegistryHarness:
    """Any transport that has a name in :mod:`pdcore.transports.registry`. Raises ConfigError
    for an unknown one, and for one that cannot be imported."""

    def __init__(
        self, name: str, *, cycles: int = 1000, quiet_s: float = 0.03, **options: object
    ) -> None:
        self.name = name
        self.cycles = cycles
        self.quiet_s = quiet_s
        self.options = options
        # Once: to look through all installed packages takes longer than many a check.
        self._plugin = load(name)
        self._places: dict[Incarnation, Mapping[str, object]] = {}

    def create(self) -> Transport:
        return self._plugin.create(Incarnation(os.urandom(16)), **self.options)

    def peer(self) -> ProcessPeer:
        return self._peer_at(self._plugin.fixed_address())

    def successor(self, peer: RemotePeer) -> ProcessPeer:
        return self._peer_at(self._places[peer.incarnation])

    def _peer_at(self, place: Mapping[str, object]) -> ProcessPeer:
        peer = ProcessPeer(self.name, {**self.options, **place})
        self._places[peer.incarnation] = place
        return peer


class ProcessPeer:
    """:mod:`pdcore.testing.transport_peer` in a child process, over its pipes."""

    def __init__(self, name: str, options: dict[str, object]) -> None:
        # The child sees the same packages, wherever this process found them.
        program = (
            f"import sys; sys.path[:] = {sys.path!r}; "
            "from pdcore.testing.transport_peer import main; main()"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, name, json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._events: list[Json] = []
        self._replies: list[Json] = []
        self._buffered = b""
        try:
            incarnation = self.request("incarnation")
        except PeerGone:
            self.close()
            raise
        self.incarnation = Incarnation(bytes.fromhex(str(incarnation)))

    def allocate(self, size_bytes: int) -> int:
        region = self.request("allocate", size=size_bytes)
        assert isinstance(region, int)
        return region

    def fill(self, region: int, seed: int) -> None:
        self.request("fill", region=region, seed=seed)

    def checksum(self, region: int) -> int:
        value = self.request("checksum", region=region)
        assert isinstance(value, int)
        return value

    def descriptor(self) -> bytes:
        return bytes.fromhex(str(self.request("descriptor")))

    def connect(self, descriptor: bytes) -> None:
        self.request("connect", descriptor=descriptor.hex())

    def grant(self, lease: RemoteLease) -> None:
        self.request("grant", lease=encode_lease(lease))

    def submit(
        self,
        local: int,
        remote: int,
        pieces: Int64Array,
        lease: RemoteLease,
        notify: bytes | None = None,
    ) -> int:
        handle = self.request(
            "submit",
            local=local,
            remote=remote,
            pieces=pieces.tolist(),
            lease=encode_lease(lease),
            notify=None if notify is None else notify.hex(),
        )
        assert isinstance(handle, int)
        return handle

    def events(self) -> list[Json]:
        while self._read(0.0):
            pass
        events, self._events = self._events, []
        return events

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(PEER_TIMEOUT_S)

    def stop(self) -> None:
        """Returns when the kernel says that it is stopped."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(PEER_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self.process.stdout.close()

    def request(self, do: str, **arguments: object) -> object:
        """One request of PeerServer and its answer. Raises what the transport raised, and
        PeerGone when the process does not answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
        self.process.stdin.flush()
        deadline = time.monotonic() + PEER_TIMEOUT_S
        while not self._replies:
            if not self._read(max(0.0, deadline - time.monotonic())):
                raise PeerGone(f"peer process {self.process.pid} did not answer {do!r}")
        message = self._replies.pop(0)
        if "error" in message:
            kind = PeerGone if message["kind"] == "PeerGone" else TransportError
            raise kind(str(message["error"]))
        return message["reply"]

    def _read(self, timeout_s: float) -> bool:
        """Take in what the child wrote; False when there was nothing, or it is gone."""
        assert self.process.stdout is not None
        fd = self.process.stdout.fileno()
        if not select.select([fd], [], [], timeout_s)[0]:
            return False
        received = os.read(fd, 1 << 16)
        *lines, self._buffered = (self._buffered + received).split(b"\n")
        for line in lines:
            message: Json = json.loads(line)
            event = message.get("event")
            if isinstance(event, dict):
                self._events.append(event)
            else:
                self._replies.append(message)
        return bool(received)
