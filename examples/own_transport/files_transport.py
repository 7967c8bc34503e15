"""A KV transport of your own: KV moves through files that both processes map."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import mmap
import os
import shutil
import struct
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs
import numpy as np

from pdcore.errors import PeerGone, TransportError
from pdcore.kv.plan import WriteBatch
from pdcore.transports.base import (
    Completion,
    DeviceBuffer,
    HandleStatus,
    Notification,
    PeerDied,
    PeerSession,
    Region,
    RemoteLease,
    Revocation,
    TransportCaps,
    TransportEvent,
)
from pdcore.transports.check import plan_copies
from pdcore.transports.copy import ByteArray, copy_steps
from pdcore.transports.descriptor import EndpointDescriptor, decode
from pdcore.transports.regions import RegionTable
from pdcore.transports.registry import TransportPlugin
from pdcore.types import Incarnation, LeaseId

CAPS = TransportCaps(
    one_sided=True,
    native_notify=True,
    revocation=Revocation.SENDER_ACK,
    submit_blocks=True,
    max_batch=1 << 20,
    alignment=1,
    detects_peer_death=True,
    death_fences=True,
    doorbell=False,
)


@contextlib.contextmanager
def asking() -> Iterator[None]:
    """What the system refuses, for want of descriptors or of room, is a TransportError:
    anything else would end the worker that asked."""
    try:
        yield
    except OSError as error:
        raise TransportError(f"{error.filename or 'this process'}: {error.strerror}") from error


@contextlib.contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)


class Life:
    """Whether a process is alive: it holds a lock that the kernel takes from the dead."""

    def __init__(self, home: Path) -> None:
        self._fd: int | None = None
        with contextlib.suppress(FileNotFoundError):
            self._fd = os.open(home / "alive", os.O_RDONLY | os.O_CLOEXEC)

    def is_over(self) -> bool:
        if self._fd is None:
            return True
        try:
            fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        return True

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)


HOME, FROM = "files-transport-", "from-"


def sweep(root: Path) -> None:
    """Remove what processes that were killed have left behind."""
    for home in root.glob(f"{HOME}*"):
        with contextlib.suppress(OSError), contextlib.closing(Life(home)) as life:
            if life.is_over():
                shutil.rmtree(home, ignore_errors=True)


@attrs.frozen(eq=False)
class Route:
    """An open session: the peer's memory, mapped, and our file in its home."""

    peer: Incarnation
    life: Life
    memory: dict[int, ByteArray]
    mailbox: int

    @property
    def sizes(self) -> dict[int, int]:
        return {region: len(array) for region, array in self.memory.items()}

    def close(self) -> None:
        self.life.close()
        os.close(self.mailbox)


#: In front of each notification: the lease it belongs to, and its length.
HEAD = struct.Struct("<QI")


class Inbox:
    """The file in which one peer writes its notifications for us."""

    def __init__(self, peer: Incarnation, life: Life, path: Path) -> None:
        self.peer, self.life, self._path = peer, life, path
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._unread = b""

    def read(self) -> Iterator[tuple[int, bytes]]:
        """Whole ones only: what a peer was killed in the middle of is never read."""
        while more := os.read(self._fd, 1 << 16):
            self._unread += more
        while len(self._unread) >= HEAD.size:
            counter, length = HEAD.unpack_from(self._unread)
            if len(self._unread) < HEAD.size + length:
                return
            yield counter, self._unread[HEAD.size : HEAD.size + length]
            self._unread = self._unread[HEAD.size + length :]

    def close(self) -> None:
        self.life.close()
        os.close(self._fd)
        self._path.unlink(missing_ok=True)


class FilesTransport:
    """See pdcore.transports.base.Transport."""

    name = "files"
    caps = CAPS

    def __init__(self, incarnation: Incarnation, *, directory: str = "") -> None:
        self.incarnation = incarnation
        self._root = Path(directory or tempfile.gettempdir())
        with asking():
            self._move_in(incarnation)
        self._regions = RegionTable()
        self._routes: dict[int, Route] = {}
        self._inboxes: dict[Incarnation, Inbox] = {}
        self._pins: list[int] = []
        self._events: list[TransportEvent] = []
        self._ids = itertools.count(1)
        self._closed = False

    def _move_in(self, incarnation: Incarnation) -> None:
        sweep(self._root)
        self._home = self._home_of(incarnation)
        unlocked = self._root / f"new-{self._home.name}"
        unlocked.mkdir(mode=0o700)
        self._alive = os.open(unlocked / "alive", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._alive, fcntl.LOCK_EX)
        unlocked.rename(self._home)

    def _home_of(self, incarnation: Incarnation) -> Path:
        return self._root / f"{HOME}{incarnation.hex()}"

    # --- memory ---

    def allocate(self, size_bytes: int) -> Region:
        self._check_open()
        room = shutil.disk_usage(self._home).free
        if not 0 < size_bytes <= room:
            raise TransportError(f"cannot allocate {size_bytes} bytes: {room} are free")
        made = self._home / "new"
        with asking(), contextlib.ExitStack() as undo:
            with opened(made, os.O_CREAT | os.O_EXCL | os.O_RDWR) as fd:
                undo.callback(made.unlink)
                os.posix_fallocate(fd, 0, size_bytes)
                region = self._regions.add(memoryview(mmap.mmap(fd, size_bytes)), target=True)
            undo.pop_all()
            made.rename(self._home / f"{region.region_id}")
        return region

    def register(self, buffer: memoryview | DeviceBuffer) -> Region:
        self._check_open()
        return self._regions.add(buffer, target=False)

    def deregister(self, region: Region) -> None:
        self._regions.remove(region)
        (self._home / f"{region.region_id}").unlink(missing_ok=True)

    def descriptor(self) -> bytes:
        self._check_open()
        return EndpointDescriptor(self.name, self.incarnation, self._regions.targets()).encode()

    # --- writer ---

    def connect(self, descriptor: bytes) -> PeerSession:
        self._check_open()
        peer = decode(descriptor, self.name)
        home = self._home_of(peer.incarnation)
        with asking(), contextlib.ExitStack() as undo:
            life = undo.enter_context(contextlib.closing(Life(home)))
            if life.is_over():
                raise PeerGone(f"{home.name}: that process has ended")
            try:
                memory = {
                    region: self._map(home, region, size) for region, size in peer.regions.items()
                }
                mailbox = os.open(
                    home / f"{FROM}{self.incarnation.hex()}",
                    os.O_CREAT | os.O_APPEND | os.O_WRONLY | os.O_CLOEXEC,
                    0o600,
                )
            except FileNotFoundError as error:
                raise TransportError(f"stale descriptor: no {error.filename}") from error
            undo.pop_all()
        session = PeerSession(next(self._ids), peer.incarnation)
        self._routes[session.session_id] = Route(peer.incarnation, life, memory, mailbox)
        return session

    def _map(self, home: Path, region: int, size: int) -> ByteArray:
        with opened(home / f"{region}", os.O_RDWR) as fd:
            if os.fstat(fd).st_size != size:
                raise TransportError(f"stale descriptor: region {region} has not {size} bytes")
            return np.frombuffer(mmap.mmap(fd, size), np.uint8)

    def disconnect(self, session: PeerSession) -> None:
        route = self._routes.pop(session.session_id, None)
        if route is not None:
            route.close()

    def submit(
        self,
        session: PeerSession,
        batches: Sequence[WriteBatch],
        lease: RemoteLease,
        notify: bytes | None = None,
    ) -> int:
        self._check_open()
        route = self._routes.get(session.session_id)
        if route is None:
            raise PeerGone("the session is closed, or its peer is gone: connect again")
        plan = plan_copies(batches, self._regions.sizes, route.sizes, lease)
        for _ in copy_steps(plan, self._regions.arrays, route.memory):
            pass
        if notify is not None:
            with asking():
                os.write(route.mailbox, HEAD.pack(lease.lease.counter, len(notify)) + notify)
        handle = next(self._ids)
        used = [batch.local_region for batch in batches]
        self._regions.pin(used)
        self._pins += used
        self._events.append(Completion(handle, HandleStatus.DONE, quiesced=True))
        return handle

    def cancel(self, handle: int) -> None:
        """Nothing is in flight once ``submit`` has returned."""

    # --- target ---

    def grant(self, lease: RemoteLease) -> None:
        self._regions.grant(lease)

    def revoke(self, lease: LeaseId) -> bool:
        self._regions.revoke(lease)
        return False

    def release(self, lease: LeaseId) -> None:
        self._regions.release(lease)

    # --- events ---

    def poll(self) -> list[TransportEvent]:
        if not self._closed:
            self._find_inboxes()
            ways: list[Route | Inbox] = [*self._routes.values(), *self._inboxes.values()]
            over = {way.peer for way in ways if way.life.is_over()}
            # Looked at first: whatever the dead have written is there to be read now.
            for inbox in self._inboxes.values():
                self._read(inbox)
            for peer in over:
                self._bury(peer)
        events, self._events = self._events, []
        self._regions.unpin(self._pins)
        self._pins = []
        return events

    def _find_inboxes(self) -> None:
        """Without a descriptor for one, the next poll finds it."""
        with contextlib.suppress(OSError):
            for path in self._home.glob(f"{FROM}*"):
                peer = Incarnation(bytes.fromhex(path.name.removeprefix(FROM)))
                if peer not in self._inboxes:
                    with contextlib.ExitStack() as undo:
                        life = undo.enter_context(contextlib.closing(Life(self._home_of(peer))))
                        self._inboxes[peer] = Inbox(peer, life, path)
                        undo.pop_all()

    def _read(self, inbox: Inbox) -> None:
        for counter, payload in inbox.read():
            if self._regions.granted(LeaseId(self.incarnation, counter)) is not None:
                self._events.append(Notification(inbox.peer, payload))

    def _bury(self, peer: Incarnation) -> None:
        """Its copies were its own: with the process ended, nothing of it can land."""
        for session_id, route in list(self._routes.items()):
            if route.peer == peer:
                self._routes.pop(session_id).close()
        if peer in self._inboxes:
            self._inboxes.pop(peer).close()
        self._events.append(PeerDied(peer, fenced=True, detail="it holds its lock no more"))

    def fileno(self) -> int | None:
        return None

    def close(self, timeout_s: float = 5.0) -> list[str]:
        if self._closed:
            return []
        self._closed = True
        ways: list[Route | Inbox] = [*self._routes.values(), *self._inboxes.values()]
        for way in ways:
            way.close()
        self._routes.clear()
        self._inboxes.clear()
        self._regions.clear()
        self._pins = []
        shutil.rmtree(self._home, ignore_errors=True)
        os.close(self._alive)
        return [str(self._home)] if self._home.exists() else []

    def _check_open(self) -> None:
        if self._closed:
            raise TransportError("this transport is closed")


PLUGIN = TransportPlugin(FilesTransport, why_unavailable=lambda: None, caps=CAPS)
