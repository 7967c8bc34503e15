"""Which process is this, and is it dead? Answers that a pid alone cannot give.

A pid is reused; (pid, start time) of one boot is not. A pidfd becomes readable when that
process is gone and cannot be fooled by reuse, provided that the start time was compared
after it was opened.
"""

from __future__ import annotations

import os
import uuid
from typing import NamedTuple

from pdcore.errors import PeerGone, TransportError


class ProcessKey(NamedTuple):
    """One process life on this host; ``start_ticks`` as in /proc/<pid>/stat."""

    pid: int
    start_ticks: int


def boot_id() -> bytes:
    """16 bytes that change with every boot and differ between hosts."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return uuid.UUID(file.read().strip()).bytes


def start_ticks(pid: int) -> int:
    """Raises PeerGone when there is no such process in our pid namespace."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            stat = file.read()
    except (FileNotFoundError, ProcessLookupError):
        raise PeerGone(f"process {pid} does not exist (any more)") from None
    # The second field, the command, may hold spaces and parentheses: count from its end.
    return int(stat[stat.rindex(b")") + 2 :].split()[19])


def this_process() -> ProcessKey:
    pid = os.getpid()
    return ProcessKey(pid, start_ticks(pid))


def open_pidfd(key: ProcessKey) -> int:
    """A descriptor that is readable once this very process is dead.

    Raises PeerGone when it is already, TransportError when pidfds do not work here, no
    descriptor is left, or the process cannot be seen (another pid namespace).
    """
    if key.pid <= 0:
        raise TransportError(
            "the peer's process cannot be seen from here (another PID namespace), so its "
            "death could not be proved: use a socket transport"
        )
    try:
        pidfd = os.pidfd_open(key.pid)
    except (ProcessLookupError, OverflowError):  # a peer may name any number
        raise PeerGone(f"process {key.pid} does not exist (any more)") from None
    except OSError as error:
        raise TransportError(f"pidfd_open({key.pid}): {error.strerror}") from error
    try:
        if start_ticks(key.pid) != key.start_ticks:
            raise PeerGone(f"pid {key.pid} belongs to another process now")
    except PeerGone:
        os.close(pidfd)
        raise
    except OSError as error:
        os.close(pidfd)
        raise TransportError(f"/proc/{key.pid}/stat: {error.strerror}") from error
    return pidfd
