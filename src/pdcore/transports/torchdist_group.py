"""Process groups of two, and the staging memory they send from and receive into: the one
file of this transport that imports torch.

A group is a backend object of its own, not one of ``torch.distributed``'s named groups: a
process may hold many, between any two processes, without ``init_process_group``, beside
the groups of a tensor-parallel engine. Rank 0 sends, rank 1 receives. Building one blocks
until both sides are there, so only link threads do it. ``batch_isend_irecv`` has nothing to
batch here: a chunk is one message.

What gloo really does (torch 2.13, measured with two processes):

- the peer is killed: a pending send or receive raises within 30 ms, and so does the next;
- the peer is stopped: a send waits as long as it is let. Nothing ends the wait from
  another thread: ``abort()`` and ``shutdown()`` of the group return and change nothing, and
  dropping the group leaves a waiter where it is;
- a wait that times out poisons the group ("Application timeout caused pair closure"): no
  short waits in turn with looking at something else;
- the other side of a group that was dropped with a transfer under way is not woken: its
  receive waited for its own 60 s;
- two groups connect one to the other: the side that dials a dead peer fails at once, the
  one that listens for it waits for five times the group's time-out (15 s of 3);
- ``is_completed()`` of a send or receive stays False until somebody waits; there is no
  cancel;
- where a group is built and no descriptor is left for its connection, gloo's own thread ends
  the whole process ("terminate called after throwing 'gloo::EnforceNotMet'");
- the address that the other side tells is read unchecked: a damaged one may raise ValueError or
  MemoryError, or end the process (SIGSEGV). Only who was given our descriptor gets so far.

So a side waits only for what the other has promised on the control connection to be
there, never without a bound, and never on the worker's loop; and a group is only begun
while some descriptors are left.

HCCL comes through torch_npu: asynchronous on a stream, where ``is_completed()`` asks the
event of the operation and ``wait()`` would block nothing but the stream. Its communicator
is made by the first operation, which blocks until the other side's first: a new PairGroup
exchanges one byte, so that this happens there.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from types import ModuleType
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from pdcore.errors import TransportError
from pdcore.transports.copy import ByteArray
from pdcore.transports.torchdist_wire import decode_key

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Store

_T = TypeVar("_T")

BACKENDS: Final = ("gloo", "hccl")
#: From when both sides know each other's addresses; this is milliseconds with gloo. A peer
#: that dies just then is noticed after so long.
BUILD_TIMEOUT_S: Final = 2.5
#: Of the first byte in a group that is built: an end of the peer shows in the group itself.
GREETING_TIMEOUT_S: Final = 5.0
#: gloo's side that listens for the other waits for this many of its time-outs.
_GLOO_CONNECT_TIMEOUTS: Final = 5
#: hccl exchanges addresses through the store and sets its links up in the first operation.
HCCL_BUILD_TIMEOUT_S: Final = 60.0
_HCCL_POLL_S: Final = 0.0002
#: Descriptors that must be left when a group is begun; gloo needs one, others may be begun
#: at the same time.
MIN_DESCRIPTORS: Final = 16
_TAG: Final = 1


class GroupFailed(TransportError):
    """A group cannot be built, or does not work any more."""


class Work(Protocol):
    """What send and receive return."""

    def is_completed(self) -> bool: ...

    def wait(self, timeout: timedelta) -> bool: ...


class Group(Protocol):
    """The two methods of ``torch.distributed``'s backend classes that are used here."""

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> Work: ...

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int) -> Work: ...


class Staging:
    """One chunk's bytes: ``host`` is what is gathered into and scattered from, ``tensor``
    what the backend moves (the same memory with gloo)."""

    def __init__(self, size_bytes: int, device: str) -> None:
        import torch

        memory = torch.empty(size_bytes, dtype=torch.uint8)
        self.host: ByteArray = memory.numpy()
        self._memory = memory
        self.tensor = memory if device == "cpu" else torch.empty_like(memory, device=device)

    def upload(self, size_bytes: int) -> torch.Tensor:
        """What to send."""
        part = self.tensor[:size_bytes]
        if self.tensor is not self._memory:
            part.copy_(self._memory[:size_bytes])
        return part

    def download(self, size_bytes: int) -> None:
        """After a receive: make ``host`` hold it."""
        if self.tensor is not self._memory:
            self._memory[:size_bytes].copy_(self.tensor[:size_bytes])


class Backend(Protocol):
    """One kind of group; one object per transport."""

    name: str
    device: str
    build_timeout_s: float

    def enter_thread(self) -> None:
        """Whatever a thread needs before it uses the backend."""
        ...

    def group(self, store: Store, rank: int) -> Group:
        """Blocks until both ranks called it. Raises RuntimeError."""
        ...

    def wait(self, work: Work, timeout_s: float) -> None:
        """Until the bytes have left, or are there. Raises RuntimeError."""
        ...

    def close(self) -> None:
        """Build no more groups; what is shared among them goes with the last of them."""
        ...


class GlooBackend:
    """All groups of a transport share one device: a listening socket at ``host`` and the
    thread that serves it. Raises TransportError when it cannot listen there."""

    name = "gloo"
    device = "cpu"
    build_timeout_s = BUILD_TIMEOUT_S

    def __init__(self, host: str) -> None:
        self._kind = vars(_c10d())["ProcessGroupGloo"]
        try:
            self._device: object | None = self._kind.create_device(hostname=host)
        except RuntimeError as error:
            raise TransportError(f"gloo cannot use the address {host}: {_first(error)}") from error

    def enter_thread(self) -> None: ...

    def group(self, store: Store, rank: int) -> Group:
        if self._device is None:
            raise RuntimeError("this transport is closed")
        options = self._kind._Options()
        options._timeout = timedelta(seconds=self.build_timeout_s / _GLOO_CONNECT_TIMEOUTS)
        options._devices = [self._device]
        options._threads = 1
        group: Group = self._kind(store, rank, 2, options)
        return group

    def wait(self, work: Work, timeout_s: float) -> None:
        work.wait(timedelta(seconds=timeout_s))

    def close(self) -> None:
        self._device = None


class HcclBackend:
    """Needs torch_npu with CANN. ``device_index`` is the NPU whose memory stages.

    Raises TransportError, naming what is missing.
    """

    name = "hccl"
    build_timeout_s = HCCL_BUILD_TIMEOUT_S

    def __init__(self, device_index: int) -> None:
        try:
            import torch_npu
        except (ImportError, RuntimeError) as error:
            raise TransportError(
                f"the hccl backend needs torch_npu and CANN ({error}): install pdcore[npu], "
                "source CANN's set_env.sh, or use the gloo backend"
            ) from error
        self._npu = torch_npu.npu
        self._kind = torch_npu._C._distributed_c10d.ProcessGroupHCCL
        self._index = device_index
        self.device = f"npu:{device_index}"

    def enter_thread(self) -> None:
        self._npu.set_device(self._index)

    def group(self, store: Store, rank: int) -> Group:
        options = self._kind.Options()
        options.is_high_priority_stream = False
        options._timeout = timedelta(seconds=self.build_timeout_s)
        options.global_ranks_in_group = []
        group: Group = self._kind(store, rank, 2, options)
        return group

    def wait(self, work: Work, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        pause = threading.Event()
        while not work.is_completed():
            if time.monotonic() > deadline:
                raise RuntimeError(f"timed out after {timeout_s:g} s")
            pause.wait(_HCCL_POLL_S)
        # An operation that failed counts as completed; this is what raises then.
        work.wait(timedelta(seconds=timeout_s))

    def close(self) -> None: ...


def make_backend(name: str, host: str, device_index: int) -> Backend:
    """Raises TransportError."""
    if name == "gloo":
        return GlooBackend(host)
    if name == "hccl":
        return HcclBackend(device_index)
    raise TransportError(f"backend: unknown {name!r}; choose one of {', '.join(BACKENDS)}")


Tell = Callable[[str, bytes], None]


def relay_store(tell: Tell, hear: Callable[[], bytes]) -> Store:
    """Where a group's two sides learn each other's addresses: over the connection that they
    have. torch's TCPStore would take a port and a thread of its own, retries an address
    where nobody listens any more for twice its time-out (5.4 s of 3), and waits without
    end for a server that is stopped (50 s seen); this one ends with the connection.

    Other threads, as hccl has them, see what is known and wait for nothing.
    """
    from torch._C._distributed_c10d import Store

    class RelayStore(Store):
        def __init__(self) -> None:
            super().__init__()
            self._values: dict[str, bytes] = {}
            self._builder = threading.get_ident()

        def set(self, key: str, value: str | bytes) -> None:
            data = value.encode() if isinstance(value, str) else bytes(value)
            self._values[key] = data
            if threading.get_ident() == self._builder:
                tell(key, data)

        def get(self, key: str) -> bytes:
            self._await([key])
            return self._values[key]

        def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
            self._await(keys)

        def check(self, keys: list[str]) -> bool:
            return all(key in self._values for key in keys)

        def _await(self, keys: list[str]) -> None:
            while not self.check(keys):
                if threading.get_ident() != self._builder:
                    raise RuntimeError(f"nobody has set {keys}")
                key, value = decode_key(hear())
                self._values[key] = value

    return RelayStore()


class PairGroup:
    """One side of a group that works; used by one thread."""

    def __init__(
        self, backend: Backend, rank: int, key: bytes, tell: Tell, hear: Callable[[], bytes]
    ) -> None:
        """``tell`` sends a KEY to the other side, ``hear`` waits for its next one; both may
        raise what they like. Raises GroupFailed when the group does not come about."""
        from torch._C._distributed_c10d import PrefixStore

        self._backend = backend
        self._peer = 1 - rank
        relay = relay_store(tell, hear)
        #: hccl goes on using it.
        self._store = PrefixStore(key.hex(), relay), relay
        _require_descriptors()
        self._group = _guarded(lambda: backend.group(self._store[0], rank))
        greeting = Staging(1, backend.device)
        timeout_s = max(GREETING_TIMEOUT_S, backend.build_timeout_s)
        if rank == 0:
            self.send(greeting, 1, timeout_s)
        else:
            self.finish(self.post(greeting, 1), greeting, 1, timeout_s)

    def send(self, staging: Staging, size_bytes: int, timeout_s: float) -> None:
        """Returns when ``staging`` may be used again. Raises GroupFailed."""

        def run() -> None:
            work = self._group.send([staging.upload(size_bytes)], self._peer, _TAG)
            self._backend.wait(work, timeout_s)

        _guarded(run)

    def post(self, staging: Staging, size_bytes: int) -> Work:
        """Post a receive; ``staging`` belongs to it until it is finished or the group is
        dropped. Raises GroupFailed."""
        part = staging.tensor[:size_bytes]
        return _guarded(lambda: self._group.recv([part], self._peer, _TAG))

    def finish(self, work: Work, staging: Staging, size_bytes: int, timeout_s: float) -> None:
        """Wait for a posted receive whose bytes were sent. Raises GroupFailed."""

        def run() -> None:
            self._backend.wait(work, timeout_s)
            staging.download(size_bytes)

        _guarded(run)


def _require_descriptors() -> None:
    """Raises GroupFailed."""
    with contextlib.ExitStack() as opened:
        try:
            for _ in range(MIN_DESCRIPTORS):
                opened.callback(os.close, os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            raise GroupFailed(
                f"fewer than {MIN_DESCRIPTORS} descriptors are left ({error.strerror}): raise "
                "the limit of this process (ulimit -n)"
            ) from error


def _guarded(run: Callable[[], _T]) -> _T:
    try:
        return run()
    except (RuntimeError, ValueError, MemoryError) as error:
        # The last two are what gloo makes of an address that is none.
        raise GroupFailed(_first(error)) from error


def _c10d() -> ModuleType:
    """Raises TransportError when this torch has no torch.distributed with gloo."""
    try:
        import torch.distributed as distributed

        if not distributed.is_available() or not distributed.is_gloo_available():
            raise TransportError("this build of torch has no torch.distributed with gloo")
        import torch._C._distributed_c10d as bindings
    except ImportError as error:
        raise TransportError(f"torchdist needs torch ({error}): install pdcore[torch]") from error
    return bindings


def _first(error: Exception) -> str:
    return str(error).split("\n", 1)[0][:300]
