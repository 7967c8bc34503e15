"""The decode batch: which running sequences take part in the next step (R84-R89).

Cost follows what changed, not what exists. A :class:`DecodeBatcher` keeps the columns
of the runner's batch between steps. A calendar by step number says which sequences need
a block (or drop one) and which reach their length limit, so a step touches only those;
everybody else costs one place in a column of tokens. The prefill batch is in
:mod:`pdcore.scheduler.chunks`; its names are re-exported here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections import abc as cabc
from itertools import count

from pdcore.errors import EngineError, OwnershipError
from pdcore.kv.cache import KVBlocks
from pdcore.kv.tables import NEVER
from pdcore.scheduler.chunks import (
    PrefillChunk,
    build_prefill_batch,
    commit_prefill,
    select_prefill,
)
from pdcore.scheduler.columns import Calendar, Columns, Row, StopIds
from pdcore.scheduler.sequence import (
    Sequence,
    StepResult,
    check_finished,
    commit_tokens,
    stop_ids,
    token_limit,
)
from pdcore.types import Batch, OneTokenEach, Phase, StepOutput, one_token_each

__all__ = [
    "DecodeBatcher",
    "PrefillChunk",
    "Sequence",
    "StepResult",
    "build_prefill_batch",
    "check_finished",
    "commit_prefill",
    "select_prefill",
]


class DecodeBatcher:
    """The running sequences of one rank and the batch they form.

    Order of priority is order of ``add``: the first ``batch_size`` of them take part,
    and when blocks are short the earlier ones get them; one that gets none sits out this
    step (R88). ``next_n`` speculative tokens per step enlarge the slots asked for, and
    a step may then return up to 1 + next_n tokens per sequence.

    One step is: ``schedule``, ``build_batch``, the engine, ``commit`` (or ``abandon``
    when the engine failed). ``add`` and ``remove`` are legal at any time; while a batch is
    in flight they take effect at its commit, and the blocks of a removed sequence that is
    part of it must not be freed before that.
    """

    def __init__(
        self,
        kv: KVBlocks,
        eos_token_ids: cabc.Collection[int],
        max_model_len: int,
        batch_size: int,
        next_n: int = 0,
    ) -> None:
        self._kv = kv
        self._eos = frozenset(eos_token_ids)
        self._max_model_len = max_model_len
        self._batch_size = batch_size
        self._next_n = next_n
        self._orders = count()
        self._rows: dict[int, Row] = {}
        #: Added, not yet among the first batch_size; by seq_id, in order.
        self._waiting: OrderedDict[int, Row] = OrderedDict()
        #: Among the first batch_size, but without blocks for the next step.
        self._stalled: dict[int, Row] = {}
        self._columns = Columns()
        self._calendar = Calendar()
        self._stops = StopIds()

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._rows

    def sequences(self) -> list[Sequence]:
        """All running sequences in order of priority."""
        return [row.seq for row in self._rows.values()]

    def add(self, seq: Sequence) -> None:
        """Let a prefilled sequence with at least one output token run.

        Raises OwnershipError for one that is already here, not prefilled, or finished.
        """
        if seq.seq_id in self._rows or not seq.is_prefill_done or not seq.output_token_ids:
            raise OwnershipError(f"{seq} cannot run: it must be new here and prefilled")
        if seq.finish_reason is not None:
            raise OwnershipError(f"{seq} has finished")
        row = Row(seq, next(self._orders), stop_ids(seq, self._eos))
        self._stops.add(row.stops)
        self._rows[seq.seq_id] = row
        self._waiting[seq.seq_id] = row

    def remove(self, seq_id: int) -> Sequence | None:
        """Take a sequence out, whatever it is doing; None when it is not here."""
        row = self._rows.pop(seq_id, None)
        if row is None:
            return None
        self._waiting.pop(seq_id, None)
        self._stalled.pop(seq_id, None)
        self._stops.discard(row.stops)
        self._calendar.forget_limit(row)
        self._calendar.forget_alloc(row)
        if row.index >= 0:
            self._columns.remove(row)
        return row.seq

    def schedule(self) -> int:
        """Allocate slots for the next step; returns how many sequences take part.

        0 with sequences present means that none of them gets a block: retract one and
        call again. Repeating it costs nothing; with sliding windows another sequence may join
        then, on blocks that one which got none has slid out of. Raises OwnershipError while a
        batch is in flight.
        """
        columns = self._columns
        if columns.in_flight:
            raise OwnershipError("a decode batch is in flight: commit or abandon it first")
        due = self._calendar.pop_alloc()
        room = self._batch_size - len(columns.rows) - len(self._stalled)
        if self._stalled or not _grow_due(self._kv, self._calendar, due, self._next_n):
            again = {**due, **{row.order: row for row in self._stalled.values()}}
            self._stalled.clear()
            for order in sorted(again):
                self._place(again[order])
        while room > 0 and self._waiting:
            self._place(self._waiting.popitem(last=False)[1])
            room -= 1
        return len(columns.rows)

    def build_batch(self, batch_id: int) -> Batch:
        """The runner's batch for what ``schedule`` decided; it is in flight from now on.

        Its lists are the batcher's own: nothing changes them before the commit.
        """
        columns = self._columns
        step = self._calendar.step
        batch = Batch(batch_id, Phase.DECODE)
        batch.seq_ids = columns.seq_ids
        batch.input_ids = columns.last
        batch.query_lens = [1] * len(columns.rows)
        batch.num_computed_tokens = [offset + step for offset in columns.offsets]
        batch.block_tables = columns.tables
        batch.sampling = columns.sampling
        batch.sample = [True] * len(columns.rows)
        columns.take_off()
        return batch

    def abandon(self) -> None:
        """The engine failed: nothing was sampled, the batch is no longer in flight."""
        self._columns.land()

    def commit(self, output: StepOutput) -> StepResult:
        """Append the step's tokens, find who finished (R74, D18), advance the calendar.

        Raises EngineError, changing nothing, when the output does not match the batch:
        one token per sequence, or 1 .. 1 + next_n.
        """
        columns = self._columns
        if not columns.in_flight:
            raise OwnershipError("no decode batch is in flight")
        if len(output.token_ids) != len(columns.rows):
            raise EngineError(
                f"decode batch of {len(columns.rows)} returned {len(output.token_ids)} rows"
            )
        flat = one_token_each(output.token_ids)
        if flat is not None:
            hits = self._take_one_each(flat)
            result = _settle(columns, OneTokenEach(flat), output.logprobs, hits)
        else:
            many, hits = self._take_many(output)
            result = _settle(columns, many, output.logprobs, hits)
        for seq in result.finished:
            self.remove(seq.seq_id)
        return result

    def _take_one_each(self, flat: list[int]) -> set[int]:
        """Append one token per row; returns the positions that may have finished."""
        columns = self._columns
        columns.take(flat)
        hits = {row.index for row in self._calendar.pop_limit()}
        stops = self._stops.ids
        if not stops.isdisjoint(flat):
            hits.update([i for i, token in enumerate(flat) if token in stops])
        hits.difference_update([row.index for row in columns.gone or ()])
        self._calendar.step += 1
        for i in hits:
            seq = columns.seqs[i]
            seq.finish_reason = check_finished(seq, self._eos, self._max_model_len, flat[i])
        return hits

    def _take_many(self, output: StepOutput) -> tuple[list[cabc.Sequence[int]], set[int]]:
        """The same when some row has several tokens, or a wrong number of them; also
        returns the rows, cut where a sequence ended."""
        columns = self._columns
        rows: list[cabc.Sequence[int]] = []
        for seq_id, ids in zip(columns.seq_ids, output.token_ids, strict=True):
            if ids is None or not 1 <= len(ids) <= 1 + self._next_n:
                raise EngineError(
                    f"sequence {seq_id} got {0 if ids is None else len(ids)} tokens in a "
                    f"decode step; the batch allows 1 to {1 + self._next_n}"
                )
            rows.append(ids)
        columns.own_last()
        self._calendar.pop_limit()
        self._calendar.step += 1
        hits: set[int] = set()
        gone = {row.index for row in columns.gone or ()}
        for i, ids in enumerate(rows):
            seq = columns.seqs[i]
            if i in gone:
                continue
            probs = None if output.logprobs is None else output.logprobs[i]
            taken = commit_tokens(seq, ids, probs, self._eos, self._max_model_len)
            rows[i] = ids[:taken]
            columns.last[i] = ids[taken - 1]
            columns.offsets[i] = seq.num_computed_tokens - self._calendar.step
            if seq.finish_reason is not None:
                hits.add(i)
            else:
                _plan(
                    self._kv, self._calendar, columns.rows[i], seq.num_computed_tokens, self._next_n
                )
        return rows, hits

    def _place(self, row: Row) -> None:
        """Give a sequence slots for the next step and a row, or let it sit out."""
        seq = row.seq
        computed = seq.num_computed_tokens
        if not self._kv.allocate_slots(
            seq.seq_id, computed, 1 + self._next_n, max(self._next_n - 1, 0)
        ):
            if row.index >= 0:
                self._columns.remove(row)
            self._calendar.forget_limit(row)
            self._calendar.forget_alloc(row)
            self._stalled[seq.seq_id] = row
            return
        if row.index < 0:
            table = self._kv.get_block_ids(seq.seq_id)
            row.blocks = next(iter(table.values()))
            self._columns.append(row, table, self._calendar.step)
        _plan(self._kv, self._calendar, row, computed + 1, self._next_n)

    def __repr__(self) -> str:
        return (
            f"DecodeBatcher(running={len(self._rows)}, batch={len(self._columns.rows)}, "
            f"waiting={len(self._waiting)}, stalled={len(self._stalled)}, "
            f"step={self._calendar.step})"
        )


def _grow_due(kv: KVBlocks, calendar: Calendar, due: dict[int, Row], next_n: int) -> bool:
    """The common case: every due table needs exactly one more block and there are
    enough. False: nothing was done, place them one by one."""
    size = kv.uniform_block_size
    if not due:
        return True
    if size is None or next_n or not kv.grow_each([row.blocks for row in due.values()]):
        return False
    calendar.plan_alloc_together(due, calendar.step + size)
    return True


def _settle(
    columns: Columns,
    rows: cabc.Sequence[cabc.Sequence[int]],
    logprobs: cabc.Sequence[cabc.Sequence[float] | None] | None,
    hits: set[int],
) -> StepResult:
    """Land the batch; sequences that left while it was in flight get no result. ``hits``
    are the positions that may have finished."""
    seqs, keys = columns.lend()
    finished = [seqs[i] for i in sorted(hits) if seqs[i].finish_reason is not None]
    if columns.gone:
        gone = {row.index for row in columns.gone or ()}
        keep = [i for i in range(len(seqs)) if i not in gone]
        seqs, keys = [seqs[i] for i in keep], [keys[i] for i in keep]
        rows = [rows[i] for i in keep]
        logprobs = None if logprobs is None else [logprobs[i] for i in keep]
    columns.land()
    if logprobs is not None:
        for seq, probs in zip(seqs, logprobs, strict=True):
            seq.record_logprobs(probs)
    return StepResult(seqs, keys, rows, logprobs, finished)


def _plan(kv: KVBlocks, calendar: Calendar, row: Row, changes_from: int, next_n: int) -> None:
    """Enter the steps that touch this row next. ``changes_from``: token count from which
    a table change has not been made yet."""
    seq, step = row.seq, calendar.step
    change = kv.next_change(seq.seq_id, changes_from, 1 + next_n, max(next_n - 1, 0))
    if change < NEVER:
        calendar.plan_alloc(row, step + change - seq.num_computed_tokens)
    left = token_limit(seq, kv.max_model_len) - seq.num_tokens
    calendar.plan_limit(row, step + max(0, left - 1))
