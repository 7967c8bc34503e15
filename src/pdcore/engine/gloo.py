"""A tensor parallel group of processes: sums by torch.distributed's gloo over TCP.

The group is its own: no default process group, so that nothing else in the process can get
in its way. All sockets listen on the addresses that they are given (decision 5): the store
of the rendezvous too, which by itself would listen everywhere.

A peer that dies closes its sockets, and a sum that waits for it fails at once; one that
hangs is noticed after the group's ``step_timeout_s``. Both end the group for good: a sum
that was broken off halfway cannot be repeated.
"""

from __future__ import annotations

import datetime
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol

import torch
import torch.distributed

from pdcore.engine.base import GroupLost
from pdcore.engine.shard import TensorParallel, TPRank
from pdcore.errors import EngineError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import AllreduceOptions

#: Of the pending connections of the store; more ranks try again by themselves.
_BACKLOG: Final = 128


class _Store(Protocol):
    """What is used of torch's key-value stores: each call may raise RuntimeError."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def add(self, key: str, value: int) -> int: ...
    def check(self, keys: list[str]) -> bool: ...
    def wait(self, keys: list[str], timeout: datetime.timedelta) -> None: ...
    def set_timeout(self, timeout: datetime.timedelta) -> None: ...


class _Work(Protocol):
    def wait(self) -> bool: ...


class _Group(Protocol):
    def allreduce(self, tensors: list[torch.Tensor], opts: AllreduceOptions) -> _Work: ...


class _GlooOptions(Protocol):
    _devices: list[object]
    _timeout: datetime.timedelta
    _threads: int


class _Gloo(Protocol):
    """torch's class, as it is: its type stubs give the options another name."""

    _Options: Callable[[], _GlooOptions]

    def create_device(self, hostname: str) -> object: ...
    def __call__(self, store: _Store, rank: int, size: int, options: _GlooOptions) -> _Group: ...


class GlooCollective:
    """One rank's end of a group of processes; made by :func:`connect`. ``options`` hold the
    timeout of a sum."""

    def __init__(self, rank: TPRank, group: _Group, options: AllreduceOptions) -> None:
        self.rank = rank
        self._options = options
        self._group: _Group | None = group

    def all_reduce(self, values: torch.Tensor) -> None:
        """See :class:`pdcore.engine.collective.Collective`."""
        if self._group is None:
            raise self._lost("it is closed")
        try:
            self._group.allreduce([values], self._options).wait()
        except RuntimeError as error:
            self.close()
            raise self._lost(_first_line(error)) from error

    def close(self) -> None:
        """Closes the sockets, from which the others learn that this rank is gone."""
        self._group = None

    def _lost(self, why: str) -> GroupLost:
        return GroupLost(
            f"tp_rank {self.rank.tp_rank} of {self.rank.tp_size} lost its group, restart all "
            f"ranks of the instance: {why}"
        )


def connect(tensor_parallel: TensorParallel, identity: str) -> GlooCollective:
    """Meet the other ranks. Returns when all have come.

    ``identity`` says which model this rank has loaded, and how; it must be the same on all.
    Raises GroupLost when a rank does not come in time, or dies on the way: another start may
    succeed. Raises EngineError when two processes claim one rank (or the rendezvous served
    another start before), and for different identities.
    """
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        raise EngineError("tensor parallel ranks need a PyTorch that was built with gloo")
    meeting = tensor_parallel
    rank = meeting.rank
    try:
        store = _open_store(meeting)
        _introduce(store, meeting, identity)
        return GlooCollective(rank, _open_group(store, meeting), _sum_options(meeting))
    except (RuntimeError, OSError) as error:
        raise GroupLost(
            f"tp_rank {rank.tp_rank} of {rank.tp_size} could not meet its group at "
            f"{meeting.rendezvous}: {_first_line(error)}"
        ) from error


def _open_group(store: _Store, meeting: TensorParallel) -> _Group:
    """Connect to every other rank, on this rank's own address."""
    gloo: _Gloo = vars(torch.distributed)["ProcessGroupGloo"]
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=meeting.bind_host)]
    options._timeout = datetime.timedelta(seconds=meeting.rendezvous_timeout_s)
    # A rank makes one sum after the other: a second thread would never have work.
    options._threads = 1
    return gloo(store, meeting.rank.tp_rank, meeting.rank.tp_size, options)


def _sum_options(meeting: TensorParallel) -> AllreduceOptions:
    from torch._C._distributed_c10d import AllreduceOptions

    options = AllreduceOptions()
    options.timeout = datetime.timedelta(seconds=meeting.step_timeout_s)
    return options


def _open_store(meeting: TensorParallel) -> _Store:
    """Rank 0 serves a TCP store on a socket that is bound here, to the one address."""
    from torch._C._distributed_c10d import FileStore, TCPStore

    address, rank = meeting.address(), meeting.rank
    timeout = datetime.timedelta(seconds=meeting.rendezvous_timeout_s)
    if isinstance(address, str):
        store = FileStore(address, rank.tp_size)
        store.set_timeout(timeout)
        return store
    host, port = address
    listener = None
    if rank.tp_rank == 0:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=_BACKLOG).detach()
    return TCPStore(
        host,
        port,
        rank.tp_size,
        rank.tp_rank == 0,
        timeout,
        wait_for_workers=False,
        master_listen_fd=listener,
    )


def _introduce(store: _Store, meeting: TensorParallel, identity: str) -> None:
    """Wait for every rank, and compare. Raises GroupLost or EngineError as :func:`connect`, or
    RuntimeError of the store."""
    rank = meeting.rank
    mine = f"tp_size {rank.tp_size}, {identity}"
    if store.add(f"claims/{rank.tp_rank}", 1) != 1:
        raise EngineError(
            f"rendezvous {meeting.rendezvous}: another process has been tp_rank {rank.tp_rank} "
            "here. A rendezvous serves one start of one group: name a fresh one"
        )
    store.set(f"identities/{rank.tp_rank}", mine)
    keys = [f"identities/{other}" for other in range(rank.tp_size)]
    try:
        store.wait(keys, datetime.timedelta(seconds=meeting.rendezvous_timeout_s))
    except RuntimeError as error:
        missing = [other for other, key in enumerate(keys) if not store.check([key])]
        if not missing:
            raise
        raise GroupLost(
            f"rendezvous {meeting.rendezvous}: tp_rank {', '.join(map(str, missing))} of "
            f"{rank.tp_size} did not come within {meeting.rendezvous_timeout_s} s; see its log"
        ) from error
    for other, key in enumerate(keys):
        if (theirs := store.get(key).decode()) != mine:
            raise EngineError(
                f"the ranks of a group must be started alike: tp_rank {rank.tp_rank} has {mine}; "
                f"tp_rank {other} has {theirs}"
            )


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
