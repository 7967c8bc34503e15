"""What a :class:`pdcore.scheduler.batch.DecodeBatcher` keeps between steps: the columns
of the runner's batch, and a calendar of the few sequences that a given step touches."""

from __future__ import annotations

from collections import Counter, abc
from typing import Final, TypeVar

from pdcore.scheduler.sequence import Sequence
from pdcore.types import RoomKey, SamplingParams

_T = TypeVar("_T")


#: Token columns per history. A row's share of a full history is one entry of its ``past``.
HISTORY_STEPS: Final = 64
#: Histories that a row may refer to before the oldest is gathered into its sequence. A
#: request of up to HISTORY_STEPS * MAX_PAST tokens is never gathered unless somebody reads
#: it (retraction does); a longer one would keep the tokens of all its former neighbours.
MAX_PAST: Final = 16

#: (history, first column, last column + 1, position): tokens of one row.
Share = tuple[list[list[int]], int, int, int]


class Tail:
    """The newest tokens of one sequence, left in the columns they came in: ``past`` and
    ``start`` say where, :meth:`flush` gathers them when the sequence is read.

    It refers to no sequence, so that one that has ended takes its columns along at once.
    """

    __slots__ = ("__weakref__", "columns", "index", "num_past", "output", "past", "start")

    def __init__(self) -> None:
        #: While its row is in the batch, and at which position.
        self.columns: Columns | None = None
        self.index = -1
        #: First column of the current history that belongs to it.
        self.start = 0
        #: Shares that are complete, oldest first, and how many tokens they hold.
        self.past: list[Share] = []
        self.num_past = 0
        #: The sequence's own list.
        self.output: list[int] = []

    @property
    def num_pending(self) -> int:
        current = 0 if self.columns is None else len(self.columns.history) - self.start
        return self.num_past + current

    def close(self) -> None:
        """What the current history holds so far becomes a share: before the row moves,
        leaves, or the history ends. O(1)."""
        columns = self.columns
        if columns is None:
            return
        end = len(columns.history)
        if end > self.start:
            self.past.append((columns.history, self.start, end, self.index))
            self.num_past += end - self.start
            self.start = end

    def flush(self) -> None:
        """Gather everything into the sequence."""
        self.close()
        while self.past:
            self.gather()

    def gather(self) -> None:
        """The oldest share only."""
        history, start, end, index = self.past.pop(0)
        self.output += [column[index] for column in history[start:end]]
        self.num_past -= end - start


class Row:
    """Book-keeping of one running sequence. ``index`` is its column position or -1."""

    __slots__ = ("blocks", "due", "index", "limit_step", "order", "seq", "stops", "tail")

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
        self.tail = Tail()


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

    ``history`` holds the token columns of the last steps, at most HISTORY_STEPS; then a new
    one begins. Nothing in a history ever changes.
    """

    __slots__ = (
        "gone",
        "history",
        "is_lent",
        "keys",
        "last",
        "offsets",
        "rows",
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
        #: Rows that leave when the batch in flight lands; None: no batch is in flight.
        self.gone: list[Row] | None = None
        self.history: list[list[int]] = []
        #: ``seqs`` and ``keys`` are somebody's result: copied before the next change. A copy
        #: every step would touch every sequence every step.
        self.is_lent = False

    def append(self, row: Row, table: dict[str, list[int]], step: int) -> None:
        seq = row.seq
        # A new one each time: what a former one still holds was attached to the sequence.
        tail = row.tail = Tail()
        row.index = tail.index = len(self.rows)
        tail.columns = self
        tail.start = len(self.history)
        self._own()
        self.rows.append(row)
        self.seqs.append(seq)
        self.seq_ids.append(seq.seq_id)
        self.keys.append(seq.request.key)
        tail.output = seq.attach(tail)
        self.tables.append(table)
        self.sampling.append(seq.request.sampling)
        self.last.append(tail.output[-1])
        self.offsets.append(seq.num_computed_tokens - step)

    def take(self, tokens: list[int]) -> None:
        """One new token per row."""
        self.last = tokens
        self.history.append(tokens)
        if len(self.history) >= HISTORY_STEPS:
            self._end_history()

    def _end_history(self) -> None:
        for row in self.rows:
            tail = row.tail
            tail.close()
            tail.start = 0
            if len(tail.past) > MAX_PAST:
                tail.gather()
        self.own_last()
        self.history = []

    def lend(self) -> tuple[list[Sequence], list[RoomKey]]:
        """``seqs`` and ``keys`` as they are now, for good."""
        self.is_lent = True
        return self.seqs, self.keys

    def _own(self) -> None:
        """Call before rows come or go."""
        self.own_last()
        if self.is_lent:
            self.seqs, self.keys = self.seqs.copy(), self.keys.copy()
            self.is_lent = False

    def own_last(self) -> None:
        """Call before changing ``last``: it may be a column of the history, which rows that
        have left still refer to."""
        if self.history and self.last is self.history[-1]:
            self.last = self.last.copy()

    def remove(self, row: Row) -> None:
        """Take a row out now, or when the batch in flight lands."""
        # A token that comes after this goes nowhere: the sequence may be in another queue.
        row.tail.close()
        row.tail.columns = None
        if self.gone is not None:
            self.gone.append(row)
            return
        self._own()
        hole = row.index
        row.index = -1
        moved = self.rows[-1]
        if moved is not row:
            moved.tail.close()
            moved.index = moved.tail.index = hole
        _fill_hole(self.rows, hole)
        _fill_hole(self.seqs, hole)
        _fill_hole(self.seq_ids, hole)
        _fill_hole(self.keys, hole)
        _fill_hole(self.tables, hole)
        _fill_hole(self.sampling, hole)
        _fill_hole(self.last, hole)
        _fill_hole(self.offsets, hole)

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


def _fill_hole(column: list[_T], hole: int) -> None:
    """Move the last item into the hole: O(1); the order of rows means nothing."""
    last = column.pop()
    if hole < len(column):
        column[hole] = last
