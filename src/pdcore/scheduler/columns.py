"""What a :class:`pdcore.scheduler.batch.DecodeBatcher` keeps between steps: the columns
of the runner's batch, and a calendar of the few sequences that a given step touches."""

from __future__ import annotations

from collections import Counter, abc
from itertools import zip_longest
from typing import Final, TypeVar

from pdcore.scheduler.sequence import Sequence
from pdcore.types import RoomKey, SamplingParams

_T = TypeVar("_T")


#: Steps whose tokens may wait in columns before they are handed to the sequences. A hand-out
#: costs about 0.6 us per sequence whether it is of 16 tokens or 64: 40 ns or 10 ns a token.
HISTORY_STEPS: Final = 64


class Row:
    """Book-keeping of one running sequence. ``index`` is its column position or -1."""

    __slots__ = (
        "blocks",
        "columns",
        "due",
        "flushed",
        "index",
        "limit_step",
        "order",
        "output",
        "seq",
        "stops",
    )

    def __init__(self, seq: Sequence, order: int, stops: frozenset[int]) -> None:
        self.seq = seq
        self.order = order
        self.stops = stops
        self.index = -1
        #: The calendar's set of rows whose tables change before the same step as this one's.
        self.due: dict[int, Row] | None = None
        #: Step at whose commit it reaches its length limit.
        self.limit_step = -1
        #: The one table, when there is a uniform block size.
        self.blocks: list[int] = []
        self.columns: Columns | None = None
        #: Where its tokens go: the sequence's own list while it is in the batch.
        self.output: list[int] = []
        #: Entries of the columns' history that the sequence already has.
        self.flushed = 0

    @property
    def num_pending(self) -> int:
        return 0 if self.columns is None else len(self.columns.history) - self.flushed

    def flush(self) -> None:
        columns = self.columns
        if columns is not None and self.flushed < len(columns.history):
            index = self.index
            self.output += [c[index] for c in columns.history[self.flushed :]]
            self.flushed = len(columns.history)


class StopIds:
    """Every token that may stop some running sequence: a normal step tests its tokens
    against ``ids`` once, instead of each against its own request."""

    __slots__ = ("_counts", "ids")

    def __init__(self) -> None:
        self.ids: set[int] = set()
        self._counts: Counter[int] = Counter()

    def add(self, ids: frozenset[int]) -> None:
        self._counts.update(ids)
        self.ids |= ids

    def discard(self, ids: frozenset[int]) -> None:
        self._counts.subtract(ids)
        for token in ids:
            if self._counts[token] <= 0:
                del self._counts[token]
                self.ids.discard(token)


class Calendar:
    """Rows by the step that touches them. ``step`` is the next step to run."""

    __slots__ = ("_alloc", "_limit", "step")

    def __init__(self) -> None:
        self.step = 0
        self._alloc: dict[int, dict[int, Row]] = {}
        self._limit: dict[int, dict[int, Row]] = {}

    def plan_alloc(self, row: Row, step: int) -> None:
        self.forget_alloc(row)
        row.due = self._alloc.setdefault(step, {})
        row.due[row.order] = row

    def plan_alloc_together(self, rows: dict[int, Row], step: int) -> None:
        """Enter the rows of a ``pop_alloc`` again, as they are: rows that fill a block in
        the same step go on doing so, and nobody is visited."""
        known = self._alloc.setdefault(step, rows)
        if known is not rows:
            for row in rows.values():
                row.due = known
            known.update(rows)

    def forget_alloc(self, row: Row) -> None:
        """The row left the batch: its tables change no more."""
        if row.due is not None:
            row.due.pop(row.order, None)
            row.due = None

    def pop_alloc(self) -> dict[int, Row]:
        """Rows in the batch whose tables change before this step, by order."""
        return self._alloc.pop(self.step, {})

    def plan_limit(self, row: Row, step: int) -> None:
        self.forget_limit(row)
        row.limit_step = step
        self._limit.setdefault(step, {})[row.order] = row

    def forget_limit(self, row: Row) -> None:
        """A row that leaves must not be kept alive by a far-away limit."""
        rows = self._limit.get(row.limit_step)
        if rows is not None and rows.pop(row.order, None) is not None and not rows:
            del self._limit[row.limit_step]

    def pop_limit(self) -> abc.Collection[Row]:
        """Rows that reach their length limit with this step's token."""
        return self._limit.pop(self.step, {}).values()


class Columns:
    """The parallel lists of the decode batch. While a batch is in flight no list
    changes: rows that leave are marked gone and taken out when it lands.

    ``history`` holds the token columns of the last steps. A row takes its tokens from
    there when its sequence is read, before it moves, and every HISTORY_STEPS steps.
    """

    __slots__ = (
        "gone",
        "history",
        "keys",
        "last",
        "offsets",
        "ones",
        "rows",
        "sample",
        "sampling",
        "seq_ids",
        "seqs",
        "tables",
    )

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.seqs: list[Sequence] = []
        self.seq_ids: list[int] = []
        self.keys: list[RoomKey] = []
        self.tables: list[abc.Mapping[str, abc.Sequence[int]]] = []
        self.sampling: list[SamplingParams] = []
        self.last: list[int] = []
        #: num_computed_tokens minus the step number: constant while a step gives one token.
        self.offsets: list[int] = []
        self.ones: list[int] = []
        self.sample: list[bool] = []
        #: Rows that leave when the batch in flight lands; None: no batch is in flight.
        self.gone: list[Row] | None = None
        self.history: list[list[int]] = []

    def append(self, row: Row, table: dict[str, list[int]], step: int) -> None:
        seq = row.seq
        row.index = len(self.rows)
        row.columns = self
        row.flushed = len(self.history)
        self.rows.append(row)
        self.seqs.append(seq)
        self.seq_ids.append(seq.seq_id)
        self.keys.append(seq.request.key)
        row.output = seq.attach(row)
        self.tables.append(table)
        self.sampling.append(seq.request.sampling)
        self.last.append(row.output[-1])
        self.offsets.append(seq.num_computed_tokens - step)
        self.ones.append(1)
        self.sample.append(True)

    def take(self, tokens: list[int]) -> None:
        """One new token per row."""
        self.last = tokens
        self.history.append(tokens)
        if len(self.history) >= HISTORY_STEPS:
            self.flush()

    def flush(self) -> None:
        """Hand all waiting tokens to the sequences and start a new history."""
        # Columns differ in length when rows came and went; what a row was not there for,
        # its ``flushed`` cuts off.
        lengths = set(map(len, self.history))
        by_row = zip(*self.history, strict=True) if len(lengths) == 1 else _by_row(self.history)
        for row, tokens in zip(self.rows, by_row, strict=False):
            if row.flushed:
                row.output += tokens[row.flushed :]
                row.flushed = 0
            else:
                row.output += tokens
        for row in self.rows[max(lengths, default=0) :]:
            row.flushed = 0
        self.history.clear()

    def remove(self, row: Row) -> None:
        """Take a row out now, or when the batch in flight lands."""
        if row.columns is not None:
            row.seq.attach(None)
            row.columns = None
        if self.gone is not None:
            # Its token goes nowhere: the sequence may be in another queue already.
            row.output = []
            self.gone.append(row)
            return
        hole = row.index
        row.index = -1
        moved = self.rows[-1]
        if moved is not row:
            moved.flush()
            moved.index = hole
        _fill_hole(self.rows, hole)
        _fill_hole(self.seqs, hole)
        _fill_hole(self.seq_ids, hole)
        _fill_hole(self.keys, hole)
        _fill_hole(self.tables, hole)
        _fill_hole(self.sampling, hole)
        _fill_hole(self.last, hole)
        _fill_hole(self.offsets, hole)
        self.ones.pop()
        self.sample.pop()

    @property
    def in_flight(self) -> bool:
        return self.gone is not None

    def take_off(self) -> None:
        """A batch of these rows is in flight from now on."""
        self.gone = []

    def land(self) -> None:
        """The batch is no longer in flight: rows that left meanwhile go now."""
        gone, self.gone = self.gone, None
        for row in gone or ():
            self.remove(row)


def _by_row(history: list[list[int]]) -> abc.Iterator[tuple[int, ...]]:
    return zip_longest(*history, fillvalue=-1)


def _fill_hole(column: list[_T], hole: int) -> None:
    """Move the last item into the hole: O(1); the order of rows means nothing."""
    last = column.pop()
    if hole < len(column):
        column[hole] = last
