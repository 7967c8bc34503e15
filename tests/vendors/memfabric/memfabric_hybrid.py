"""A stand-in for the vendor's package: its interface, and bytes that really move.

Where the vendor drives an NPU, a write here is ``process_vm_writev`` into the process behind the
peer's session, which may be another one. The rest is as the wheels have it: names, signatures
and docstrings of each version (``test_memfabric_wheel.py`` compares them with the real wheel),
a config store that is a TCP server, codes instead of exceptions, and a ``register_memory`` that
says 0 whatever happened. ``FAKE_MEMFABRIC_VERSION`` chooses the version; FAULTS makes it fail.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import errno
import inspect
import json
import os
import re
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable

import numpy as np

VERSION = tuple(int(part) for part in os.environ.get("FAKE_MEMFABRIC_VERSION", "1.3.0").split("."))
if __name__ == "mf_adapter":
    VERSION = (1, 0, 0)
PAGE = 2 << 20
INVALID = -2000
FAILED = -1
HAS_SHARED_STORE = VERSION < (1, 1, 3)
#: "port_pid".
SAYS_PROCESS = (1, 0, 4) <= VERSION < (1, 1, 3)
OP_TYPES = {"SDMA": 1, "DEVICE_RDMA": 8}
if VERSION >= (1, 2, 0):
    OP_TYPES |= {"DEVICE_URMA": 64, "DEVICE_UBOE": 128}
if VERSION >= (1, 3, 0):
    OP_TYPES["HOST_RDMA"] = 2

TransDataOpType = enum.IntEnum(
    "TransDataOpType", dict(sorted(OP_TYPES.items(), key=lambda item: item[1]))
)


class Faults:
    """What goes wrong. Each write takes the first of ``codes`` that there is, if any."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        #: ``initialize`` answers this.
        self.start_code = 0
        self.register_code = 0
        self.codes: deque[int] = deque()
        #: A write that fails has put so many of its ranges in place before.
        self.lands_first = 0
        #: A write that fails lands whole once this is set, after its call returned.
        self.late: threading.Event | None = None
        #: A write hangs until this is set.
        self.hold: threading.Event | None = None
        #: So many writes find that the sender has not heard yet what the receiver registered.
        self.unknown_for = 0
        #: ``get_rpc_port`` says this, whatever the version.
        self.port: object = None
        #: ``destroy`` hangs until this is set.
        self.hold_destroy: threading.Event | None = None
        #: Every batch that came: (session, ranges, bytes).
        self.batches: list[tuple[str, int, int]] = []
        #: Set when a write begins.
        self.began = threading.Event()
        self.landed_late = threading.Event()


FAULTS = Faults()


class _Place:
    """What a process keeps: whether the library is up, and the stores that it serves."""

    def __init__(self) -> None:
        self.is_up = False
        self.stores: dict[str, Store] = {}


_PLACE = _Place()


class Store:
    """A config store: which session is which process, and what it registered.

    Lines of JSON over TCP, one thread for all: ``{"set": session, ...}``, ``{"get": session}``.
    """

    def __init__(self, host: str, port: int) -> None:
        self.entries: dict[str, dict[str, object]] = {}
        self.lock = threading.Lock()
        self.listener = socket.create_server((host, port))
        self.port = self.listener.getsockname()[1]
        self._ended, self._end = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self.listener, selectors.EVENT_READ)
        self._selector.register(self._ended, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="fake store", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._end.send(b"x")
        self._thread.join(5.0)
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()
        self._selector.close()
        self._end.close()

    def _serve(self) -> None:
        buffered: dict[socket.socket, bytes] = {}
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._ended:
                    return
                if key.fileobj is self.listener:
                    link, _ = self.listener.accept()
                    self._selector.register(link, selectors.EVENT_READ)
                    buffered[link] = b""
                    continue
                link = key.fileobj
                try:
                    received = link.recv(1 << 20)
                except OSError:
                    received = b""
                if not received:
                    self._selector.unregister(link)
                    del buffered[link]
                    link.close()
                    continue
                *lines, buffered[link] = (buffered[link] + received).split(b"\n")
                with contextlib.suppress(OSError):
                    for line in lines:
                        link.sendall(self._answer(json.loads(line)))

    def _answer(self, asked: dict[str, object]) -> bytes:
        with self.lock:
            if "set" in asked:
                self.entries[str(asked["set"])] = asked
            elif "drop" in asked:
                self.entries.pop(str(asked["drop"]), None)
            found = self.entries.get(str(asked.get("get")))
        return json.dumps(found).encode() + b"\n"


class Link:
    """A client of a store."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.lock = threading.Lock()
        self.socket = socket.create_connection(address, 5.0)
        self.socket.settimeout(None)
        self._buffered = b""

    def ask(self, **asked: object) -> dict[str, object] | None:
        """Raises OSError when the store is gone."""
        with self.lock:
            self.socket.sendall(json.dumps(asked).encode() + b"\n")
            while b"\n" not in self._buffered:
                received = self.socket.recv(1 << 20)
                if not received:
                    raise ConnectionResetError(errno.ECONNRESET, "the store is gone")
                self._buffered += received
            line, self._buffered = self._buffered.split(b"\n", 1)
        return json.loads(line)

    def close(self) -> None:
        self.socket.close()


def _endpoint(text: str) -> tuple[str, int] | None:
    found = re.fullmatch(r"(\d+\.\d+\.\d+\.\d+):(\d+)(?:_\d+)?", text)
    return (found[1], int(found[2])) if found else None


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


_libc = ctypes.CDLL(None, use_errno=True)
_libc.process_vm_writev.restype = ctypes.c_ssize_t
_libc.process_vm_writev.argtypes = (
    [ctypes.c_int] + [ctypes.c_void_p, ctypes.c_ulong] * 2 + [ctypes.c_ulong]
)
_IOVECS = 1024
#: prctl: any process of ours may write to us, where Yama would let only our parents.
_PR_SET_PTRACER, _ANYBODY = 0x59616D61, ctypes.c_ulong(-1)


def _move(pid: int, local: np.ndarray, remote: np.ndarray, lengths: np.ndarray) -> bool:
    """Whether all of it is in place; some may be where it is not."""
    for start in range(0, len(local), _IOVECS):
        part = slice(start, start + _IOVECS)
        here = np.ascontiguousarray(np.stack([local[part], lengths[part]], 1))
        there = np.ascontiguousarray(np.stack([remote[part], lengths[part]], 1))
        count = len(here)
        done = _libc.process_vm_writev(pid, here.ctypes.data, count, there.ctypes.data, count, 0)
        if done != int(lengths[part].sum()):
            return False
    return True


class _Engine:
    def __init__(self) -> None:
        self._role = ""
        self._session = ""
        self._port = 0
        self._is_started = False
        self._lock = threading.Lock()
        self._slices: dict[int, int] = {}
        self._store: Store | None = None
        self._links: dict[str, Link] = {}

    def _initialize(
        self, store_url, session_id, role, device_id, op, server_role="", nic=""
    ) -> int:
        if role not in ("Prefill", "Decode"):
            return FAILED
        if FAULTS.start_code:
            return FAULTS.start_code
        self._role, self._session = role, session_id
        if HAS_SHARED_STORE:
            where = _endpoint(store_url.removeprefix("tcp://"))
            if where is None or _endpoint(session_id) is None:
                return INVALID
            try:
                self._links[""] = Link(where)
            except OSError:
                return FAILED
        else:
            host = session_id.partition(":")[0]
            if role == server_role:
                try:
                    self._store = Store(host, 0)
                except OSError:
                    return FAILED
                self._port = self._store.port
            else:
                self._port = _free_port()
            self._session = f"{host}:{self._port}"
        _PLACE.is_up = self._is_started = True
        self._publish()
        return 0

    def _get_rpc_port(self) -> object:
        if FAULTS.port is not None:
            return FAULTS.port
        if SAYS_PROCESS:
            return f"{_free_port()}_{os.getpid()}"
        return _free_port() if HAS_SHARED_STORE else self._port

    def _publish(self) -> None:
        if self._role != "Decode":
            return
        _libc.prctl(_PR_SET_PTRACER, _ANYBODY, 0, 0, 0)
        told = {"pid": os.getpid(), "slices": sorted(self._slices.items())}
        if self._store is not None:
            with self._store.lock:
                self._store.entries[self._session] = told
        else:
            self._links[""].ask(set=self._session, **told)

    def _register_memory(self, buffer_addr: int, capacity: int) -> int:
        if not self._is_started:
            return FAILED if HAS_SHARED_STORE else 0
        if FAULTS.register_code:
            return FAULTS.register_code
        if self._role != "Decode":
            return 0
        if buffer_addr % PAGE:
            return FAILED
        if capacity <= 0:
            return INVALID
        with self._lock:
            self._slices[buffer_addr] = -(-capacity // PAGE) * PAGE
            self._publish()
        return 0

    def _batch_register_memory(self, buffer_addrs: list[int], capacities: list[int]) -> int:
        if len(buffer_addrs) != len(capacities) or len(buffer_addrs) > 1 << 20:
            return FAILED
        codes = map(self._register_memory, buffer_addrs, capacities)
        return next(filter(None, codes), 0)

    def _unregister_memory(self, buffer_addr: int) -> int:
        if not self._is_started:
            return FAILED if HAS_SHARED_STORE else 0
        if self._role != "Decode":
            return 0
        with self._lock:
            if self._slices.pop(buffer_addr, None) is None:
                return FAILED
            self._publish()
        return 0

    def _batch_transfer_sync_write(self, dest_session, buffers, peer_buffers, lengths, flags=0):
        if not len(buffers) == len(peer_buffers) == len(lengths):
            return FAILED
        if not _PLACE.is_up or not buffers or min(lengths) <= 0 or not all(buffers):
            return INVALID
        FAULTS.batches.append((dest_session, len(buffers), sum(lengths)))
        FAULTS.began.set()
        if FAULTS.hold is not None:
            FAULTS.hold.wait(60.0)
        try:
            found = self._link_to(dest_session).ask(get=dest_session)
        except (OSError, ValueError):
            self._forget(dest_session)
            return FAILED
        if found is None:
            return INVALID
        if FAULTS.unknown_for:
            FAULTS.unknown_for -= 1
            return INVALID
        columns = [np.array(part, np.uint64) for part in (buffers, peer_buffers, lengths)]
        if not self._is_known(found["slices"], columns[1], columns[2]):
            return INVALID
        pid = int(str(found["pid"]))
        if FAULTS.codes and (code := FAULTS.codes.popleft()):
            self._land(pid, columns, FAULTS.lands_first)
            if FAULTS.late is not None:
                threading.Thread(target=self._land_late, args=(pid, columns)).start()
            return code
        return 0 if _move(pid, *columns) else FAILED

    def _link_to(self, session: str) -> Link:
        with self._lock:
            key = "" if HAS_SHARED_STORE else session
            if key not in self._links:
                where = _endpoint(session)
                if where is None:
                    raise ValueError(session)
                self._links[key] = Link(where)
            return self._links[key]

    def _forget(self, session: str) -> None:
        with self._lock:
            link = self._links.pop(session, None)
        if link is not None:
            link.close()

    @staticmethod
    def _is_known(slices, remote: np.ndarray, lengths: np.ndarray) -> bool:
        inside = np.zeros(len(remote), bool)
        for base, size in slices:
            inside |= (remote >= base) & (remote + lengths <= base + size)
        return bool(inside.all())

    @staticmethod
    def _land(pid: int, columns: list[np.ndarray], count: int) -> None:
        _move(pid, *(column[:count] for column in columns))

    def _land_late(self, pid: int, columns: list[np.ndarray]) -> None:
        FAULTS.late.wait(60.0)
        _move(pid, *columns)
        FAULTS.landed_late.set()

    def _destroy(self) -> None:
        if FAULTS.hold_destroy is not None:
            FAULTS.hold_destroy.wait(60.0)
        if self._role == "Decode" and HAS_SHARED_STORE:
            with contextlib.suppress(OSError, KeyError):
                self._links[""].ask(drop=self._session)
        if self._store is not None:
            self._store.close()
            self._store = None
        for link in self._links.values():
            link.close()
        self._links.clear()
        self._is_started = False

    def _uninitialize(self) -> None:
        _PLACE.is_up = False


_INT = "typing.SupportsInt"
_INTS = "collections.abc.Sequence[typing.SupportsInt]"
_FLAGS = [("flags", _INT, 0)] if VERSION >= (1, 1, 0) else []
_INITIALIZE: list[tuple[object, ...]] = [
    ("store_url", "str"),
    ("session_id", "str"),
    ("role", "str"),
    ("device_id", _INT),
    ("data_op_type", "_pymf_transfer.TransDataOpType", TransDataOpType.SDMA),
]
if not HAS_SHARED_STORE:
    _INITIALIZE.append(("store_server_role", "str", "Decode"))
if VERSION >= (1, 3, 0):
    _INITIALIZE.append(("nic", "str", ""))
_PORT = "str" if SAYS_PROCESS else "int"
_ADDRESS = ("buffer_addr", _INT)

_METHODS: dict[str, tuple[Callable[..., object], str, list[tuple[object, ...]]]] = {
    "initialize": (_Engine._initialize, "int", _INITIALIZE),
    "get_rpc_port": (_Engine._get_rpc_port, _PORT, []),
    "register_memory": (_Engine._register_memory, "int", [_ADDRESS, ("capacity", _INT)]),
    "batch_register_memory": (
        _Engine._batch_register_memory,
        "int",
        [("buffer_addrs", _INTS), ("capacities", _INTS)],
    ),
    "unregister_memory": (_Engine._unregister_memory, "int", [_ADDRESS]),
    "batch_transfer_sync_write": (
        _Engine._batch_transfer_sync_write,
        "int",
        [
            ("dest_session", "str"),
            ("buffers", _INTS),
            ("peer_buffers", _INTS),
            ("lengths", _INTS),
            *_FLAGS,
        ],
    ),
    "destroy": (_Engine._destroy, "None", []),
    "unInitialize": (_Engine._uninitialize, "None", []),
}


def _text(parameter: tuple[object, ...]) -> str:
    name, kind, *default = parameter
    return f"{name}: {kind}" + "".join(f" = {value!r}" for value in default)


def _method(name: str) -> Callable[..., object]:
    """As pybind11 makes them: arguments by position or name, checked, and told in the doc."""
    body, returns, parameters = _METHODS[name]
    signature = inspect.Signature(
        [
            inspect.Parameter(
                str(which[0]),
                inspect.Parameter.POSITIONAL_OR_KEYWORD,
                default=which[2] if len(which) > 2 else inspect.Parameter.empty,
            )
            for which in (("self",), *parameters)
        ]
    )

    def method(*arguments: object, **named: object) -> object:
        bound = signature.bind(*arguments, **named)
        bound.apply_defaults()
        return body(*bound.args)

    told = ", ".join(["self: _pymf_transfer.TransferEngine", *map(_text, parameters)])
    method.__doc__ = f"{name}({told}) -> {returns}\n"
    return method


TransferEngine = type("TransferEngine", (_Engine,), {name: _method(name) for name in _METHODS})
TransferEngine.TransDataOpType = TransDataOpType


def create_config_store(store_url: str) -> int:
    where = _endpoint(store_url.removeprefix("tcp://"))
    if where is None or not store_url.startswith("tcp://"):
        return INVALID
    if store_url not in _PLACE.stores:
        try:
            _PLACE.stores[store_url] = Store(*where)
        except OSError:
            return FAILED
    return 0


def end_stores() -> None:
    """The vendor's stores end with their process; tests end them here."""
    for store in _PLACE.stores.values():
        store.close()
    _PLACE.stores.clear()


def set_conf_store_tls(enable: bool, tls_info: str) -> int:
    return 0 if not enable else FAILED


def set_log_level(level: int) -> int:
    return 0 if 0 <= level <= 3 else FAILED


create_config_store.__doc__ = "create_config_store(store_url: str) -> int\n"
set_conf_store_tls.__doc__ = "set_conf_store_tls(enable: bool, tls_info: str) -> int\n"
set_log_level.__doc__ = "set_log_level(level: typing.SupportsInt) -> int\n"
