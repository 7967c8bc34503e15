"""The contract of a KV data plane. Every guarantee here has a check in
``pdcore.testing.conformance``; a transport is what passes that suite.

Shape: non-blocking, one-sided writes from prefill into decode memory, offsets into
registered regions, capabilities declared. One thread (the worker loop) calls a
transport; its own threads, if any, only move bytes and ring the doorbell ``fileno()``.

Guarantees:
 G1 a notification is polled only after every byte of its batch is visible, at most
    once, FIFO per peer, never after FAILED or CANCELLED;
 G2 every handle yields exactly one terminal Completion, and exactly one
    ``quiesced`` mark: after it no byte of that handle can land any more (both may come
    in one Completion);
 G3 bounds, overlap and lease are checked before byte 0; a refused submit wrote nothing;
 G4 FAILED/CANCELLED leave bytes inside the lease undefined, outside it unchanged;
 G5 ``deregister`` refuses while a lease or handle refers to the region;
 G6 ``connect`` refuses a descriptor of another transport, version or incarnation;
 G7 ``close`` is idempotent, bounded, and leaves no thread, fd or memory segment.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Protocol

import attrs

from pdcore.kv.plan import Int64Array, WriteBatch
from pdcore.types import Incarnation, LeaseId


class Revocation(enum.Enum):
    """How the right to write ends (transports notes, section 3)."""

    #: The receiver's own code places bytes and checks the lease: revoke is immediate.
    RECEIVER_ENFORCED = "receiver_enforced"
    #: Only the sender can say that nothing lands any more (or its death with fence).
    SENDER_ACK = "sender_ack"
    #: Nobody can say when the writes of a dead sender have ended: blocks stay out for a declared
    #: period then. A living one says it by its quiesced marks, which come after its own doubt.
    QUARANTINE = "quarantine"


@attrs.frozen
class TransportCaps:
    one_sided: bool
    native_notify: bool
    revocation: Revocation
    #: ``submit`` may block for the whole copy (then keep batches small).
    submit_blocks: bool
    #: Descriptors of one call to the vendor, or to the kernel; 1 << 20 where there is none.
    #: ``submit`` takes any number: larger batches are cut inside the transport.
    max_batch: int
    #: Required alignment of registered buffers in bytes.
    alignment: int
    #: A peer's death is reported as PeerDied within ``death_detection_s``.
    detects_peer_death: bool
    #: After PeerDied nothing of that peer lands any more.
    death_fences: bool
    #: Only meaningful for QUARANTINE.
    quarantine_s: float = 0.0
    device_kinds: tuple[str, ...] = ("cpu",)
    cross_host: bool = False
    #: ``fileno`` is a descriptor until ``close``. Without one, ``poll`` is called every
    #: millisecond.
    doorbell: bool = True

    def as_json(self) -> dict[str, object]:
        """For reports: plain values only."""
        return {**attrs.asdict(self), "revocation": self.revocation.value}


@attrs.frozen
class Region:
    """Registered memory. ``buffer`` is writable, one byte per item; empty where the memory is a
    device's, which this process cannot read."""

    region_id: int
    size_bytes: int
    buffer: memoryview = attrs.field(repr=False, eq=False)


@attrs.frozen
class DeviceBuffer:
    """Memory of an NPU or a GPU, such as a tensor's ``data_ptr()`` and ``nbytes``. It must stay
    where it is until it is deregistered; nothing here looks into it."""

    address: int
    size_bytes: int
    readonly: bool = False


@attrs.frozen(eq=False)
class RemoteLease:
    """What a grant allows: byte ranges [start, end) per remote region, sorted, disjoint.

    ``ranges[region_id]`` has shape (n, 2), int64.
    """

    lease: LeaseId
    ranges: dict[int, Int64Array]


@attrs.frozen
class PeerSession:
    """An open way to one process life of a peer; belongs to one incarnation (rule 7)."""

    session_id: int
    incarnation: Incarnation


class HandleStatus(enum.Enum):
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


@attrs.frozen
class Completion:
    """A terminal status of a handle. ``quiesced`` False: bytes may still land; a second
    event for the same handle (same status, quiesced True) follows."""

    handle: int
    status: HandleStatus
    quiesced: bool
    detail: str = ""


@attrs.frozen
class Notification:
    """Wake-up from a peer (never the completion itself: that is STATUS Done)."""

    incarnation: Incarnation
    payload: bytes


@attrs.frozen
class PeerDied:
    """The process behind a session is gone; ``fenced``: and nothing of it can land."""

    incarnation: Incarnation
    fenced: bool
    detail: str = ""


TransportEvent = Completion | Notification | PeerDied


class Memory(Protocol):
    """Registered memory of this process."""

    def allocate(self, size_bytes: int) -> Region:
        """Zeroed, pre-faulted, registered memory. Raises TransportError when there is
        not enough (never SIGBUS later)."""
        ...

    def register(self, buffer: memoryview | DeviceBuffer) -> Region:
        """Register existing memory: a source, and where it is writable a target too, unless
        the transport says that its targets come from ``allocate``. Raises TransportError when
        this transport cannot: a device's memory where ``device_kinds`` do not name it."""
        ...

    def deregister(self, region: Region) -> None: ...

    def descriptor(self) -> bytes:
        """Everything a peer needs to connect and to bound-check: magic, version,
        transport name, incarnation, regions (id, length), opaque back-end blob."""
        ...


class Writer(Protocol):
    """The sending side: sessions and one-sided writes."""

    def connect(self, descriptor: bytes) -> PeerSession:
        """Bounded. Raises PeerGone when nobody answers, TransportError when refused."""
        ...

    def disconnect(self, session: PeerSession) -> None:
        """Live handles fail (and quiesce); idempotent."""
        ...

    def submit(
        self,
        session: PeerSession,
        batches: Sequence[WriteBatch],
        lease: RemoteLease,
        notify: bytes | None = None,
    ) -> int:
        """Start one transfer, return its handle (> 0). Zero batches or zero bytes are
        legal and complete. Raises TransportError (PeerGone) when refused before byte 0."""
        ...

    def cancel(self, handle: int) -> None:
        """Stop issuing; idempotent; a Completion follows unless one already came."""
        ...


class Target(Protocol):
    """The receiving side: which writes our memory accepts."""

    def grant(self, lease: RemoteLease) -> None:
        """Receiver side: these ranges of OUR regions may be written under this lease."""
        ...

    def revoke(self, lease: LeaseId) -> bool:
        """Receiver side, local: True when from now on nothing of the lease can land
        (RECEIVER_ENFORCED); False when only the sender can tell."""
        ...

    def release(self, lease: LeaseId) -> None:
        """Receiver side: the lease is over (its writers quiesced); forget it."""
        ...


class Transport(Memory, Writer, Target, Protocol):
    """One data plane of one process life: memory, writer and target in one."""

    @property
    def name(self) -> str: ...

    @property
    def caps(self) -> TransportCaps: ...

    @property
    def incarnation(self) -> Incarnation: ...

    def poll(self) -> list[TransportEvent]:
        """Everything that happened since the last call; never blocks."""
        ...

    def fileno(self) -> int | None:
        """A descriptor readable when ``poll`` has something; None where no ``doorbell`` is
        declared (poll always), and after ``close``."""
        ...

    def close(self, timeout_s: float = 5.0) -> list[str]:
        """Cancel, wait bounded, free. Returns what had to be left behind, usually []."""
        ...
