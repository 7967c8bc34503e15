"""NIXL's agent with its UCX back end as an engine of one-sided writes.

The wheel ``nixl-cu12`` brings UCX along and works on hosts without CUDA; UCX picks the way
itself: another process of this host through the kernel (cma, shared memory), other hosts over
TCP or RDMA. What it really does (1.5.1, measured with two processes) and what is made of it:

- posting a write may copy everything before it returns, or return at once: one thread per
  peer posts, and asks again until the state is final;
- to release a write that runs is no cancel: its bytes go on landing. So a handle is released
  after its end only, however long that takes (a stopped peer: until it goes on);
- errors come as exceptions or as a state, at the post or later; some of the bytes may be
  on their way in the peer's socket then;
- a write into memory that the peer has deregistered is DONE all the same, and UCX's
  listening sockets take writes to any address from anybody who reaches them: bounds and leases
  are checked before (``onesided``), and ``ucx_device`` says at which network interface it
  listens;
- what tells peers about an agent is bytes that its own C++ takes apart; its descriptor lists
  come as pickles, and are never taken from a peer;
- an agent's name is what a peer is known by, and is new with each process life;
- its progress thread never sleeps as its Python wrapper starts it, a core's worth of looking:
  it is started so that it does; a tiny write over TCP may take a millisecond for it.
"""

from __future__ import annotations

import ipaddress
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

import attrs
import numpy as np

from pdcore.errors import PeerGone, TransportError
from pdcore.kv.plan import Int64Array
from pdcore.transports.engines import (
    CPU,
    LANDS_LATE_BETWEEN_HOSTS_S,
    EngineLimits,
    WriteFailed,
)
from pdcore.transports.nixl_vendor import (
    Agent,
    Handle,
    Uint64Array,
    Vendor,
    ucx_options,
    why_unavailable,
)
from pdcore.transports.onesided import OneSidedTransport, caps_of
from pdcore.transports.onesided_side import CONNECT_TIMEOUT_S, STALL_TIMEOUT_S, SideOptions
from pdcore.transports.registry import TransportPlugin, WorkerPlace
from pdcore.transports.socket_address import TCP, UNIX, free_port
from pdcore.types import Incarnation

NAME: Final = "nixl"
_LOOPBACK_DEVICE: Final = "lo"
#: NIXL's words for kinds of memory, and what they are.
MEM_TYPES: Final = {"DRAM": CPU, "VRAM": "cuda"}
#: One call's: what other peers' calls wait for, and the steps in which a cancel is seen.
MAX_BATCH: Final = 4096
MAX_BYTES: Final = 32 << 20
#: What is in the sockets of a receiver when a sender dies, or its connection ends, is put in
#: place by the receiver's own threads, in milliseconds; more, because they may wait for a core.
#: Within one host; between two what is in the sender's comes later (engines).
LANDS_LATE_S: Final = 2.0
LIMITS: Final = EngineLimits(MAX_BATCH, MAX_BYTES, alignment=1, lands_late_s=LANDS_LATE_S)
#: Much longer than an agent of thousands of regions needs.
MAX_ADDRESS_BYTES: Final = 64 << 10

#: Of writes that run when the engine closes; they look for that each millisecond.
CLOSE_TIMEOUT_S: Final = 2.0
#: Between two looks at a write; most are over at the first.
_FIRST_LOOK_S: Final = 20e-6
_LAST_LOOK_S: Final = 1e-3

#: Of an address: the length of the agent's name. The name and its metadata follow.
_HEAD: Final = struct.Struct("!H")
#: An incarnation, as lower-case hexadecimal digits.
_NAME_BYTES: Final = 32
_NAME_CHARACTERS: Final = frozenset(b"0123456789abcdef")


def _parse_address(address: bytes) -> tuple[str, bytes]:
    """The agent's name and its metadata. Raises TransportError."""
    if not _HEAD.size <= len(address) <= MAX_ADDRESS_BYTES:
        raise TransportError(f"nixl: an address of {len(address)} bytes")
    (size,) = _HEAD.unpack_from(address)
    name = address[_HEAD.size : _HEAD.size + size]
    metadata = address[_HEAD.size + size :]
    if len(name) != _NAME_BYTES or not set(name) <= _NAME_CHARACTERS or not metadata:
        raise TransportError("nixl: an address without the name of an agent")
    return name.decode(), metadata


class NixlEngine:
    """See :class:`pdcore.transports.engines.Engine`. Any number of threads.

    ``mem_type``: the kind of all memory that is registered, here and at peers: DRAM, or VRAM of
    the device ``device_index``, which is registered by address. ``ucx_tls``: the one way UCX may
    use, such as tcp; ``ucx_device``: the one network interface it may use, such as eth0; both
    None: UCX chooses. Several are given by UCX_TLS and UCX_NET_DEVICES in the environment of the
    process, which win. Raises TransportError for bad options, and where NIXL does not start.
    """

    def __init__(
        self,
        incarnation: Incarnation,
        *,
        mem_type: str = "DRAM",
        device_index: int = 0,
        ucx_tls: str | None = None,
        ucx_device: str | None = None,
    ) -> None:
        if mem_type not in MEM_TYPES:
            raise TransportError(f"mem_type: {mem_type!r} is not one of {', '.join(MEM_TYPES)}")
        is_one_host = ucx_device == _LOOPBACK_DEVICE
        late_s = LANDS_LATE_S if is_one_host else LANDS_LATE_BETWEEN_HOSTS_S
        kinds = (MEM_TYPES[mem_type],)
        self.limits = attrs.evolve(LIMITS, lands_late_s=late_s, device_kinds=kinds)
        self._mem_type = mem_type
        self._device_index = device_index
        self._vendor = Vendor()
        self._name = incarnation.hex()
        #: None once it is closed. No local name holds it: an error would keep it by its frames.
        self._agents = [self._vendor.agent(self._name, ucx_options(ucx_tls, ucx_device))]
        #: Told when a write ended.
        self._lock = threading.Condition(threading.Lock())
        self._writing = 0
        self._is_closing = False
        #: More than one where the same memory was registered again.
        self._regions: dict[tuple[int, int], list[object]] = {}
        self._peers: dict[int, str] = {}
        self._opened = 0

    def address(self) -> bytes:
        with self._vendor.spoken("tell about its agent"):
            metadata = self._agent.get_agent_metadata()
        name = self._name.encode()
        address = _HEAD.pack(len(name)) + name + metadata
        if len(address) > MAX_ADDRESS_BYTES:
            raise TransportError(
                f"nixl: {len(self._regions)} regions make an address of {len(address)} bytes; "
                f"at most {MAX_ADDRESS_BYTES} reach a peer: register fewer, larger ones"
            )
        return address

    def register(self, base: int, size_bytes: int) -> None:
        with self._vendor.spoken(f"register {size_bytes} bytes"):
            row = (base, size_bytes, self._device_index, "")
            known = self._agent.register_memory([row], self._mem_type)
        with self._lock:
            self._regions.setdefault((base, size_bytes), []).append(known)

    def unregister(self, base: int, size_bytes: int) -> None:
        with self._lock:
            self._check_open()
            known = self._regions.get((base, size_bytes))
            if not known:
                raise TransportError(f"nixl: {size_bytes} bytes at {base:#x} are not registered")
            last = known.pop()
            if not known:
                del self._regions[base, size_bytes]
        with self._vendor.spoken(f"deregister {size_bytes} bytes"):
            self._agent.deregister_memory(last)

    def open(self, address: bytes) -> int:
        name, metadata = _parse_address(address)
        with self._lock:
            # NIXL refuses metadata that names a known agent and is another's.
            try:
                with self._vendor.spoken("use the peer's metadata"):
                    told = self._agent.add_remote_agent(metadata).decode()
                if told != name:
                    self._remove(told)
                    raise TransportError(f"nixl: the metadata of {name} is that of {told!r}")
            except TransportError:
                # It may have taken in a part.
                self._remove(name)
                raise
            self._opened += 1
            self._peers[self._opened] = name
            return self._opened

    def write(
        self,
        peer: int,
        local: Int64Array,
        remote: Int64Array,
        lengths: Int64Array,
        is_stopping: Callable[[], bool],
    ) -> None:
        if is_stopping():
            raise WriteFailed("nobody waits for it any more")
        with self._lock:
            name = self._peers.get(peer)
            self._check_open()
            if name is None:
                raise PeerGone(f"nixl: there is no peer {peer}")
            self._writing += 1
        try:
            with self._vendor.writing(may_land=False):
                ours, theirs = (
                    self._agent.get_xfer_descs(self._rows(bases, lengths), self._mem_type)
                    for bases in (local, remote)
                )
                self._post(self._agent.initialize_xfer("WRITE", ours, theirs, name))
        finally:
            with self._lock:
                self._writing -= 1
                self._lock.notify_all()

    def shut(self, peer: int) -> None:
        with self._lock:
            name = self._peers.pop(peer, None)
            if name is not None:
                self._remove(name)

    def close(self) -> None:
        """Writes that still run end as failed. Raises TransportError when one does not come
        back from the vendor: peers may write here then."""
        with self._lock:
            self._is_closing = True
            self._peers.clear()
            if not self._lock.wait_for(lambda: not self._writing, CLOSE_TIMEOUT_S):
                raise TransportError(
                    f"nixl: {self._writing} writes did not come back in {CLOSE_TIMEOUT_S:g} s"
                )
            self._agents.clear()
            self._regions.clear()

    @property
    def _agent(self) -> Agent:
        if not self._agents:
            raise TransportError("nixl: this engine is closed")
        return self._agents[0]

    def _check_open(self) -> None:
        if self._is_closing:
            raise TransportError("nixl: this engine is closed")

    def _remove(self, name: str) -> None:
        """Unless a session needs it; the lock is held."""
        if name not in self._peers.values():
            with self._vendor.ignored():
                self._agent.remove_remote_agent(name)

    def _rows(self, bases: Int64Array, lengths: Int64Array) -> Uint64Array:
        """(address, bytes, device) rows; a list of tuples is sixty times as slow."""
        rows = np.empty((len(bases), 3), np.uint64)
        rows[:, 0] = bases
        rows[:, 1] = lengths
        rows[:, 2] = self._device_index
        return rows

    def _post(self, handle: Handle) -> None:
        """Start it and stay until it is over, or this engine closes. Raises WriteFailed."""
        look_s = _FIRST_LOOK_S
        try:
            with self._vendor.writing(may_land=True):
                state = self._agent.transfer(handle)
                while state == "PROC":
                    if self._is_closing:
                        state = "unfinished: this engine closes"
                        break
                    time.sleep(look_s)
                    look_s = min(look_s * 1.5, _LAST_LOOK_S)
                    state = self._agent.check_xfer_state(handle)
        finally:
            # Not before its end, which that would not be.
            with self._vendor.ignored():
                handle.release()
            del handle
        if state != "DONE":
            raise WriteFailed(f"nixl: the write ended as {state}", may_land=True)


def create(
    incarnation: Incarnation,
    *,
    mem_type: str = "DRAM",
    device_index: int = 0,
    ucx_tls: str | None = None,
    ucx_device: str | None = None,
    families: Sequence[str] = (UNIX, TCP),
    host: str = "127.0.0.1",
    advertise: str | None = None,
    port: int = 0,
    secret: str | None = None,
    connect_timeout_s: float = CONNECT_TIMEOUT_S,
    stall_timeout_s: float = STALL_TIMEOUT_S,
) -> OneSidedTransport:
    """The first four are NixlEngine's, the rest SideOptions'. Where peers reach this process
    at a loopback address, UCX listens there only, too. Raises TransportError."""
    side = SideOptions(families, host, advertise, port, secret, connect_timeout_s, stall_timeout_s)
    if ucx_device is None and _is_loopback(advertise or host):
        ucx_device = _LOOPBACK_DEVICE
    engine = NixlEngine(
        incarnation,
        mem_type=mem_type,
        device_index=device_index,
        ucx_tls=ucx_tls,
        ucx_device=ucx_device,
    )
    return OneSidedTransport(NAME, incarnation, engine, side)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        # The side channel says what is wrong with it.
        return False


PLUGIN = TransportPlugin(
    create=create,
    why_unavailable=why_unavailable,
    options_at=WorkerPlace.options,
    caps=caps_of(LIMITS, cross_host=True),
    caps_between_hosts=caps_of(
        attrs.evolve(LIMITS, lands_late_s=LANDS_LATE_BETWEEN_HOSTS_S), cross_host=True
    ),
    remedy="pip install --no-deps nixl-cu12 on Linux; of what it asks for only numpy is needed",
    variants={"any way": {}, "tcp": {"ucx_tls": "tcp"}},
    fixed_address=lambda: {"port": free_port("127.0.0.1")},
    cycles=30,
)
