"""A checked copy plan as chunks of staged bytes: cut, gathered here, scattered there.

A message of torch.distributed costs 40-60 us whatever its size (measured with gloo), and
a receive must be posted for its exact size: so blocks are gathered into one staging
buffer per chunk, and the receiver, which is told where they belong, scatters them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import attrs
import numpy as np

from pdcore.errors import TransportError
from pdcore.kv.plan import Int64Array, WriteBatch
from pdcore.transports.base import RemoteLease
from pdcore.transports.check import CopyPlan, plan_copies
from pdcore.transports.copy import ByteArray, copy_pieces, copy_steps
from pdcore.transports.torchdist_wire import (
    MAX_ROWS,
    ChunkHead,
)

#: The region number of the staging buffer in a plan of the receiver.
STAGING = 0


@attrs.frozen(eq=False)
class Chunk:
    """``table`` is what the receiver is told (see ChunkHead); ``sources`` are per local
    region the same rows as pieces into the staging buffer."""

    num_bytes: int
    sources: tuple[tuple[int, Int64Array], ...]
    table: Int64Array
    is_last: bool


@attrs.define(eq=False)
class _Growing:
    """Rows of the chunk being filled: (local region, remote region, local offset, remote
    offset, row bytes, rows, local stride, remote stride)."""

    rows: list[tuple[int, ...]] = attrs.field(factory=list)
    num_bytes: int = 0

    def add(self, row: tuple[int, ...]) -> None:
        self.rows.append(row)
        self.num_bytes += row[4] * row[5]

    def finish(self, *, is_last: bool) -> Chunk:
        cols = np.array(self.rows, np.int64).reshape(-1, 8)
        sizes = cols[:, 4] * cols[:, 5]
        at = np.cumsum(sizes) - sizes
        pieces = np.stack([cols[:, 2], at, cols[:, 4], cols[:, 5], cols[:, 6], cols[:, 4]], axis=1)
        sources = tuple(
            (int(region), pieces[cols[:, 0] == region]) for region in np.unique(cols[:, 0])
        )
        table = cols[:, [1, 3, 4, 5, 7]]
        num_bytes = self.num_bytes
        self.rows, self.num_bytes = [], 0
        return Chunk(num_bytes, sources, table, is_last)


def cut(plan: CopyPlan, chunk_bytes: int, max_rows: int = MAX_ROWS) -> Iterator[Chunk]:
    """Chunks of at most ``chunk_bytes`` and ``max_rows`` rows, one at least: a transfer
    of nothing is one empty chunk. Rows are cut where a chunk ends."""
    growing = _Growing()
    for row in _rows(plan, chunk_bytes):
        local, remote, lo, ro, width, rows, ls, rs = row
        while rows:
            room = chunk_bytes - growing.num_bytes
            fit = min(rows, room // width)
            if len(growing.rows) == max_rows or (not fit and (rows > 1 or not room)):
                yield growing.finish(is_last=False)
            elif fit:
                growing.add((local, remote, lo, ro, width, fit, ls, rs))
                lo, ro, rows = lo + fit * ls, ro + fit * rs, rows - fit
            else:
                growing.add((local, remote, lo, ro, room, 1, room, room))
                lo, ro, width = lo + room, ro + room, width - room
    yield growing.finish(is_last=True)


def _rows(plan: CopyPlan, chunk_bytes: int) -> Iterator[tuple[int, ...]]:
    """Pieces of which either all rows fit a chunk, or which have a single row."""
    for pair in plan.pairs:
        for lo, ro, width, rows, ls, rs in pair.pieces.tolist():
            if rows == 1 or width <= chunk_bytes:
                yield pair.local_region, pair.remote_region, lo, ro, width, rows, ls, rs
                continue
            for i in range(rows):
                start, into = lo + i * ls, ro + i * rs
                yield pair.local_region, pair.remote_region, start, into, width, 1, width, width


def gather(chunk: Chunk, local: Mapping[int, ByteArray], staging: ByteArray) -> None:
    for region, pieces in chunk.sources:
        for _ in copy_pieces(pieces, local[region], staging):
            pass


def plan_chunk(
    head: ChunkHead, sizes: Mapping[int, int], lease: RemoteLease, chunk_bytes: int
) -> CopyPlan:
    """Check what a peer announced against our own regions and the lease it names, as if
    nobody had before. Raises TransportError."""
    table = head.table
    widths, rows = table[:, 2], table[:, 3]
    if not 0 <= head.num_bytes <= chunk_bytes or len(table) > MAX_ROWS:
        raise TransportError(f"a chunk of {head.num_bytes} bytes and {len(table)} rows")
    if len(table) and (table.min() < 0 or max(widths.max(), rows.max()) > chunk_bytes):
        raise TransportError("a chunk with a negative or absurd row")
    lengths = widths * rows
    if int(lengths.sum()) != head.num_bytes:
        raise TransportError("the rows of a chunk are not as long as the chunk")
    at = np.cumsum(lengths) - lengths
    pieces = np.stack([at, table[:, 1], widths, rows, widths, table[:, 4]], axis=1)
    batches = [
        WriteBatch(STAGING, int(region), pieces[table[:, 0] == region])
        for region in np.unique(table[:, 0])
    ]
    return plan_copies(batches, {STAGING: head.num_bytes}, sizes, lease)


def scatter(plan: CopyPlan, staging: ByteArray, remote: Mapping[int, ByteArray]) -> None:
    for _ in copy_steps(plan, {STAGING: staging}, remote):
        pass
