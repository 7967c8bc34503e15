"""KV over torch.distributed: whatever moves tensors between two processes, gloo here, HCCL on
Ascend NPUs.

torch.distributed is two-sided, cannot cancel, and its waits may hang (what gloo really
does is written in torchdist_group). Around it:

- two processes know each other's endpoint only. The receiver listens (torchdist_receiver);
  the sender dials, proves by a token that it was given the descriptor, and both build a
  group of two on their link's thread, since that blocks;
- a control connection per pair announces each chunk and where it belongs, says when its
  receive is posted and when it was placed, and ends with the process: that is how death is
  seen, and how nobody waits in the group for somebody who is not there;
- blocks are gathered into a staging buffer, moved as one message, and scattered by the
  receiver, who looks at its lease for every chunk. So revocation is RECEIVER_ENFORCED, and
  one_sided is declared missing: the receiver's process takes part in every transfer;
- a notification travels with its last chunk and is told once that is in place.

Missing, and declared so or said here: no cancel within a chunk (it ends at the next one), no
encryption and no authentication of the bytes in the group (run it in a network of your
own), device memory only as staging: regions are host memory.
"""

from __future__ import annotations

import atexit
import importlib.util
import ipaddress
import os
import socket
import sys
import time
import weakref
from collections.abc import Sequence
from typing import Final

from pdcore.errors import TransportError
from pdcore.kv.plan import WriteBatch
from pdcore.transports.base import (
    DeviceBuffer,
    PeerSession,
    Region,
    RemoteLease,
    Revocation,
    TransportCaps,
    TransportEvent,
)
from pdcore.transports.descriptor import EndpointDescriptor, decode
from pdcore.transports.regions import RegionTable, zeroed_pages
from pdcore.transports.registry import TransportPlugin, WorkerPlace
from pdcore.transports.torchdist_courier import (
    CHUNK_BYTES,
    CONNECT_TIMEOUT_S,
    STALL_TIMEOUT_S,
    Limits,
)
from pdcore.transports.torchdist_group import make_backend
from pdcore.transports.torchdist_hub import Ended, Hub
from pdcore.transports.torchdist_receiver import Desk, Door
from pdcore.transports.torchdist_sender import Sender
from pdcore.transports.torchdist_wire import (
    MAX_ROWS,
)
from pdcore.types import Incarnation, LeaseId

NAME: Final = "torchdist"
#: What a transport that nobody closed may take at the end of its process.
EXIT_TIMEOUT_S: Final = 1.0

CAPS: Final = TransportCaps(
    one_sided=False,
    native_notify=True,
    revocation=Revocation.RECEIVER_ENFORCED,
    submit_blocks=False,
    max_batch=MAX_ROWS,
    alignment=1,
    detects_peer_death=True,
    death_fences=True,
    cross_host=True,
)


def why_unavailable() -> str | None:
    """One sentence for ``pdcore doctor``, or None. Finds torch without importing it."""
    if sys.platform != "linux":
        return f"torchdist needs Linux (eventfd); this is {sys.platform}"
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    return None


class TorchDistTransport:
    """See :class:`pdcore.transports.base.Transport`. One thread uses it; one of its own
    takes callers, and one per session and direction moves bytes.

    ``backend`` is gloo or hccl, the same on both sides; ``host`` the numeric address of
    this machine at which peers reach it, ``port`` where it takes callers (0: a free one; the
    groups take a free one for all); ``device_index`` the NPU of the hccl backend.
    For the rest see Limits. Raises TransportError where it does not work.
    """

    name = NAME
    caps = CAPS

    def __init__(
        self,
        incarnation: Incarnation,
        *,
        backend: str = "gloo",
        host: str = "127.0.0.1",
        port: int = 0,
        device_index: int = 0,
        chunk_bytes: int = CHUNK_BYTES,
        stall_timeout_s: float = STALL_TIMEOUT_S,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
    ) -> None:
        limits = _limits(chunk_bytes, stall_timeout_s, connect_timeout_s)
        self.incarnation = incarnation
        _check_address(host, port)
        self._regions = RegionTable()
        backend_ = make_backend(backend, host, device_index)
        self._hub = Hub()
        self._desk = Desk(incarnation, self._regions, self._hub, backend_, host, port, limits)
        self._sender = Sender(incarnation, self._regions, self._hub, backend_, limits)
        self._door: Door | None = None
        self._closed = False
        _living.add(self)

    def allocate(self, size_bytes: int) -> Region:
        _check_open(self._closed)
        memory = zeroed_pages(size_bytes)
        with self._hub.lock:
            return self._regions.add(memory, target=True)

    def register(self, buffer: memoryview | DeviceBuffer) -> Region:
        """Host memory; a target when it is writable."""
        _check_open(self._closed)
        with self._hub.lock:
            return self._regions.add(buffer, target=not buffer.readonly)

    def deregister(self, region: Region) -> None:
        with self._hub.lock:
            self._regions.remove(region)

    def descriptor(self) -> bytes:
        _check_open(self._closed)
        if self._door is None:
            self._door = Door(self._desk)
        with self._hub.lock:
            regions = self._regions.targets()
        blob = self._door.address.encode()
        return EndpointDescriptor(NAME, self.incarnation, regions, blob).encode()

    def connect(self, descriptor: bytes) -> PeerSession:
        _check_open(self._closed)
        return self._sender.connect(decode(descriptor, NAME))

    def disconnect(self, session: PeerSession) -> None:
        self._sender.disconnect(session)

    def submit(
        self,
        session: PeerSession,
        batches: Sequence[WriteBatch],
        lease: RemoteLease,
        notify: bytes | None = None,
    ) -> int:
        _check_open(self._closed)
        return self._sender.submit(session, batches, lease, notify)

    def cancel(self, handle: int) -> None:
        self._sender.cancel(handle)

    def grant(self, lease: RemoteLease) -> None:
        with self._hub.lock:
            self._regions.grant(lease)

    def revoke(self, lease: LeaseId) -> bool:
        """Waits at most for one chunk that is being put in place."""
        with self._hub.lock:
            self._regions.revoke(lease)
        return True

    def release(self, lease: LeaseId) -> None:
        with self._hub.lock:
            self._regions.release(lease)

    def poll(self) -> list[TransportEvent]:
        return [
            self._sender.ended(item) if isinstance(item, Ended) else item
            for item in self._hub.drain()
        ]

    def fileno(self) -> int | None:
        return None if self._closed else self._hub.fileno()

    def close(self, timeout_s: float = 5.0) -> list[str]:
        """Handles that end here are still polled. Waits for the chunks that are on their
        way; of those whose receiver does not answer, and of threads inside
        torch.distributed, the result tells."""
        if self._closed:
            return []
        self._closed = True
        deadline = time.monotonic() + timeout_s
        left = self._sender.close(deadline)
        if self._door is not None:
            left += self._door.close(deadline)
        self._desk.backend.close()
        self._hub.close(keep_bell=bool(left))
        with self._hub.lock:
            self._regions.clear()
        return left


def _check_open(closed: bool) -> None:
    if closed:
        raise TransportError("this transport is closed")


def _limits(chunk_bytes: int, stall_timeout_s: float, connect_timeout_s: float) -> Limits:
    """Raises TransportError, naming the option."""
    try:
        return Limits(chunk_bytes, stall_timeout_s, connect_timeout_s)
    except ValueError as error:
        raise TransportError(f"torchdist: {error}") from error


def _check_address(host: str, port: int) -> None:
    if not 0 <= port <= 65535:
        raise TransportError(f"port must be 0 (a free one) to 65535, got {port}")
    try:
        ipaddress.ip_address(host)
    except ValueError:
        raise TransportError(
            f"host: {host!r} is not a numeric address; name the one at which peers reach this "
            "machine, such as 10.0.0.5"
        ) from None


def _options_at(place: WorkerPlace) -> dict[str, object]:
    # Not the address it binds: torch's stores and groups name the one they listen at.
    return {"host": place.advertise_host}


def _fixed_address() -> dict[str, object]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return {"port": listener.getsockname()[1]}


#: Every transport that may be open. A forked child that holds a copy of a connection hides its
#: parent's death, and has none of the threads.
_living: weakref.WeakSet[TorchDistTransport] = weakref.WeakSet()


def _abandon_all() -> None:
    for transport in list(_living):
        if not transport._closed:
            transport._closed = True
            transport._sender.abandon()
            if transport._door is not None:
                transport._door.abandon()


def _close_all() -> None:
    """At the end of the interpreter: a daemon thread that comes back from torch's code into
    an interpreter that is gone would abort the process."""
    for transport in list(_living):
        transport.close(EXIT_TIMEOUT_S)


atexit.register(_close_all)
if sys.platform == "linux":
    os.register_at_fork(after_in_child=_abandon_all)

PLUGIN = TransportPlugin(
    create=TorchDistTransport,
    why_unavailable=why_unavailable,
    options_at=_options_at,
    caps=CAPS,
    remedy="pip install 'pdcore[torch]', on Linux",
    cycles=30,
    fixed_address=_fixed_address,
)
