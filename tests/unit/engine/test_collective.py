"""Sums over threads: exact, in rank order, and never a wait without an end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
import torch

from pdcore.engine.base import GroupLost
from pdcore.engine.collective import Collective, InProcessGroup
from pdcore.errors import EngineError

T = TypeVar("T")


def together(group: InProcessGroup, work: Callable[[Collective], T]) -> list[T]:
    with ThreadPoolExecutor(group.tp_size) as pool:
        return list(pool.map(work, [group.join(rank) for rank in range(group.tp_size)]))


@pytest.mark.parametrize("tp_size", [1, 2, 5])
def test_sums(tp_size: int) -> None:
    def work(end: Collective) -> list[list[float]]:
        sums = []
        for step in range(50):
            values = torch.tensor([float(step), float(end.rank.tp_rank)])
            end.all_reduce(values)
            sums.append(values.tolist())
        return sums

    ranks = sum(range(tp_size))
    expected = [[float(step * tp_size), float(ranks)] for step in range(50)]
    assert together(InProcessGroup(tp_size), work) == [expected] * tp_size


def test_every_rank_gets_the_same_bits_and_so_does_every_run() -> None:
    """Rank order, whoever comes last: float32 addition is not associative."""
    parts = [torch.randn(1000, generator=torch.Generator().manual_seed(n)) for n in range(4)]
    expected = ((parts[0] + parts[1]) + parts[2]) + parts[3]
    assert not torch.equal(expected, parts[0] + (parts[1] + (parts[2] + parts[3])))

    def work(end: Collective) -> torch.Tensor:
        values = parts[end.rank.tp_rank].clone()
        end.all_reduce(values)
        return values

    for _ in range(20):
        assert all(torch.equal(found, expected) for found in together(InProcessGroup(4), work))


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.bfloat16])
def test_a_value_plus_zeros_is_the_value(dtype: torch.dtype) -> None:
    """What votes and tokens rely on."""
    word = torch.tensor([(1 << 62) + 1 if dtype is torch.int64 else 0.1], dtype=dtype)

    def work(end: Collective) -> torch.Tensor:
        values = word.clone() if end.rank.tp_rank == 1 else torch.zeros_like(word)
        end.all_reduce(values)
        return values

    assert all(torch.equal(found, word) for found in together(InProcessGroup(3), work))


def test_closing_ends_the_wait_of_the_others_and_every_later_call() -> None:
    group = InProcessGroup(3, timeout_s=3600.0)
    waiting = threading.Barrier(3)

    def work(end: Collective) -> str:
        waiting.wait(60.0)
        if end.rank.tp_rank == 2:
            end.close()
            end.close()
        for _ in range(2):
            with pytest.raises(GroupLost, match="restart all ranks") as caught:
                end.all_reduce(torch.zeros(1))
        return str(caught.value)

    assert all("tp_rank 2 closed it" in text for text in together(group, work))


def test_a_sum_that_was_finished_counts_though_somebody_left_since() -> None:
    """The first rank out closes at once; the others may not have woken up yet."""

    def work(end: Collective) -> float:
        values = torch.ones(1)
        end.all_reduce(values)
        end.close()
        return float(values)

    for _ in range(50):
        assert together(InProcessGroup(4), work) == [4.0] * 4


def test_a_rank_that_does_not_come() -> None:
    end = InProcessGroup(3, timeout_s=0.01).join(0)
    with pytest.raises(GroupLost, match=r"tp_rank 0 of 3 .*: 2 of its ranks did not come"):
        end.all_reduce(torch.zeros(1))


def test_ranks_out_of_step_are_told_apart() -> None:
    """Never a sum of two shapes: torch would broadcast it."""

    def work(end: Collective) -> str:
        with pytest.raises(GroupLost) as caught:
            end.all_reduce(torch.zeros(1 + end.rank.tp_rank))
        return str(caught.value)

    for text in together(InProcessGroup(2), work):
        assert "out of step, they add up torch.float32 (1,) and torch.float32 (2,)" in text


def test_a_rank_outside_the_group() -> None:
    with pytest.raises(EngineError, match=r"tp_rank 2 is not within 0\.\.1"):
        InProcessGroup(2).join(2)
