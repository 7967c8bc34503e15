"""What a vendor's engine of one-sided writes must give to become a transport.

Vendors agree on little but this: memory is registered by address, a peer is reached by
something its engine tells about itself, and a call writes local ranges into remote ones.
None of them cancels, fences, notifies or sees a death in a way that can be trusted (what was
measured is in docs/transports.md), so none of that is asked of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

import attrs

from pdcore.errors import TransportError
from pdcore.kv.plan import Int64Array

#: Memory of this process, among kinds of memory.
CPU: Final = "cpu"

#: What a kernel goes on sending of a process that died, where a cable may be cut: it sends again
#: after its RTO and twice as long each time, for 102 s from the first time on (Linux, with the
#: default tcp_orphan_retries). 4 MB landed 5.6 s after a death, behind a cut of 7 s, over UCX's
#: TCP; 4 MB 84 s after one behind a cut of 62 s at an RTT of 100 ms, over plain TCP.
LANDS_LATE_BETWEEN_HOSTS_S: Final = 120.0


class WriteFailed(TransportError):
    """A write ended without all of its bytes in place; any subset may be. ``is_peer_gone``:
    the vendor says that the peer's engine is gone. ``may_land``: bytes of it may go on
    landing for ``EngineLimits.lands_late_s``."""

    def __init__(self, detail: str, *, is_peer_gone: bool = False, may_land: bool = False) -> None:
        super().__init__(detail)
        self.is_peer_gone = is_peer_gone
        self.may_land = may_land


@attrs.frozen
class EngineLimits:
    """``max_batch`` ranges a call, ``max_bytes`` a call, ``alignment`` of registered memory in
    bytes; ``lands_late_s``: how long bytes of a call that failed, or of a process that died,
    may go on landing (0: never after the call returned, or the process ended);
    ``target_page``: peers are let into memory by whole pages of so many bytes, so what is
    allocated has pages of its own, and registered memory that is none is a source only;
    ``device_kinds``: whose memory it reaches, without "cpu" that of devices only."""

    max_batch: int
    max_bytes: int
    alignment: int
    lands_late_s: float
    target_page: int = 1
    device_kinds: tuple[str, ...] = (CPU,)


class Engine(Protocol):
    """One vendor engine of this process life. ``register`` and ``unregister`` are called by
    the worker's thread; ``open``, ``write`` and ``shut`` of one peer by one thread of its own,
    and several such threads work at once. Every method raises TransportError."""

    @property
    def limits(self) -> EngineLimits: ...

    def address(self) -> bytes:
        """What a peer's ``open`` needs, at most 64 KiB; may change with each ``register``, so
        it is asked for when a peer says hello."""
        ...

    def register(self, base: int, size_bytes: int) -> None:
        """All or nothing; StillRegistered (``onesided_memory``) where a part of the engine keeps
        memory that it could not take as a whole: it is then given to nobody else."""
        ...

    def unregister(self, base: int, size_bytes: int) -> None: ...

    def open(self, address: bytes) -> int:
        """A number for the peer with this address (bounded in time). The address has come
        from an authenticated peer, but is checked like anything from outside."""
        ...

    def write(
        self,
        peer: int,
        local: Int64Array,
        remote: Int64Array,
        lengths: Int64Array,
        is_stopping: Callable[[], bool],
    ) -> None:
        """Write ``lengths[i]`` bytes from address ``local[i]`` to the peer's ``remote[i]``.
        Returns once all are in place; raises WriteFailed. Blocks as long as the vendor does:
        ``is_stopping`` says that nobody waits any more, and a write may end early on it only if
        nothing of it lands afterwards (or with ``may_land``)."""
        ...

    def shut(self, peer: int) -> None:
        """Forget the peer; idempotent."""
        ...

    def close(self) -> None:
        """Idempotent, bounded; after it no memory of this process is written by peers."""
        ...
