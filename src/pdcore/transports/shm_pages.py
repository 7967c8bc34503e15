"""How much of its peers' memory a sender keeps mapped: what it is about to write, and
what it wrote last, up to a limit.

Mapping a peer's whole pool would make a sender's resident set grow with every peer, and
make connecting take as long as touching all of it. Instead the pages of the next window
are mapped in front of its copies, and above the limit the pages mapped longest ago are
given back (MADV_DONTNEED on a shared mapping drops our page table entries only; the
bytes stay with their owner). Measured per page of 4 KiB, where copying it takes 600 ns:
a page fault in the middle of a copy 1,700 ns; populating for writing 360 ns, for reading
160 ns (the kernel maps 16 neighbours per fault then, writable ones, because shared
memory needs no dirty tracking); giving back 90 ns; pwrite instead of all that 540 ns.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from pdcore.errors import TransportError
from pdcore.kv.plan import (
    LOCAL_OFFSET,
    LOCAL_STRIDE,
    REMOTE_OFFSET,
    REMOTE_STRIDE,
    ROW_BYTES,
    ROWS,
    Int64Array,
)
from pdcore.transports.check import CopyPlan
from pdcore.transports.copy import ByteArray, copy_pieces
from pdcore.transports.shm_segment import Segment, populate

#: What one read fault maps (fault_around_bytes), aligned by address: anything smaller
#: would be mapped, but not counted.
GRANULE: Final = 64 << 10
MIN_LIMIT_BYTES: Final = 1 << 20
#: Copied between two looks at what is mapped: large enough that the look costs nothing
#: beside the copies, small beside the limit.
_WINDOW_BYTES: Final = 16 << 20
#: Up to so many pieces plain loops are faster than arrays.
_FEW: Final = 16
#: Mapped between two looks at the stop mark, about 40 us.
_POPULATE_GRANULES: Final = (1 << 20) // GRANULE


class PeerPages:
    """The limit that all peers of one transport share, and what counts against it.

    ``limit_bytes`` None: pages stay until their peer is gone. Raises TransportError for
    a limit too small to work in. Used by the owner's thread and the mover.
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        if limit_bytes is not None and limit_bytes < MIN_LIMIT_BYTES:
            raise TransportError(
                f"peer_resident_bytes is {limit_bytes}: use at least {MIN_LIMIT_BYTES}, or "
                "None for no limit"
            )
        self.limit_bytes = limit_bytes
        self.window_bytes = min(_WINDOW_BYTES, (limit_bytes or 1 << 62) // 4)
        #: Reentrant: a window may end in a garbage collection that runs inside.
        self.lock = threading.RLock()
        #: Never less than what is mapped; what a gone peer left counts until its turn.
        self.resident_bytes = 0
        self._oldest_first: deque[tuple[weakref.ref[PeerMemory], Int64Array]] = deque()

    def add(self, memory: PeerMemory, granules: Int64Array) -> None:
        """``granules`` are to be mapped now: make room. With the lock held."""
        limit = self.limit_bytes
        if limit is None:
            return
        self._oldest_first.append((weakref.ref(memory), granules))
        self.resident_bytes += len(granules) * GRANULE
        for _ in range(len(self._oldest_first)):
            if self.resident_bytes <= limit:
                return
            ref, candidates = self._oldest_first.popleft()
            owner = ref()
            kept = candidates[:0] if owner is None else owner.give_back(candidates)
            self.resident_bytes -= (len(candidates) - len(kept)) * GRANULE
            if len(kept):
                self._oldest_first.append((ref, kept))


class PeerMemory:
    """One mapped segment of a peer; ``array`` is all of it."""

    def __init__(self, segment: Segment, pages: PeerPages) -> None:
        self.array: ByteArray = np.frombuffer(segment.buffer, np.uint8)
        self._mapping: mmap.mmap = segment.mapping
        self._pages = pages
        self.size_bytes = segment.size_bytes
        #: Granules are aligned by address; the first one may start before the mapping.
        self._phase = self.array.ctypes.data % GRANULE
        count = (self._phase + segment.size_bytes - 1) // GRANULE + 1
        self._mapped: NDArray[np.bool_] = np.zeros(count, np.bool_)
        #: Windows being copied, by granule: these may not be given back, or the copy
        #: would map them again behind our back.
        self._users: NDArray[np.int32] = np.zeros(count, np.int32)

    def windows(self, pieces: Int64Array) -> Iterator[tuple[Int64Array, Int64Array]]:
        """``pieces`` (n, 6), cut where needed, in parts to copy one after the other; with
        each the sorted granules that it touches. Without a limit it is one part."""
        limit, window = self._pages.limit_bytes, self._pages.window_bytes
        if len(pieces) <= _FEW:
            granules = self._few_granules(pieces.tolist())
            if limit is None or len(granules) * GRANULE <= window:
                yield pieces, np.array(granules, np.int64)
                return
        if limit is not None:
            pieces = _cut(pieces, window)
        first, last = self._bounds(pieces)
        if limit is None:
            yield pieces, _granules(first, last)
            return
        touched = last - first + 1
        touched[1:] -= first[1:] == last[:-1]
        # A window ends when it has copied its bytes, or touches half the limit with rows
        # that are smaller than a granule.
        payload = pieces[:, ROW_BYTES] * pieces[:, ROWS]
        cost = np.maximum(payload, touched * (2 * GRANULE * window // limit))
        window_of = (np.cumsum(cost) - 1) // window
        cuts = [0, *(np.flatnonzero(np.diff(window_of)) + 1).tolist(), len(pieces)]
        for a, b in itertools.pairwise(cuts):
            yield pieces[a:b], _granules(first[a:b], last[a:b])

    def _few_granules(self, rows: list[list[int]]) -> list[int]:
        found: set[int] = set()
        for _, start, width, rows_, _, stride in rows:
            at = start + self._phase
            end = at + (rows_ - 1) * stride + width
            found.update(range(at // GRANULE, (end - 1) // GRANULE + 1))
        return sorted(found)

    def _bounds(self, pieces: Int64Array) -> tuple[Int64Array, Int64Array]:
        """The first and the last granule of each piece."""
        start = pieces[:, REMOTE_OFFSET] + self._phase
        end = start + (pieces[:, ROWS] - 1) * pieces[:, REMOTE_STRIDE] + pieces[:, ROW_BYTES]
        return start // GRANULE, (end - 1) // GRANULE

    def write(self, pieces: Int64Array, source: ByteArray) -> Iterator[int]:
        """Copy checked ``pieces`` (n, 6) out of ``source`` as :func:`copy_pieces` does, with
        the pages of each window mapped in front of it."""
        for part, granules in self.windows(pieces):
            with self.using(granules) as missing:
                yield from self.populate(missing)
                yield from copy_pieces(part, source, self.array)

    @contextlib.contextmanager
    def using(self, granules: Int64Array) -> Iterator[Int64Array]:
        """Gives those that are not mapped yet; none is given back before the end."""
        with self._pages.lock:
            self._users[granules] += 1
            missing = granules[~self._mapped[granules]]
            if len(missing):
                self._mapped[missing] = True
                self._pages.add(self, missing)
        try:
            yield missing
        finally:
            with self._pages.lock:
                self._users[granules] -= 1

    def populate(self, granules: Int64Array) -> Iterator[int]:
        """Map sorted ``granules``, a bounded step at a time; steps copy 0 bytes."""
        done = 0
        for first, end in _runs(granules):
            for at in range(first, end, _POPULATE_GRANULES):
                stop = min(end, at + _POPULATE_GRANULES)
                self._map(at, stop)
                done += stop - at
                if done >= _POPULATE_GRANULES:
                    yield 0
                    done = 0

    def _map(self, first: int, end: int) -> None:
        if first == 0 and self._phase:
            # The kernel's fault-around starts where a mapping starts, if that is not
            # aligned, and would reach into the next granule, uncounted. Populating for
            # writing maps page by page.
            populate(self._mapping, *self._span(0, 1), write=True)
            first = 1
        if first < end:
            populate(self._mapping, *self._span(first, end), write=False)

    def give_back(self, granules: Int64Array) -> Int64Array:
        """Unmap what no window uses; the rest is returned. With the lock held."""
        used = self._users[granules] > 0
        free = granules[~used]
        self._mapped[free] = False
        for first, end in _runs(free):
            # Pages locked in memory (mlockall) cannot be given back: that was a choice.
            with contextlib.suppress(OSError):
                self._mapping.madvise(mmap.MADV_DONTNEED, *self._span(first, end))
        return granules[used]

    def _span(self, first: int, end: int) -> tuple[int, int]:
        """Offset and bytes in the mapping of granules [first, end)."""
        start = max(0, first * GRANULE - self._phase)
        return start, min(len(self.array), end * GRANULE - self._phase) - start


class Writable(Protocol):
    """Memory of a peer."""

    def write(self, pieces: Int64Array, source: ByteArray) -> Iterator[int]: ...


def copy_paged(
    plan: CopyPlan, local: Mapping[int, ByteArray], remote: Mapping[int, Writable]
) -> Iterator[int]:
    """As :func:`copy_steps`, into memory of a peer, however that is written."""
    for pair in plan.pairs:
        yield from remote[pair.remote_region].write(pair.pieces, local[pair.local_region])


def _granules(first: Int64Array, last: Int64Array) -> Int64Array:
    """All of [first, last], each once, sorted."""
    lowest = int(first.min())
    touched = np.zeros(int(last.max()) - lowest + 1, np.bool_)
    touched[first - lowest] = True
    touched[last - lowest] = True
    for i in np.flatnonzero(last - first > 1).tolist():
        touched[first[i] - lowest : last[i] - lowest] = True
    return np.flatnonzero(touched) + lowest


def _runs(granules: Int64Array) -> Iterator[tuple[int, int]]:
    """[first, end) of neighbours; ``granules`` are sorted."""
    if not len(granules):
        return
    breaks = np.flatnonzero(np.diff(granules) != 1) + 1
    firsts = granules[np.concatenate(([0], breaks))].tolist()
    lasts = granules[np.concatenate((breaks, [len(granules)])) - 1].tolist()
    for first, last in zip(firsts, lasts, strict=True):
        yield first, last + 1


def _cut(pieces: Int64Array, window_bytes: int) -> Int64Array:
    """No piece spans more than a window, and no row skips over a granule."""
    extent = pieces[:, ROWS] * np.maximum(pieces[:, REMOTE_STRIDE], pieces[:, ROW_BYTES])
    if extent.max() <= window_bytes and pieces[:, REMOTE_STRIDE].max() < GRANULE:
        return pieces
    stride = np.maximum(pieces[:, REMOTE_STRIDE], 1)
    rows = np.where(stride >= GRANULE, 1, window_bytes // stride)
    pieces, skip = _split(pieces, ROWS, rows)
    pieces[:, LOCAL_OFFSET] += skip * pieces[:, LOCAL_STRIDE]
    pieces[:, REMOTE_OFFSET] += skip * pieces[:, REMOTE_STRIDE]
    # Only pieces of one row can still be longer than that.
    pieces, skip = _split(pieces, ROW_BYTES, np.full(len(pieces), window_bytes))
    pieces[:, LOCAL_OFFSET] += skip
    pieces[:, REMOTE_OFFSET] += skip
    return pieces


def _split(pieces: Int64Array, column: int, most: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Pieces with at most ``most`` in ``column``, and how much of it lies before each."""
    total = pieces[:, column]
    parts = -(-total // most)
    index = np.repeat(np.arange(len(parts)), parts)
    part = np.arange(len(index)) - np.repeat(np.cumsum(parts) - parts, parts)
    skip = part * most[index]
    out = pieces[index]
    out[:, column] = np.minimum(total[index] - skip, most[index])
    return out, skip
