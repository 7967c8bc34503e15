"""KV over Mooncake's transfer engine: protocol tcp anywhere, ascend (HIXL) on NPUs, rdma.

What of the engine is used is one call, ``batch_transfer_sync_write``, and how to meet a peer
(``P2PHANDSHAKE``, the port of its own handshake). Everything else is in onesided. What was
measured with 0.3.13.post1 and is worked around here:

- the call's own time-out (MC_TRANSFER_TIMEOUT, 30 s) gives up waiting, and not the write: the
  bytes of a call that had "failed" went on landing for as long as the peer took them. So it is
  set so high that it never ends a call; what ends one is the connection's end, or that it made
  no progress (MC_TCP_PROGRESS_TIMEOUT_SEC), after which the engine drops the connection. What
  the kernel had of it may still land: a bounded time where the receiver runs, and the
  receiver's quarantine counts only while it does;
- ``transfer_check_status`` looks at the first entry of a batch only, and crashes when it is
  asked again: never called. Nor is anything asynchronous;
- what an engine has learnt of a name (host and port) it keeps for ever. A port that another
  life has taken over is met through another engine, so that no address of the old life is
  ever used for the new one;
- the engine listens on all interfaces, at two ports, and asks nobody for a secret: whoever
  reaches them can write to registered memory. Its own network is where it belongs.
"""

from __future__ import annotations

import ctypes
import importlib.util
import ipaddress
import itertools
import math
import secrets
import struct
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

import attrs

from pdcore.errors import TransportError
from pdcore.kv.plan import Int64Array
from pdcore.transports.base import Transport
from pdcore.transports.engines import (
    CPU,
    LANDS_LATE_BETWEEN_HOSTS_S,
    EngineLimits,
    WriteFailed,
)
from pdcore.transports.onesided import OneSidedTransport, caps_of
from pdcore.transports.onesided_memory import StillRegistered
from pdcore.transports.onesided_side import CONNECT_TIMEOUT_S, STALL_TIMEOUT_S, SideOptions
from pdcore.transports.registry import TransportPlugin, WorkerPlace
from pdcore.transports.socket_address import TCP, UNIX, free_port
from pdcore.transports.torchdist_group import make_backend
from pdcore.types import Incarnation

if TYPE_CHECKING:
    from mooncake.engine import TransferEngine

NAME: Final = "mooncake"
PROTOCOLS: Final = ("tcp", "rdma", "ascend")
#: How long the kernels' buffers of a connection that is over may take to land, on one host.
LANDS_LATE_S: Final = 30.0
LIMITS: Final = EngineLimits(
    max_batch=512, max_bytes=1 << 30, alignment=1, lands_late_s=LANDS_LATE_S
)
#: HIXL registers whole huge pages.
ASCEND_ALIGNMENT: Final = 2 << 20
#: Longer than any process: no call ends because the vendor has stopped waiting.
_NEVER_S: Final = 1000 * 86400
REMEDY: Final = (
    "pip install 'pdcore[mooncake]' (x86-64 Linux), and libibverbs1 of the system, on Debian "
    "apt-get install libibverbs1"
)

_LIFE_BYTES: Final = 16
_MAX_HOST_BYTES: Final = 16
_PORT: Final = struct.Struct("<H")


def why_unavailable() -> str | None:
    """One sentence for ``pdcore doctor``, or None. Looks for the vendor's module without
    importing it, and loads the system's library that its wheels leave out."""
    if sys.platform != "linux":
        return f"mooncake needs Linux; this is {sys.platform}"
    spec = importlib.util.find_spec("mooncake")
    places = [] if spec is None else list(spec.submodule_search_locations or ())
    if not any(list(Path(place).glob("engine*.so")) for place in places):
        return "mooncake-transfer-engine-non-cuda is not installed (no module mooncake.engine)"
    try:
        ctypes.CDLL("libibverbs.so.1")
    except OSError as error:
        return f"mooncake's library needs libibverbs1 of the system: {error}"
    return None


@attrs.frozen
class _Address:
    """``life``: random bytes of one engine, which its host and port are not for ever."""

    life: bytes
    host: str
    port: int

    @property
    def name(self) -> str:
        return f"{self.host}:{self.port}"

    def encode(self) -> bytes:
        return self.life + _PORT.pack(self.port) + self.host.encode()


def _decode_address(data: bytes) -> _Address:
    """Raises TransportError."""
    at = _LIFE_BYTES + _PORT.size
    try:
        (port,) = _PORT.unpack(data[_LIFE_BYTES:at])
        # Longer ones are none, and would be repeated by the error.
        host = str(ipaddress.IPv4Address(data[at : at + _MAX_HOST_BYTES].decode("ascii")))
    except (struct.error, ValueError) as error:
        raise TransportError(f"malformed address of a mooncake engine: {error}") from None
    return _Address(data[:_LIFE_BYTES], host, port)


class MooncakeEngine:
    """See :class:`pdcore.transports.engines.Engine`. ``host``: the numeric IPv4 address by
    which peers reach this process. Raises TransportError where it cannot be started."""

    def __init__(
        self,
        host: str,
        *,
        protocol: str = "tcp",
        device_name: str = "",
        device_index: int = 0,
        stall_timeout_s: float = STALL_TIMEOUT_S,
    ) -> None:
        if protocol not in PROTOCOLS:
            raise TransportError(f"protocol: {protocol!r} is none of {', '.join(PROTOCOLS)}")
        is_ascend = protocol == "ascend"
        if is_ascend:
            # HIXL works on the device that its process has chosen before.
            make_backend("hccl", host, device_index).enter_thread()
        alignment = ASCEND_ALIGNMENT if is_ascend else LIMITS.alignment
        kinds = (CPU, "npu") if is_ascend else LIMITS.device_kinds
        host = _numeric(host)
        is_one_host = ipaddress.IPv4Address(host).is_loopback
        late_s = LANDS_LATE_S if is_one_host else LANDS_LATE_BETWEEN_HOSTS_S
        self.limits = attrs.evolve(
            LIMITS, alignment=alignment, lands_late_s=late_s, device_kinds=kinds
        )
        self._settings = host, protocol, device_name
        _tell_vendor(stall_timeout_s)
        self._ids = itertools.count(1)
        #: Sessions open peers on threads of their own. To start an engine, and to register
        #: memory with one, takes as long as the vendor likes, and nobody may wait for it who
        #: writes to another peer (D23): so ``_starting`` is held by those alone who need a new
        #: engine, ``_registering`` while memory and engines are brought together (it guards
        #: ``_regions``), and ``_lock`` for a moment. They are taken in this order.
        self._starting, self._registering = threading.Lock(), threading.Lock()
        self._lock = threading.Lock()
        #: The first is the one that peers write to. Each with the lives that it knows by a name.
        self._engines: list[tuple[TransferEngine, dict[str, bytes]]] = []
        self._regions: dict[int, int] = {}
        self._peers: dict[int, tuple[TransferEngine, str]] = {}
        first = _start(*self._settings)
        life = secrets.token_bytes(_LIFE_BYTES)
        self._address = _Address(life, host, first.get_rpc_port()).encode()
        self._engines.append((first, {}))

    def address(self) -> bytes:
        return self._address

    def register(self, base: int, size_bytes: int) -> None:
        """All or nothing. Raises StillRegistered where that cannot be."""
        with self._registering:
            engines = self._started()
            for count, engine in enumerate(engines):
                code = engine.register_memory(base, size_bytes)
                if code:
                    _take_back(engines[:count], base, f"register {size_bytes} bytes ({code})")
            self._regions[base] = size_bytes

    def unregister(self, base: int, size_bytes: int) -> None:
        """What is on its way when this is called lands all the same: see RegionTable, which
        keeps regions that anybody may write to."""
        with self._registering:
            self._regions.pop(base, None)
            for code in [engine.unregister_memory(base) for engine in self._started()]:
                _expect(code, f"unregister {size_bytes} bytes")

    def open(self, address: bytes) -> int:
        """A write of nothing meets the peer, while it is known to live: the engine meets one
        at a time, and a peer that is stopped in that moment keeps all others from being met."""
        found = _decode_address(address)
        engine = self._engine_for(found)
        code = engine.batch_transfer_sync_write(found.name, [], [], [])
        if code:
            raise TransportError(f"mooncake's engine at {found.name} cannot be reached ({code})")
        with self._lock:
            peer = next(self._ids)
            self._peers[peer] = engine, found.name
        return peer

    def write(
        self,
        peer: int,
        local: Int64Array,
        remote: Int64Array,
        lengths: Int64Array,
        is_stopping: Callable[[], bool],
    ) -> None:
        """The vendor cannot be stopped; ``is_stopping`` is not asked."""
        with self._lock:
            engine, name = self._peers[peer]
        columns = local.tolist(), remote.tolist(), lengths.tolist()
        code = engine.batch_transfer_sync_write(name, *columns)
        if code:
            raise WriteFailed(
                f"mooncake could not write to {name} ({code}): its engine is gone, has "
                "unregistered the memory, or took nothing for too long",
                may_land=True,
            )

    def shut(self, peer: int) -> None:
        with self._lock:
            self._peers.pop(peer, None)

    def close(self) -> None:
        """The vendor has no other end than the last reference; it takes a second."""
        with self._lock:
            self._peers.clear()
            self._engines.clear()

    def _started(self) -> list[TransferEngine]:
        """Raises TransportError once it is closed."""
        with self._lock:
            if not self._engines:
                raise TransportError("this engine is closed")
            return [engine for engine, _ in self._engines]

    def _engine_for(self, address: _Address) -> TransferEngine:
        """One that knows no other life by that name. Raises TransportError."""
        if (engine := self._acquainted(address)) is not None:
            return engine
        with self._starting:
            # Another one may have started it meanwhile.
            if (engine := self._acquainted(address)) is not None:
                return engine
            engine = _start(*self._settings)
            with self._registering:
                self._started()
                for base, size_bytes in self._regions.items():
                    code = engine.register_memory(base, size_bytes)
                    _expect(code, f"register {size_bytes} bytes")
                with self._lock:
                    self._engines.append((engine, {address.name: address.life}))
        return engine

    def _acquainted(self, address: _Address) -> TransferEngine | None:
        """That one, if there is one. Raises TransportError once it is closed."""
        self._started()
        with self._lock:
            for engine, known in self._engines:
                if known.setdefault(address.name, address.life) == address.life:
                    return engine
        return None


def _tell_vendor(stall_timeout_s: float) -> None:
    """The engine takes these from the environment only, some of them late. What it prints is
    the user's to say, if he does."""
    progress_s = str(max(1, math.ceil(stall_timeout_s)))
    libc = ctypes.CDLL(None)
    for name, value, is_ours in (
        ("MC_TRANSFER_TIMEOUT", str(_NEVER_S), True),
        ("MC_TCP_PROGRESS_TIMEOUT_SEC", progress_s, True),
        ("MC_TCP_STATUS_TIMEOUT_SEC", progress_s, True),
        ("MC_LOG_LEVEL", "ERROR", False),
    ):
        libc.setenv(name.encode(), value.encode(), int(is_ours))


def _start(host: str, protocol: str, device_name: str) -> TransferEngine:
    """Raises TransportError."""
    try:
        from mooncake.engine import TransferEngine
    except (ImportError, OSError, RuntimeError) as error:
        raise TransportError(f"mooncake cannot be imported ({error}): {REMEDY}") from error
    engine = TransferEngine()
    code = engine.initialize(host, "P2PHANDSHAKE", protocol, device_name)
    if code:
        raise TransportError(
            f"mooncake does not start with protocol {protocol!r} ({code}); what it printed says "
            "why. tcp works everywhere; rdma needs a card, ascend an NPU with CANN"
        )
    return engine


def _take_back(engines: list[TransferEngine], base: int, what: str) -> NoReturn:
    """Raises TransportError for what could not be done; StillRegistered where one of these
    engines does not let go of the memory."""
    codes = [engine.unregister_memory(base) for engine in engines]
    if any(codes):
        raise StillRegistered(
            f"mooncake could not {what}, nor take back what it had done of it ({codes}): it stays "
            "where it is until this process ends"
        )
    raise TransportError(f"mooncake could not {what}")


def _expect(code: int, what: str) -> None:
    if code:
        raise TransportError(f"mooncake could not {what} ({code})")


def _numeric(host: str) -> str:
    try:
        return str(ipaddress.IPv4Address(host))
    except ValueError:
        raise TransportError(
            f"host: {host!r} is not a numeric IPv4 address, and mooncake's engine knows no "
            "other; name the one at which peers reach this machine, such as 10.0.0.5"
        ) from None


def create(
    incarnation: Incarnation,
    *,
    protocol: str = "tcp",
    device_name: str = "",
    device_index: int = 0,
    families: Sequence[str] = (UNIX, TCP),
    host: str = "127.0.0.1",
    advertise: str | None = None,
    port: int = 0,
    secret: str | None = None,
    connect_timeout_s: float = CONNECT_TIMEOUT_S,
    stall_timeout_s: float = STALL_TIMEOUT_S,
) -> Transport:
    """``protocol`` as Mooncake has it, ``device_name`` the card for rdma, ``device_index`` the
    NPU for ascend; the rest is the side channel's (see SocketTransport). The secret protects
    that; not the engine's own ports. Raises TransportError."""
    engine = MooncakeEngine(
        advertise or host,
        protocol=protocol,
        device_name=device_name,
        device_index=device_index,
        stall_timeout_s=stall_timeout_s,
    )
    options = SideOptions(
        families, host, advertise, port, secret, connect_timeout_s, stall_timeout_s
    )
    return OneSidedTransport(NAME, incarnation, engine, options)


PLUGIN = TransportPlugin(
    create=create,
    why_unavailable=why_unavailable,
    caps=caps_of(LIMITS, cross_host=True),
    caps_between_hosts=caps_of(
        attrs.evolve(LIMITS, lands_late_s=LANDS_LATE_BETWEEN_HOSTS_S), cross_host=True
    ),
    remedy=REMEDY,
    options_at=WorkerPlace.options,
    fixed_address=lambda: {"port": free_port("127.0.0.1")},
    cycles=30,
)
