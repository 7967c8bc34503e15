"""Which processes of this host we speak with, and proof of their deaths.

The end of a connection proves nothing: a process may lose its connection and live. On one
host the kernel says when a process is gone (pidfd); other hosts are asked
(socket_probe).
"""

from __future__ import annotations

import os
from collections import OrderedDict
from typing import Final

import attrs

from pdcore.transports.process_proof import ProcessKey, open_pidfd
from pdcore.transports.socket_address import Origin
from pdcore.types import Incarnation

#: Process lives remembered per process; the oldest go first.
_MAX_REMEMBERED: Final = 4096


def open_proof(here: Origin, there: Origin) -> int:
    """A descriptor that becomes readable when that process is dead, or -1 when it cannot be
    seen from here (another host or pid namespace). Raises PeerGone when it is dead already,
    TransportError when pidfds do not work."""
    return open_pidfd(there.process) if here.sees_process_of(there) else -1


@attrs.define(eq=False)
class _Watch:
    pidfd: int
    incarnations: OrderedDict[Incarnation, None] = attrs.field(factory=OrderedDict)


class Witness:
    """Owns the descriptors it is given."""

    def __init__(self) -> None:
        self._watches: dict[ProcessKey, _Watch] = {}

    def watch(self, process: ProcessKey, incarnation: Incarnation, pidfd: int) -> int | None:
        """The descriptor to poll, when it is a new one."""
        watch = self._watches.get(process)
        is_new = watch is None
        if watch is None:
            watch = self._watches[process] = _Watch(pidfd)
        else:
            os.close(pidfd)
        watch.incarnations[incarnation] = None
        if len(watch.incarnations) > _MAX_REMEMBERED:
            watch.incarnations.popitem(last=False)
        return pidfd if is_new else None

    def is_watched(self, fd: int) -> bool:
        return any(watch.pidfd == fd for watch in self._watches.values())

    def bury(self, pidfd: int) -> list[Incarnation]:
        """That process is dead: whose lives are over. The caller polls it no more."""
        for process, watch in self._watches.items():
            if watch.pidfd == pidfd:
                del self._watches[process]
                os.close(pidfd)
                return list(watch.incarnations)
        return []

    def forget(self, incarnation: Incarnation) -> list[int]:
        """That life ended in order. Descriptors that are watched no more; the caller closes
        them."""
        ended = []
        for process, watch in list(self._watches.items()):
            watch.incarnations.pop(incarnation, None)
            if not watch.incarnations:
                del self._watches[process]
                ended.append(watch.pidfd)
        return ended

    def close(self) -> None:
        for watch in self._watches.values():
            os.close(watch.pidfd)
        self._watches.clear()
