"""The benchmark of resharding: its checks hold, and can tell a wrong plan and a long one."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest

from benchmarks import kv_reshard
from benchmarks.common import CheckFailed
from benchmarks.kv_reshard import KEY, MODELS, TP_SIZES, Leg, Tables, legs, writing
from pdcore.kv.plan import WriteBatch, plan_blocks

CASES = [(kind, tp_sizes) for kind in MODELS for tp_sizes in TP_SIZES]


def small_leg(kind: str, tp_sizes: tuple[int, int]) -> Leg:
    return writing(legs(kind, 1, tp_sizes))


def copied(leg: Leg) -> list[dict[str, object]]:
    """Through loopback: without a process of its own."""
    with patch.object(kv_reshard, "why_unavailable", lambda: "not in this test"):
        return list(kv_reshard.rows_of_copy("small", leg, 1))


def planned(leg: Leg, tables: Tables) -> tuple[WriteBatch, ...]:
    return plan_blocks(
        leg.src, leg.src_place, {KEY: tables.src}, leg.dst, leg.dst_place, {KEY: tables.dst}
    )


def by_token(leg: Leg, tables: Tables) -> tuple[WriteBatch, ...]:
    """D29's mutant: right bytes, a descriptor for each token."""
    pieces = kv_reshard.per_token(leg, tables)
    return (WriteBatch(0, 0, np.array([(*piece, 1, 0, 0) for piece in pieces], np.int64)),)


@pytest.mark.parametrize(("kind", "tp_sizes"), CASES)
def test_plan_and_rule_write_what_the_definition_says(kind: str, tp_sizes: tuple[int, int]) -> None:
    """R80: both sides of the comparison do the same work."""
    leg = small_leg(kind, tp_sizes)
    assert [row["peer"] for row in copied(leg)] == [
        "per token, numpy",
        "per token, loopback",
        "per token, numpy",
    ]


@pytest.mark.parametrize("tp_sizes", TP_SIZES)
def test_the_check_notices_heads_in_the_wrong_place(tp_sizes: tuple[int, int]) -> None:
    def first_head(leg: Leg, tables: Tables) -> tuple[WriteBatch, ...]:
        (batch,) = planned(leg, tables)
        rows = batch.descriptors.copy()
        rows[:, 1] -= leg.dst.entries[0].token_bytes - leg.src.entries[0].token_bytes
        return (WriteBatch(batch.local_region, batch.remote_region, rows),)

    leg = small_leg("GQA", tp_sizes)
    with patch.object(Leg, "plan", first_head), pytest.raises(CheckFailed, match="other bytes"):
        copied(leg)


def test_the_check_notices_a_rule_that_copies_something_else() -> None:
    def one_short(leg: Leg, tables: Tables) -> list[kv_reshard.Piece]:
        return rule(leg, tables)[:-1]

    rule = kv_reshard.per_token
    with patch.object(kv_reshard, "per_token", one_short), pytest.raises(CheckFailed, match="rule"):
        copied(small_leg("MLA", (16, 1)))


@pytest.mark.parametrize(("kind", "tp_sizes"), CASES)
def test_one_descriptor_per_block_entry_and_writing_rank(
    kind: str, tp_sizes: tuple[int, int]
) -> None:
    """D29: of R1's 16 -> 1, 7,808 where the seed has 999,424; 122 when the blocks are a run."""
    found = legs(kind, kv_reshard.NUM_LAYERS, tp_sizes)
    spread, run = kv_reshard.rows_of_count("whole", found)
    writers = sum(bool(leg.plan(kv_reshard.in_one_run())) for leg in found)
    assert (spread["value"], run["value"]) == (writers * 7808, writers * 122)
    assert spread["meets"] is run["meets"] is True
    assert spread["peer_value"] == len(found) * 999_424


def test_the_count_notices_a_descriptor_per_token() -> None:
    """D29: the seed's rule, also where rows are whole on every rank."""
    with patch.object(kv_reshard, "NUM_LAYERS", 1), patch.object(Leg, "plan", by_token):
        found = legs("MLA", 1, (16, 1))
        assert not any(row["meets"] for row in kv_reshard.rows_of_count("whole", found))


def test_a_small_plan_is_measured() -> None:
    rows = list(kv_reshard.rows_of_plan("small", small_leg("GQA", (4, 2)), 1))
    assert [row["metric"] for row in rows] == [
        "planning a leg",
        "the first of a pair",
        "decode's lease",
    ]
