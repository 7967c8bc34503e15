"""Votes before a step, one word after it: the ranks stay in step whatever one of them does."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NoReturn, TypeVar

import pytest
import torch

from pdcore.engine.base import GroupLost
from pdcore.engine.collective import InProcessGroup
from pdcore.engine.sampling import LOWEST_LOGPROB
from pdcore.engine.step_group import Choice, StepGroup, vote_of
from pdcore.errors import EngineError
from pdcore.types import Batch, Phase, SamplingParams

T = TypeVar("T")


def together(tp_size: int, work: Callable[[StepGroup], T], timeout_s: float = 60.0) -> list[T]:
    group = InProcessGroup(tp_size, timeout_s)
    ends = [StepGroup(group.join(rank)) for rank in range(tp_size)]
    with ThreadPoolExecutor(tp_size) as pool:
        return list(pool.map(work, ends))


def make_batch(
    phase: Phase = Phase.PREFILL,
    tokens: tuple[int, ...] = (1, 2),
    computed: int = 0,
    sample: bool = True,
    seq_id: int = 1,
    block: int = 1,
) -> Batch:
    batch = Batch(1, phase)
    batch.add(seq_id, tokens, computed, {"full": [block]}, SamplingParams(), sample=sample)
    batch.add(seq_id + 1, [7], 3, {"full": [block + 1]}, SamplingParams())
    return batch


def refuse(text: str = "no") -> NoReturn:
    raise EngineError(text)


def test_a_vote_is_of_what_is_computed() -> None:
    """Blocks and sequence ids are each rank's own; all else must be equal."""
    same = {vote_of(make_batch()), vote_of(make_batch(seq_id=9, block=5))}
    assert len(same) == 1
    others = {
        vote_of(batch)
        for batch in (
            make_batch(Phase.DECODE),
            make_batch(tokens=(2, 1)),
            make_batch(tokens=(1, 2, 7)),
            make_batch(computed=1),
            make_batch(sample=False),
            Batch(1, Phase.PREFILL),
        )
    }
    assert len(others | same) == 7
    assert all(2 < vote < 1 << 63 for vote in others | same)


def test_agreed() -> None:
    assert together(3, lambda group: group.agree(make_batch(), lambda: group.rank.tp_rank)) == [
        0,
        1,
        2,
    ]


def test_a_group_of_one_asks_nobody() -> None:
    group = StepGroup()
    assert group.all_reduce is None
    assert group.agree(make_batch(), lambda: 5) == 5
    assert group.share(1, lambda: Choice([3], [0.5])) == Choice([3], [0.5])
    with pytest.raises(EngineError, match="no"):
        group.agree(make_batch(), refuse)
    group.agree_to_warm_up()
    group.close()


def test_a_refusal_is_heard_by_all_and_is_not_the_end() -> None:
    def work(group: StepGroup) -> str:
        own = group.rank.tp_rank == 1
        with pytest.raises(EngineError) as caught:
            group.agree(make_batch(), refuse if own else lambda: 1)
        assert not isinstance(caught.value, GroupLost)
        assert group.agree(make_batch(), lambda: 2) == 2
        return str(caught.value)

    zero, one, two = together(3, work)
    assert one == "no"
    assert zero == two == "tp_rank 1: no"


def test_reasons_of_several_ranks_and_long_ones() -> None:
    """Each rank raises its own; who had none hears all, cut to what a sum holds."""

    def work(group: StepGroup) -> str:
        texts = ["", "x" * 600, "ä" * 400, None]
        text = texts[group.rank.tp_rank]
        with pytest.raises(EngineError) as caught:
            group.agree(make_batch(), (lambda: 1) if text is None else lambda: refuse(text))
        return str(caught.value)

    *own, heard = together(4, work)
    assert own == ["", "x" * 600, "ä" * 400]
    expected = "tp_rank 0: no reason given; tp_rank 1: " + "x" * 512 + "; tp_rank 2: " + "ä" * 256
    assert heard == expected


def test_a_refusal_while_another_rank_warms_up() -> None:
    """Every rank joins every sum, whatever it was about to do."""

    def work(group: StepGroup) -> str:
        step = group.agree_to_warm_up
        if group.rank.tp_rank == 0:
            step = partial(group.agree, make_batch(), refuse)
        with pytest.raises(EngineError) as caught:
            step()
        group.agree_to_warm_up()
        return str(caught.value)

    assert together(2, work) == ["no", "tp_rank 0: no"]


def test_a_bug_in_between_ends_the_group() -> None:
    """What is no EngineError may have left anything half done: no vote can follow it."""

    def work(group: StepGroup) -> None:
        if group.rank.tp_rank == 0:
            with pytest.raises(ZeroDivisionError):
                group.agree(make_batch(), lambda: 1 // 0)
        else:
            with pytest.raises(GroupLost, match="tp_rank 0 closed it"):
                group.agree(make_batch(), lambda: 1)

    together(2, work, timeout_s=3600.0)


def test_d1_each_group_hears_its_own_first_rank() -> None:
    """D1: the word comes from tp_rank 0 of the group, not from rank 0 of the world."""
    check_each_group_hears_its_first(lambda group, dp_rank: group.rank.tp_rank == 0)


def check_each_group_hears_its_first(speaks: Callable[[StepGroup, int], bool]) -> None:
    """Two groups of two (dp 2, tp 2) at once; ``speaks``: who thinks that it must choose."""
    groups = [InProcessGroup(2, timeout_s=60.0) for _ in range(2)]

    def work(world_rank: int) -> list[int]:
        dp_rank, tp_rank = divmod(world_rank, 2)
        group = StepGroup(groups[dp_rank].join(tp_rank))
        said = Choice([100 + dp_rank], [0.0]) if speaks(group, dp_rank) else Choice([0], [0.0])
        return list(group.share(1, lambda: said).tokens)

    with ThreadPoolExecutor(4) as pool:
        heard = list(pool.map(work, range(4)))
    assert heard == [[100], [100], [101], [101]]


def test_d1_mutant_is_caught() -> None:
    """The earlier rule: only rank 0 of the world speaks, so that the other group hears
    nothing."""
    with pytest.raises(AssertionError):
        check_each_group_hears_its_first(
            lambda group, dp_rank: group.rank.tp_rank == 0 and dp_rank == 0
        )


def test_only_rank_0_chooses_and_all_hear_the_same_to_the_bit() -> None:
    said = Choice([(1 << 22) - 1, 0, 7], [-0.1, LOWEST_LOGPROB, 0.0])

    def work(group: StepGroup) -> Choice:
        return group.share(3, (lambda: said) if group.rank.tp_rank == 0 else refuse)

    for heard in together(3, work):
        assert list(heard.tokens) == list(said.tokens)
        assert list(heard.logprobs) == list(said.logprobs)


def test_a_choice_that_fails_fails_everywhere_and_is_not_the_end() -> None:
    def work(group: StepGroup) -> str:
        with pytest.raises(EngineError) as caught:
            group.share(2, lambda: refuse("no finite logits"))
        assert list(group.share(1, lambda: Choice([4], [0.0])).tokens) == [4]
        return str(caught.value)

    assert together(2, work) == [
        "no finite logits",
        "tp_rank 0: no finite logits",
    ]


def test_a_bug_while_choosing_ends_the_group() -> None:
    def work(group: StepGroup) -> None:
        if group.rank.tp_rank == 0:
            with pytest.raises(ZeroDivisionError):
                group.share(1, lambda: Choice([1 // 0], [0.0]))
        else:
            with pytest.raises(GroupLost):
                group.share(1, lambda: Choice([1], [0.0]))

    together(2, work, timeout_s=3600.0)


def test_votes_that_cannot_be_are_no_batch() -> None:
    """A rank that adds up something else at this point: caught even where shapes agree."""

    class Elsewhere:
        rank = InProcessGroup(2).join(0).rank

        def all_reduce(self, values: torch.Tensor) -> None:
            values[1] = 0

        def close(self) -> None:
            pass

    with pytest.raises(GroupLost, match="out of step"):
        StepGroup(Elsewhere()).agree(make_batch(), lambda: 1)
