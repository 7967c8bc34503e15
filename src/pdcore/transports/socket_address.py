"""Where a socket transport listens, how one dials it, and which process is behind it.

A receiver may listen at an AF_UNIX address, over which the processes of one network
namespace talk fastest, and at a TCP one, which other hosts reach. A dialler takes the first
that it can reach. The AF_UNIX name is abstract (no file to leave behind) and random.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import time
import zlib
from typing import Final

import attrs

from pdcore.errors import PeerGone, TransportError
from pdcore.transports.process_proof import ProcessKey, boot_id, this_process
from pdcore.types import Incarnation

UNIX: Final = "unix"
TCP: Final = "tcp"
_CODES: Final = {UNIX: 1, TCP: 2}
_MAX_ADDRESSES: Final = 4
MAX_PORT: Final = 65535
_QUIET_PORTS: Final = range(20_000, 32_000)
_NUM_PORTS_TRIED: Final = 100
#: sun_path holds 108 bytes; the abstract name takes a leading zero.
_MAX_NAME_BYTES: Final = 107

#: An idle connection is asked after this long, then every few seconds; after the third
#: question without an answer of its kernel the other host is not reachable.
KEEPALIVE_IDLE_S: Final = 10
KEEPALIVE_INTERVAL_S: Final = 5
KEEPALIVE_PROBES: Final = 3
#: What the kernel may hold of one connection; it allows less for AF_UNIX (wmem_max).
_UNIX_BUFFER_BYTES: Final = 4 << 20

_ORIGIN: Final = struct.Struct("<16sQQIQ")
_ADDRESS: Final = struct.Struct("<BHB")
_COUNT: Final = struct.Struct("<B")
_CRC: Final = struct.Struct("<I")
_CREDENTIALS: Final = struct.Struct("<iII")


@attrs.frozen
class Origin:
    """One process life, and from where it can be seen: the boot of its host, its network and
    its pid namespace (inode numbers, which mean something within one boot only)."""

    boot_id: bytes
    network: int
    pids: int
    process: ProcessKey

    def encode(self) -> bytes:
        return _ORIGIN.pack(self.boot_id, self.network, self.pids, *self.process)

    def sees_process_of(self, other: Origin) -> bool:
        """Its pid means the same process here."""
        return (self.boot_id, self.pids) == (other.boot_id, other.pids)

    def shares_network_with(self, other: Origin) -> bool:
        """Its abstract AF_UNIX names are ours, too."""
        return (self.boot_id, self.network) == (other.boot_id, other.network)


def decode_origin(data: bytes) -> Origin:
    """Raises TransportError."""
    if len(data) != _ORIGIN.size:
        raise TransportError("malformed: not a process")
    boot, network, pids, pid, ticks = _ORIGIN.unpack(data)
    return Origin(boot, network, pids, ProcessKey(pid, ticks))


def this_origin() -> Origin:
    network, pids = (os.stat(f"/proc/self/ns/{name}").st_ino for name in ("net", "pid"))
    return Origin(boot_id(), network, pids, this_process())


@attrs.frozen
class Address:
    """``host``: a numeric IPv4 or IPv6 address, or the abstract name (hex) with port 0."""

    family: str
    host: str
    port: int = 0

    def __str__(self) -> str:
        return f"unix:{self.host}" if self.family == UNIX else f"{self.host} port {self.port}"


@attrs.frozen
class Home:
    """Which process a transport lives in, and where it listens (nowhere: it never will)."""

    origin: Origin
    addresses: tuple[Address, ...] = ()


def encode_home(incarnation: Incarnation, home: Home) -> bytes:
    """The blob of an endpoint descriptor, and what a HELLO says. Its checksum covers the
    incarnation, so that the addresses of one life are never dialled for another."""
    parts = [home.origin.encode(), _COUNT.pack(len(home.addresses))]
    for address in home.addresses:
        host = address.host.encode()
        parts.append(_ADDRESS.pack(_CODES[address.family], address.port, len(host)) + host)
    body = b"".join(parts)
    return body + _CRC.pack(zlib.crc32(incarnation + body))


def decode_home(incarnation: Incarnation, data: bytes) -> Home:
    """Raises TransportError."""
    body = data[: -_CRC.size]
    try:
        if _CRC.unpack(data[-_CRC.size :])[0] != zlib.crc32(incarnation + body):
            raise TransportError("malformed endpoint descriptor: not an address of this life")
        origin = decode_origin(body[: _ORIGIN.size])
        (count,) = _COUNT.unpack_from(body, _ORIGIN.size)
        at = _ORIGIN.size + _COUNT.size
        addresses = []
        for _ in range(min(count, _MAX_ADDRESSES)):
            code, port, size = _ADDRESS.unpack_from(body, at)
            at += _ADDRESS.size + size
            family = next(name for name, number in _CODES.items() if number == code)
            addresses.append(Address(family, body[at - size : at].decode("ascii"), port))
    except (struct.error, StopIteration, UnicodeDecodeError):
        raise TransportError("malformed endpoint descriptor: not an address of socket") from None
    if at != len(body):
        raise TransportError("malformed endpoint descriptor: something after its addresses")
    return Home(origin, tuple(addresses))


def listen_unix() -> tuple[socket.socket, Address]:
    """Raises TransportError."""
    name = b"\0pdcore-socket-%d-%s" % (os.geteuid(), secrets.token_hex(16).encode())
    return _listen(socket.AF_UNIX, name), Address(UNIX, name[1:].decode("ascii"))


def listen_tcp(host: str, advertise: str | None = None, port: int = 0) -> _Listening:
    """Listen on ``host``, which peers know as ``advertise`` (numeric; default ``host``).
    Port 0 takes a free one. Raises TransportError."""
    known_as = advertise or host
    if known_as in ("", "*", "0.0.0.0", "::"):
        raise TransportError(
            f"{known_as!r} is an address that nobody can connect to: name the one of this host "
            "that its peers reach (advertise, or --local-ip)"
        )
    _numeric(known_as, 1)
    family, at = _numeric("0.0.0.0" if host in ("", "*") else host, port)
    listener = _listen(family, at)
    return listener, Address(TCP, known_as, listener.getsockname()[1])


_Listening = tuple[socket.socket, Address]


def free_port(host: str) -> int:
    """A TCP port that nobody listens on at this moment, and that no outgoing connection takes
    before it is used: those come from 32768 up (net.ipv4.ip_local_port_range), and so does what
    the kernel gives to a listener. Raises TransportError."""
    for port in secrets.SystemRandom().sample(_QUIET_PORTS, _NUM_PORTS_TRIED):
        with contextlib.suppress(TransportError):
            listen_tcp(host, port=port)[0].close()
            return port
    raise TransportError(f"none of {_NUM_PORTS_TRIED} ports tried at {host!r} can be listened on")


def _listen(family: int, at: str | bytes | tuple[str, int]) -> socket.socket:
    listener = _socket(family)
    try:
        if family == socket.AF_INET6:
            # "::" means both, wherever the host's default says otherwise.
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        if family != socket.AF_UNIX:
            # A fixed port may be taken again at once; two listeners cannot have it (Linux).
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(at)
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise TransportError(f"cannot listen on {at!r}: {error.strerror}") from error
    listener.setblocking(False)
    return listener


def _socket(family: int) -> socket.socket:
    """Raises TransportError: no descriptor is left, or this host has no such network."""
    try:
        return socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise TransportError(f"this process cannot open a socket: {error.strerror}") from error


def _numeric(host: str, port: int) -> tuple[int, tuple[str, int]]:
    """(family, address) of a numeric host; no name is ever looked up here, in the worker's
    loop. Raises TransportError."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except (OSError, UnicodeError) as error:
        raise TransportError(f"{host!r} is not a numeric IP address: {error}") from None
    family, _, _, _, at = found[0]
    return int(family), (str(at[0]), int(at[1])) if len(at) == 2 else _with_scope(at)


def _with_scope(at: tuple[object, ...]) -> tuple[str, int]:
    """A link-local IPv6 address keeps its interface, in the text form that sockets take."""
    host, port, _, scope = at
    shown = f"{host}%{scope}" if scope and "%" not in str(host) else str(host)
    return shown, int(str(port))


def reachable(home: Home, here: Origin) -> list[Address]:
    """Those of its addresses that can be tried from here, the nearest first. Raises
    TransportError when there is none."""
    near = here.shares_network_with(home.origin)
    found = [address for address in home.addresses if address.family == TCP or near]
    if not found:
        raise TransportError(
            "the peer listens on AF_UNIX only and is on another host or in another network "
            "namespace: give it a TCP address"
            if home.addresses
            else "the peer has no address: it listens nowhere"
        )
    return found


def dial(address: Address, deadline: float) -> socket.socket:
    """Connect until ``deadline`` (monotonic). Raises PeerGone when nobody listens there, or
    nobody answers in time; TransportError for what is no address."""
    family, at = target_of(address)
    sock = _socket(family)
    try:
        left = max(0.001, deadline - time.monotonic())
        # A blocking AF_UNIX connect waits for room in the backlog no longer than this; a
        # non-blocking one would fail at once.
        seconds = struct.pack("@ll", int(left), int(left % 1 * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, seconds)
        if family != socket.AF_UNIX:
            sock.settimeout(left)
        sock.connect(at)
        tune(sock)
    except (ConnectionRefusedError, FileNotFoundError):
        sock.close()
        raise PeerGone(f"nobody listens at {address}: the peer's process is gone") from None
    except (TimeoutError, BlockingIOError):
        sock.close()
        raise PeerGone(f"{address} does not answer: stopped, overloaded or cut off") from None
    except OSError as error:
        sock.close()
        raise PeerGone(f"cannot connect to {address}: {error.strerror}") from error
    return sock


def target_of(address: Address) -> tuple[int, str | bytes | tuple[str, int]]:
    """Socket family and what ``connect`` takes. Raises TransportError."""
    if address.family == TCP:
        return _numeric(address.host, address.port)
    name = b"\0" + address.host.encode()
    if not 1 < len(name) <= _MAX_NAME_BYTES:
        raise TransportError("malformed endpoint descriptor: not an AF_UNIX name")
    return socket.AF_UNIX, name


def tune(sock: socket.socket) -> None:
    """Small frames go out at once, and a peer's host that is gone is noticed."""
    if sock.family == socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_BUFFER_BYTES)
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S),
        (socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S),
        (socket.TCP_KEEPCNT, KEEPALIVE_PROBES),
    ):
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


def credentials(sock: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the process at the other end of an AF_UNIX connection, as the kernel
    recorded them."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return pid, uid
