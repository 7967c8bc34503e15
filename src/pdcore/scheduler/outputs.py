"""What a runner returned, checked once before any core believes it (D45).

A user's engine may return anything. Whatever does not fit the batch fails the batch's
requests, never the loop; what fits is passed on unchanged, so that the check costs a few
passes at C speed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from typing import Final

from pdcore.errors import EngineError
from pdcore.types import Batch, OneTokenEach, StepOutput, one_token_each

#: R37: what a logprob that is not a finite number becomes; the lowest float32.
LOWEST_LOGPROB: Final = -3.4028234663852886e38


def check_output(batch: Batch, output: StepOutput, vocab_size: int) -> StepOutput:
    """The output, with non-finite logprobs replaced (R37). Raises EngineError for a wrong
    number of rows, a missing or stray token, ids outside the vocabulary, or logprobs that
    do not match the tokens."""
    rows = output.token_ids
    if len(rows) != len(batch):
        raise EngineError(f"{batch!r} returned {len(rows)} rows")
    flat = one_token_each(rows) if False not in batch.sample else None
    if flat is not None and flat and set(map(type, flat)) == {int}:
        # What nearly every decode step is: checked in few passes, and passed on flat.
        if min(flat) < 0 or max(flat) >= vocab_size:
            raise EngineError(f"{batch!r} returned token ids outside 0..{vocab_size - 1}")
        output = StepOutput(OneTokenEach(flat), output.logprobs, output.elapsed_s)
    else:
        _check_rows(batch, rows, vocab_size)
    if output.logprobs is None:
        return output
    logprobs = _check_logprobs(batch, rows, output.logprobs)
    return StepOutput(output.token_ids, logprobs, output.elapsed_s)


def _check_rows(batch: Batch, rows: Sequence[Sequence[int] | None], vocab_size: int) -> None:
    try:
        given = [row is not None and len(row) > 0 for row in rows]
        flat = list(chain.from_iterable(row for row in rows if row is not None))
        is_in_range = not flat or (min(flat) >= 0 and max(flat) < vocab_size)
    except TypeError:
        raise EngineError(f"{batch!r} returned something else than rows of token ids") from None
    if given != batch.sample:
        raise EngineError(f"{batch!r} returned tokens for other sequences than were sampled")
    if not is_in_range or not all(type(token) is int for token in flat):
        raise EngineError(f"{batch!r} returned token ids outside 0..{vocab_size - 1}")


def _check_logprobs(
    batch: Batch,
    rows: Sequence[Sequence[int] | None],
    logprobs: Sequence[Sequence[float] | None],
) -> list[list[float] | None]:
    if len(logprobs) != len(rows):
        raise EngineError(f"{batch!r} returned {len(logprobs)} rows of logprobs")
    checked: list[list[float] | None] = []
    for row, probs in zip(rows, logprobs, strict=True):
        if probs is None or row is None:
            checked.append(None)
            continue
        if len(probs) != len(row):
            raise EngineError(f"{batch!r} returned {len(probs)} logprobs for {len(row)} tokens")
        checked.append([p if math.isfinite(p) else LOWEST_LOGPROB for p in probs])
    return checked
