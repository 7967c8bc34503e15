"""Value types: batches as parallel lists, identities as plain tuples."""

from __future__ import annotations

import math

import pytest

from pdcore.errors import InvalidRequest
from pdcore.types import (
    MAX_ID,
    Batch,
    OneTokenEach,
    Phase,
    RoomKey,
    SamplingParams,
    StepOutput,
    one_token_each,
    rows_of,
)


def test_a_batch_packs_tokens_back_to_back() -> None:
    """R84: packed ids, no padding; one position per sequence in every column."""
    batch = Batch(1, Phase.PREFILL)
    batch.add(7, [1, 2, 3], 0, {"full": [4]}, SamplingParams(), sample=False)
    batch.add(8, [9], 5, {"full": [2, 6]}, SamplingParams())
    assert batch.input_ids == [1, 2, 3, 9]
    assert batch.query_lens == [3, 1]
    assert batch.num_computed_tokens == [0, 5]
    assert batch.sample == [False, True]
    assert list(batch.spans()) == [(0, 0, 3), (1, 3, 4)]
    assert (len(batch), batch.num_tokens) == (2, 4)
    assert repr(batch) == "Batch(prefill, seqs=2, tokens=4)"


def test_block_tables_are_shared_not_copied() -> None:
    """The scheduler's own lists: building a batch copies no block id."""
    table = {"full": [1, 2]}
    batch = Batch(1, Phase.DECODE)
    batch.add(1, [5], 3, table, SamplingParams())
    table["full"].append(3)
    assert batch.block_tables[0]["full"] == [1, 2, 3]


def test_room_keys_hash_and_compare_by_value() -> None:
    assert {RoomKey(1, 2): "a"}[RoomKey(1, 2)] == "a"
    assert RoomKey(1, 2) != RoomKey(1, 3)
    assert MAX_ID == 2**63 - 1


BAD_SAMPLING = [
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("min_tokens", -1),
    ("temperature", -1.0),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("top_p", 0.0),
    ("top_p", 2.0),
    ("top_p", math.nan),
    ("top_k", -1),
    ("seed", -5),
    ("seed", MAX_ID + 1),
    ("stop_token_ids", (3, -2)),
    ("top_logprobs", -1),
]


@pytest.mark.parametrize(("field", "value"), BAD_SAMPLING)
def test_sampling_parameters_are_checked_where_they_are_made(field: str, value: object) -> None:
    """For who builds requests without the HTTP API; a NaN is no number of any range."""
    with pytest.raises(InvalidRequest, match=rf"{field}: (is|holds) ") as raised:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert raised.value.field == field


def test_min_tokens_may_not_exceed_max_tokens() -> None:
    assert SamplingParams(max_tokens=3, min_tokens=3).min_tokens == 3
    assert SamplingParams(min_tokens=9, temperature=5.0, top_p=1e-9, seed=MAX_ID).seed == MAX_ID
    with pytest.raises(InvalidRequest, match=r"min_tokens: is 4, .* at most max_tokens \(3\)"):
        SamplingParams(max_tokens=3, min_tokens=4)


def test_values_are_frozen() -> None:
    with pytest.raises(AttributeError):
        SamplingParams().max_tokens = 3  # type: ignore[misc]
    with pytest.raises(AttributeError):
        StepOutput([]).elapsed_s = 1.0  # type: ignore[misc]


def test_one_token_each_reads_like_rows() -> None:
    rows = OneTokenEach([4, 5, 6])
    assert list(rows) == [(4,), (5,), (6,)]
    assert (len(rows), rows[1], list(rows[1:])) == (3, (5,), [(5,), (6,)])
    assert repr(rows) == "OneTokenEach([4, 5, 6])"


def test_rows_are_flat_only_when_everybody_has_exactly_one_token() -> None:
    assert one_token_each(rows_of([4, 5])) == [4, 5]
    assert rows_of([4, None]) == [(4,), None]
    assert one_token_each([[4], (5,)]) == [4, 5]
    assert one_token_each([]) == []
    for other in ([[4], None], [None, [4]], [[4, 5]], [[4], []]):
        assert one_token_each(other) is None
