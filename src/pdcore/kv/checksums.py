"""Checksums over the KV that one prefill rank writes into one decode rank.

Both sides compute them, each over its own memory, and decode compares before a request may
use its blocks: a byte that was right at the source and is wrong at the destination fails that
request and no other. This is no protection against a peer that lies.

Theory. A leg's bytes lie differently on the two sides, so neither offsets nor descriptors can
be the unit. What both sides know is the position: the tokens of a transfer are cut wherever a
block of either side ends (as in :mod:`pdcore.kv.reblock`), each cut lies in one block of each
side, and one crc32 runs over what the leg carries of it: entries by name, of each the heads
that this rank gives to that one, in the order of the destination's memory. With equal block
sizes blocks travel whole, and so are summed whole: then no byte that is written goes unseen.
With different ones only rows of the prompt travel; rows that no query can read any more
(behind a sliding window) are left out on both sides.

This is addressed anew, from the definition, and not read off the descriptors: a plan that put
right bytes in a wrong place would be noticed too.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pdcore.kv.reblock import BlockShape, Cuts, Int64Array, Share, shared_blocks
from pdcore.kv.slices import slice_token
from pdcore.kv.spec import HEAD_MAJOR, KVCacheEntry, KVCacheSpec, KVPlacement
from pdcore.types import NULL_BLOCK

ByteArray = NDArray[np.uint8]

#: Bytes of one checksum.
SUM_BYTES: Final = 4
#: Cuts whose places become Python's integers at once: that keeps every other thread waiting.
_CUTS_AT_ONCE: Final = 64


class SumGroup(NamedTuple):
    """The cuts of one manager key. ``pieces`` has shape (cuts, entries, 4), int64: offset into
    that entry's region, bytes per row, rows, and bytes from row to row."""

    key: str
    #: Position of the first token of each cut.
    tokens: list[int]
    regions: tuple[int, ...]
    pieces: Int64Array


class SumPlan(NamedTuple):
    """What one side sums of one transfer: a crc32 for each cut, groups in order of their key."""

    groups: tuple[SumGroup, ...]

    @property
    def num_sums(self) -> int:
        return sum(len(group.tokens) for group in self.groups)

    def place_of(self, index: int) -> tuple[str, int]:
        """Manager key and first token of the cut that a checksum is of."""
        for group in self.groups:
            if index < len(group.tokens):
                return group.key, group.tokens[index]
            index -= len(group.tokens)
        raise IndexError("this plan has no such checksum")


class _Column(NamedTuple):
    """One entry, all in bytes: where the leg's part of block 0 begins, from block to block and
    from row to row, and what is carried of a row. Head-major entries have ``num_heads`` > 0
    and ``head_step`` from head to head: rows of one head lie side by side."""

    region: int
    offset: int
    block_step: int
    row_step: int
    width: int
    #: Tokens per row.
    ratio: int
    num_heads: int = 0
    head_step: int = 0

    def pieces(self, block: Int64Array, row: Int64Array, rows: Int64Array) -> Int64Array:
        """(cuts, 4) as :class:`SumGroup` has them."""
        out = np.empty((len(block), 4), np.int64)
        out[:, 0] = self.offset + block * self.block_step + row * self.row_step
        if self.num_heads:
            out[:, 1], out[:, 2], out[:, 3] = rows * self.width, self.num_heads, self.head_step
        else:
            out[:, 1], out[:, 2], out[:, 3] = self.width, rows, self.row_step
        # Rows that go on without a gap are one.
        is_one = out[:, 1] == out[:, 3]
        out[is_one, 1] *= out[is_one, 2]
        out[is_one, 2] = 1
        return out


class LegSums:
    """What does not change from request to request, as :class:`pdcore.kv.plan.KVPlanner` for
    the writes. ``own`` and ``placement`` are this side's, ``other`` the other rank's spec."""

    __slots__ = ("_columns", "_is_source", "_shapes")

    def __init__(
        self, own: KVCacheSpec, placement: KVPlacement, other: KVCacheSpec, is_source: bool
    ) -> None:
        self._is_source = is_source
        self._columns: dict[str, list[_Column]] = {}
        self._shapes: dict[str, BlockShape] = {}
        theirs = {entry.name: entry for entry in other.entries}
        src_spec, dst_spec = (own, other) if is_source else (other, own)
        for i in sorted(range(len(own.entries)), key=lambda i: own.entries[i].name):
            entry = own.entries[i]
            if entry.name not in theirs:
                continue  # another stage of a pipeline has it
            pair = entry, theirs[entry.name]
            src, dst = pair if is_source else pair[::-1]
            cut = slice_token(
                src.token_bytes,
                dst.token_bytes,
                src_spec.tp_size,
                dst_spec.tp_size,
                src_spec.tp_rank,
                dst_spec.tp_rank,
            )
            if not cut.is_first:
                continue  # of the ranks that hold copies, another one writes
            shape = BlockShape(src.block_size, dst.block_size, entry.sliding_window)
            self._shapes[entry.manager_key] = shape
            start = cut.src_offset if is_source else cut.dst_offset
            at = placement.regions[i], placement.offsets[i], placement.block_strides[i]
            column = _column(entry, *at, start, cut.length)
            self._columns.setdefault(entry.manager_key, []).append(column)

    def plan(
        self,
        own_blocks: Mapping[str, Sequence[int]],
        dst_blocks: Mapping[str, Sequence[int]],
        tokens: tuple[int, int],
        share: Share,
    ) -> SumPlan:
        """For one transfer: the same arguments as :meth:`KVPlanner.plan` has; at decode both
        tables are its own. Tables are position-aligned and reach the last token."""
        groups = []
        for key in sorted(self._columns):
            first, cuts = self._cut(key, own_blocks[key], dst_blocks[key], tokens, share)
            pieces = []
            for column in self._columns[key]:
                src_row, dst_row, rows = cuts.rows(column.ratio)
                block, row = (cuts.src, src_row) if self._is_source else (cuts.dst, dst_row)
                pieces.append(column.pieces(block, row, rows))
            groups.append(
                SumGroup(
                    key,
                    first.tolist(),
                    tuple(column.region for column in self._columns[key]),
                    np.stack(pieces, axis=1),
                )
            )
        return SumPlan(tuple(groups))

    def _cut(
        self,
        key: str,
        own: Sequence[int],
        dst: Sequence[int],
        tokens: tuple[int, int],
        share: Share,
    ) -> tuple[Int64Array, Cuts]:
        """First positions, and the cuts; only this side's block ids in them are meant."""
        shape = self._shapes[key]
        first, last = _edges(shape, tokens, share)
        there = np.asarray(dst, np.int64)[first // shape.dst_size]
        keep = there != NULL_BLOCK
        if shape.window is not None and shape.src_size != shape.dst_size:
            keep &= last > max(0, tokens[1] - shape.window + 1)
        first, last, there = first[keep], last[keep], there[keep]
        here = np.asarray(own, np.int64)[first // shape.src_size] if self._is_source else there
        inside = first % shape.src_size, first % shape.dst_size
        return first, Cuts(here, there, *inside, last - first)


leg_sums = lru_cache(maxsize=256)(LegSums)


class LegPart(NamedTuple):
    """Transfers of one leg, by what they are planned from. A plan takes milliseconds, and a leg
    of early sends has hundreds: whoever sums, off the loop, plans as well. Nobody changes the
    tables any more."""

    legs: LegSums
    own_blocks: Mapping[str, Sequence[int]]
    dst_blocks: Mapping[str, Sequence[int]]
    #: First and one past the last token of each transfer, in order.
    transfers: tuple[tuple[int, int], ...]
    share: Share

    def plans(self) -> Iterator[SumPlan]:
        for tokens in self.transfers:
            yield self.legs.plan(self.own_blocks, self.dst_blocks, tokens, self.share)

    def sums(self, memory: Mapping[int, ByteArray]) -> bytes:
        """Of all of them, in order; ``memory`` as :func:`sum_blocks` has it."""
        return b"".join(sum_blocks(plan, memory) for plan in self.plans())


def _column(
    entry: KVCacheEntry, region: int, offset: int, stride: int, start: int, length: int
) -> _Column:
    rows, ratio = entry.storage_block_size, entry.compress_ratio
    if entry.layout != HEAD_MAJOR:
        row = entry.token_bytes
        return _Column(region, offset + start, stride, row, length, ratio)
    head = entry.head_bytes
    at = offset + start * rows
    return _Column(region, at, stride, head, head, ratio, length // head, head * rows)


def _edges(shape: BlockShape, tokens: tuple[int, int], share: Share) -> tuple[Int64Array, ...]:
    """First and one past the last position of every cut."""
    src_size, size, _ = shape
    begin, end = shared_blocks(tokens, size, share)
    if src_size == size:
        first = np.arange(begin, end, dtype=np.int64) * size
        return first, first + size
    start, stop = max(tokens[0], begin * size), min(tokens[1], end * size)
    if start >= stop:
        none = np.empty(0, np.int64)
        return none, none
    inner = [np.arange((start // n + 1) * n, stop, n, dtype=np.int64) for n in (src_size, size)]
    edges = np.unique(np.concatenate((*inner, np.array((start, stop), np.int64))))
    return edges[:-1], edges[1:]


def sum_blocks(plan: SumPlan, memory: Mapping[int, ByteArray]) -> bytes:
    """The checksums, little-endian, 4 bytes each. ``memory``: regions by id, one byte per item.

    About as fast as zlib's crc32 where rows lie together; rows that are cut out of longer ones
    are gathered first."""
    sums: list[int] = []
    for group in plan.groups:
        arrays = [memory[region] for region in group.regions]
        for first in range(0, len(group.pieces), _CUTS_AT_ONCE):
            part = group.pieces[first : first + _CUTS_AT_ONCE].tolist()
            sums.extend(_sum_cut(arrays, cut) for cut in part)
    return np.array(sums, "<u4").tobytes()


def _sum_cut(arrays: Sequence[ByteArray], pieces: Sequence[Sequence[int]]) -> int:
    crc = 0
    for array, (at, width, rows, step) in zip(arrays, pieces, strict=True):
        if rows == 1:
            crc = zlib.crc32(array[at : at + width].data, crc)
        else:
            view = np.ndarray((rows, width), np.uint8, array, at, (step, 1))
            crc = zlib.crc32(np.ascontiguousarray(view).data, crc)
    return crc


def first_difference(plans: Sequence[SumPlan], ours: bytes, theirs: bytes) -> str:
    """What is wrong with what has arrived, or "". ``plans``: of the transfers, in order, whose
    checksums the two byte strings are."""
    if ours == theirs:
        return ""
    if len(ours) != len(theirs):
        counts = len(theirs) // SUM_BYTES, len(ours) // SUM_BYTES
        return f"prefill sent {counts[0]} checksums, decode expects {counts[1]}"
    is_wrong = np.frombuffer(ours, "<u4") != np.frombuffer(theirs, "<u4")
    count = int(np.count_nonzero(is_wrong))
    # One plan with all cuts, in their order.
    every = SumPlan(tuple(group for plan in plans for group in plan.groups))
    key, token = every.place_of(int(np.argmax(is_wrong)))
    return (
        f"the KV of {count} of {len(is_wrong)} checked parts did not arrive as it was sent; the "
        f"first begins at token {token} of manager key {key!r}"
    )
