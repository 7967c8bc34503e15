"""Whether the process at the other end of a broken connection is dead.

Where both processes are in one pid namespace, the kernel says so: each tells the other
which process it is, and a descriptor of that process becomes readable when it is gone.
Elsewhere a connection that was closed, and not broken, is what the peer's kernel does for a
process that has ended without a word; one that was reset may have been cut in between.
"""

from __future__ import annotations

import os
import select
import struct
from typing import Final

from pdcore.errors import TransportError
from pdcore.transports.process_proof import ProcessKey, boot_id, open_pidfd, this_process

STAMP: Final = struct.Struct("<16sIQ")
#: Of a peer that does not say which process it is.
NOBODY: Final = bytes(STAMP.size)
#: A dying process closes its connections a moment before it is gone.
DEATH_TIMEOUT_S: Final = 1.0


def stamp() -> bytes:
    """Which process this is, for peers on this host."""
    return STAMP.pack(boot_id(), *this_process())


class Witness:
    """Watches the process of one peer, named by its ``stamp``, if it can be seen from here.
    Call while the peer is alive."""

    def __init__(self, stamp: bytes) -> None:
        self._pidfd: int | None = None
        host, pid, start = STAMP.unpack(stamp)
        if pid and host == boot_id():
            try:
                self._pidfd = open_pidfd(ProcessKey(pid, start))
            except TransportError:
                # Another pid namespace, or no pidfds: then the connection is all there is.
                self._pidfd = None

    def is_dead(self, *, was_reset: bool) -> bool:
        """After its connection ended without a word; waits for a process that is dying."""
        if self._pidfd is None:
            return not was_reset
        poller = select.poll()
        poller.register(self._pidfd, select.POLLIN)
        return bool(poller.poll(int(DEATH_TIMEOUT_S * 1000)))

    def close(self) -> None:
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None
