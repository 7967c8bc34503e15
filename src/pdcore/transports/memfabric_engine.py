"""memfabric's TransferEngine as an engine of one-sided writes.

The engine writes, and says at the end of the call whether all of it was put in place. It has no
notification, no cancel, no status and no sign of a peer's death; all of that is the core's
(onesided). What it does have, and what is done about it:

- an engine is "Prefill" and writes, or "Decode" and is written to. A process of pdcore may be
  both, so there are two: Prefill from the start, so that a machine where the library cannot
  work is refused at once and not at the first request; Decode once a peer asks for us;
- ``register_memory`` answers 0 even where ``initialize`` failed (1.1.3 and newer), so only the
  answer of ``initialize`` counts;
- it rounds what is registered out to pages of 2 MiB, and would open a neighbour's memory to
  peers: what does not begin at one is never registered for writing, only as a source;
- a receiver's memory becomes known to a sender through a store that is looked at every 3 s.
  Writes are refused until then, whole and before any byte, and are tried again.
"""

from __future__ import annotations

import ipaddress
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import attrs

from pdcore.errors import TransportError
from pdcore.kv.plan import Int64Array
from pdcore.transports.engines import CPU, EngineLimits, WriteFailed
from pdcore.transports.memfabric_vendor import (
    INVALID_ARGUMENT,
    Vendor,
    VendorEngine,
    await_store,
    check_session,
    load,
    start_store,
)

PREFILL: Final = "Prefill"
DECODE: Final = "Decode"
PAGE_BYTES: Final = 2 << 20
#: A call cannot be ended, so it is kept short; the library would take 1 Mi ranges.
MAX_BATCH: Final = 1024
MAX_CALL_BYTES: Final = 64 << 20
#: What its calls on other processes may take at the end, seconds.
END_TIMEOUT_S: Final = 2.0
_RETRY_S: Final = 0.1
REMEDY: Final = (
    "install the Ascend NPU driver and CANN, source CANN's set_env.sh before pdcore starts, and "
    "pip install 'pdcore[memfabric]'"
)


@attrs.frozen
class MemFabricOptions:
    """``host``: the numeric IPv4 address at which peers reach this machine; ``device_id``: its
    NPU; ``data_op_type``: SDMA, DEVICE_RDMA or another one that the installed version has;
    ``store_url`` and ``creates_store``: R14, for versions before 1.1.3 only; ``nic``: from 1.3.0
    on. ``start_timeout_s`` bounds the wait for the store, ``settle_timeout_s`` how long a write
    waits for its sender to have heard of the receiver's memory; ``lands_late_s``: how long bytes
    of a failed call may go on landing (nothing the vendor says bounds it)."""

    host: str = "127.0.0.1"
    device_id: int = attrs.field(default=0, validator=attrs.validators.ge(0))
    data_op_type: str = "SDMA"
    store_url: str = ""
    creates_store: bool = False
    nic: str = ""
    start_timeout_s: float = attrs.field(default=60.0, validator=attrs.validators.gt(0))
    settle_timeout_s: float = attrs.field(default=15.0, validator=attrs.validators.ge(0))
    lands_late_s: float = attrs.field(default=30.0, validator=attrs.validators.ge(0))

    @property
    def limits(self) -> EngineLimits:
        kinds = (CPU, "npu")
        return EngineLimits(MAX_BATCH, MAX_CALL_BYTES, 1, self.lands_late_s, PAGE_BYTES, kinds)


@attrs.frozen(eq=False)
class _Side:
    """An engine that started, in its one role."""

    role: str
    session: str
    engine: VendorEngine


class MemFabricEngine:
    """See :class:`pdcore.transports.engines.Engine`. Raises TransportError where the library is
    missing or does not start here. ``pause`` is waited with between tries."""

    def __init__(
        self,
        options: MemFabricOptions,
        pause: Callable[[float], object] | None = None,
    ) -> None:
        self._options = options
        self._pause = pause if pause is not None else threading.Event().wait
        self._vendor = load()
        self._op_type = _check_options(options, self._vendor)
        self._lock = threading.Lock()
        #: base -> bytes, and how often.
        self._memory: dict[int, tuple[int, int]] = {}
        self._sides: dict[str, _Side] = {}
        self._peers: dict[int, str] = {}
        self._numbers = itertools.count(1)
        self._writes = _Writes()
        self._is_closed = False
        if not self._vendor.has_own_stores:
            if options.creates_store:
                start_store(self._vendor, options.store_url)
            await_store(options.store_url, options.start_timeout_s, self._pause)
        with self._lock:
            self._side(PREFILL)

    @property
    def limits(self) -> EngineLimits:
        return self._options.limits

    def address(self) -> bytes:
        """Starts to be written to: the Decode side, and its session name."""
        with self._lock:
            session = self._side(DECODE).session
        return f"{self._kind} {session}".encode()

    def register(self, base: int, size_bytes: int) -> None:
        """The same memory may be registered more than once, for as many ``unregister``."""
        with self._lock:
            self._check_open()
            known, times = self._memory.get(base, (size_bytes, 0))
            if known != size_bytes:
                raise TransportError(
                    f"memfabric: memory at {base:#x} is registered with {known} bytes, and cannot "
                    f"be with {size_bytes} besides"
                )
            if times == 0:
                # Prefill first, which only reads it: so nothing is taken back that peers write to.
                for count, side in enumerate(sides := list(self._sides.values())):
                    try:
                        self._register(side, base, size_bytes)
                    except TransportError:
                        for earlier in sides[:count]:
                            earlier.engine.unregister_memory(base)
                        raise
            self._memory[base] = size_bytes, times + 1

    def unregister(self, base: int, size_bytes: int) -> None:
        with self._lock:
            known, times = self._memory.pop(base, (size_bytes, 0))
            if times > 1:
                self._memory[base] = known, times - 1
                return
            for side in self._sides.values():
                code = side.engine.unregister_memory(base)
                if code != 0 and side.role == DECODE and _is_target(base, known):
                    raise TransportError(
                        f"memfabric: unregister_memory of {known} bytes answered {code}; peers may "
                        "still write there"
                    )

    def open(self, address: bytes) -> int:
        """Nothing is sent: the library connects in its first write."""
        kind, _, session = address[:200].decode("ascii", "replace").partition(" ")
        if kind != self._kind:
            raise TransportError(
                f"the peer's memfabric is of another kind, {kind[:40]!r} and not {self._kind!r} "
                "(store and data_op_type); install the same version on both sides"
            )
        number = next(self._numbers)
        self._peers[number] = check_session(session)
        return number

    def write(
        self,
        peer: int,
        local: Int64Array,
        remote: Int64Array,
        lengths: Int64Array,
        is_stopping: Callable[[], bool],
    ) -> None:
        if not len(local) == len(remote) == len(lengths):
            raise WriteFailed(f"{len(local)} sources, {len(remote)} targets, {len(lengths)} sizes")
        with self._writes.one():
            session = self._peers.get(peer)
            with self._lock:
                engine = None if self._is_closed else self._sides[PREFILL].engine
            if session is None or engine is None:
                raise WriteFailed(f"memfabric: peer {peer} is not open")
            self._write(engine, session, local, remote, lengths, is_stopping)

    def shut(self, peer: int) -> None:
        self._peers.pop(peer, None)

    def close(self) -> None:
        """An engine with a call inside is left alone: to destroy it there would be the end of
        this process. Raises TransportError where one does not end."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            sides = [self._sides.pop(role) for role in (DECODE, PREFILL) if role in self._sides]
        ended = True
        for side in sides:
            if side.role == PREFILL and not self._writes.ended(END_TIMEOUT_S):
                continue
            ended = _end(self._vendor, side.engine) and ended
        if not ended:
            raise TransportError(
                f"memfabric: an engine did not end within {END_TIMEOUT_S:g} s; peers may still "
                "write to this process"
            )

    @property
    def _kind(self) -> str:
        store = "own-store" if self._vendor.has_own_stores else "shared-store"
        return f"memfabric/{store}/{self._options.data_op_type}"

    def _check_open(self) -> None:
        if self._is_closed:
            raise TransportError("this memfabric engine is closed")

    def _side(self, role: str) -> _Side:
        """The engine of this role, started if need be, with all memory; under the lock."""
        self._check_open()
        side = self._sides.get(role)
        if side is None:
            side = self._start(role)
            try:
                for base, (size_bytes, _) in self._memory.items():
                    self._register(side, base, size_bytes)
            except TransportError:
                _end(self._vendor, side.engine)
                raise
            self._sides[role] = side
        return side

    def _start(self, role: str) -> _Side:
        vendor, options = self._vendor, self._options
        engine = vendor.make()
        url, name = options.store_url, options.host
        optional: dict[str, str] = {}
        if vendor.has_own_stores:
            url = url or f"tcp://{options.host}"
            optional["store_server_role"] = DECODE
            if options.nic:
                optional["nic"] = options.nic
        else:
            name = check_session(f"{options.host}:{engine.get_rpc_port()}")
        code = engine.initialize(url, name, role, options.device_id, self._op_type, **optional)
        if code != 0:
            raise TransportError(
                f"{vendor} does not start here: initialize answered {code} for role {role}, device "
                f"{options.device_id}, {options.data_op_type}; what it says to standard output "
                f"tells more. Without a driver: {REMEDY}"
            )
        _users.add()
        try:
            if vendor.has_own_stores:
                # Not before initialize: it is 0 until then.
                name = check_session(f"{options.host}:{engine.get_rpc_port()}")
        except TransportError:
            _end(vendor, engine)
            raise
        return _Side(role, name, engine)

    def _register(self, side: _Side, base: int, size_bytes: int) -> None:
        if side.role == DECODE and not _is_target(base, size_bytes):
            return
        code = side.engine.register_memory(base, size_bytes)
        if code != 0:
            raise TransportError(
                f"memfabric: register_memory of {size_bytes} bytes answered {code} ({side.role}); "
                f"{self._options.data_op_type} may not reach memory of this kind"
            )

    def _write(
        self,
        engine: VendorEngine,
        session: str,
        local: Int64Array,
        remote: Int64Array,
        lengths: Int64Array,
        is_stopping: Callable[[], bool],
    ) -> None:
        deadline = time.monotonic() + self._options.settle_timeout_s
        ranges = local.tolist(), remote.tolist(), lengths.tolist()
        while (code := engine.batch_transfer_sync_write(session, *ranges)) != 0:
            refused = code == INVALID_ARGUMENT
            if not refused or is_stopping() or time.monotonic() >= deadline:
                why = "its sender knows no such memory there" if refused else "what landed is open"
                raise WriteFailed(
                    f"memfabric: batch_transfer_sync_write of {len(local)} ranges to {session} "
                    f"answered {code}: {why}",
                    may_land=not refused,
                )
            self._pause(_RETRY_S)


def _is_target(base: int, size_bytes: int) -> bool:
    """Whether peers may write there: whole pages, so that no neighbour is written."""
    return base % PAGE_BYTES == 0 and size_bytes % PAGE_BYTES == 0


class _Writes:
    """How many calls are inside the library."""

    def __init__(self) -> None:
        self._running = 0
        self._changed = threading.Condition()

    @contextmanager
    def one(self) -> Iterator[None]:
        with self._changed:
            self._running += 1
        try:
            yield
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def ended(self, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._running == 0, timeout_s)


class _Users:
    """Engines that started, over the whole process: ``unInitialize`` is of the whole process
    too, and takes the library away from the others."""

    def __init__(self) -> None:
        self._count = 0
        self._lock = threading.Lock()

    def add(self) -> None:
        with self._lock:
            self._count += 1

    def end(self, vendor: Vendor, engine: VendorEngine) -> None:
        engine.destroy()
        with self._lock:
            self._count -= 1
            if self._count == 0:
                vendor.shut_down(engine)


_users: Final = _Users()


def _end(vendor: Vendor, engine: VendorEngine) -> bool:
    """Whether it did, in time: the library waits for its store, which may be gone."""
    ending = threading.Thread(
        target=_users.end, args=(vendor, engine), name="memfabric end", daemon=True
    )
    ending.start()
    ending.join(END_TIMEOUT_S)
    return not ending.is_alive()


def _check_options(options: MemFabricOptions, vendor: Vendor) -> object:
    """The member of the vendor's enumeration to use. Raises TransportError."""
    try:
        ipaddress.IPv4Address(options.host)
    except ValueError:
        raise TransportError(
            f"host: {options.host!r} is not a numeric IPv4 address, the only kind of which every "
            "memfabric makes a session name; name one at which peers reach this machine"
        ) from None
    if options.nic and not vendor.takes_nic:
        raise TransportError(f"nic: {vendor} takes none; leave it out, or install 1.3.0 or newer")
    if options.creates_store and not options.store_url:
        raise TransportError("creates_store: store_url is missing, where to start the store")
    member = vendor.op_types.get(options.data_op_type)
    if member is None:
        raise TransportError(
            f"data_op_type: {vendor} has no {options.data_op_type!r}; choose one of "
            f"{', '.join(sorted(vendor.op_types))}"
        )
    return member
