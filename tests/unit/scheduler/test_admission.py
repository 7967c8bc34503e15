"""Admission: R69, R70, R95, invariant 6."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import pytest

from pdcore.kv.cache import Budget
from pdcore.scheduler.admission import AdmissionLine, choose_admissions


def budget(free: int, holders: int = 0, reserve: int = 0) -> Budget:
    return Budget({"f": free}, {"f": reserve}, holders)


def waiting(*needs: int, skipped: int = 0) -> list[tuple[int, dict[str, int], int]]:
    return [(i, {"f": need}, skipped) for i, need in enumerate(needs)]


def test_the_rule_of_the_seed() -> None:
    """R70, R95: ceil(64 / 16) = 4 blocks per holder stay free for growth."""
    assert choose_admissions(waiting(6), budget(30, holders=6, reserve=4), 9) == [0]
    assert choose_admissions(waiting(7), budget(30, holders=6, reserve=4), 9) == []


def test_everyone_admitted_is_one_more_holder() -> None:
    assert choose_admissions(waiting(4, 4, 4), budget(12, reserve=2), 9) == [0, 1]


def test_slots_limit_admission_too() -> None:
    """R69: no metadata slot, no admission."""
    assert choose_admissions(waiting(1, 1, 1), budget(9), 2) == [0, 1]
    assert choose_admissions(waiting(1), budget(9), 0) == []


Choose = Callable[[Iterable[tuple[int, Mapping[str, int], int]], Budget, int], list[int]]


def check_no_head_of_line_blocking(choose: Choose) -> None:
    assert choose(waiting(50, 3, 60, 2), budget(5), 9) == [1, 3], "the head blocks the others"


def breaks(
    candidates: Iterable[tuple[int, Mapping[str, int], int]], free: Budget, limit: int
) -> list[int]:
    """``break`` where ``continue`` belongs (2.4 of the requirements, 2c2336a)."""
    chosen: list[int] = []
    for key, need, _ in candidates:
        if len(chosen) >= limit or not free.try_take(need):
            break
        chosen.append(key)
    return chosen


def test_who_does_not_fit_is_skipped_not_waited_for() -> None:
    """R69, invariant 6."""
    check_no_head_of_line_blocking(choose_admissions)
    with pytest.raises(AssertionError, match="blocks the others"):
        check_no_head_of_line_blocking(breaks)


def test_the_impatient_get_an_earmark() -> None:
    """Invariant 6: after enough ticks nobody may overtake; other manager keys may."""
    both = [
        ("big", {"f": 50, "g": 0}, 128),
        ("small", {"f": 2, "g": 0}, 0),
        ("other", {"f": 0, "g": 3}, 0),
        ("big2", {"f": 40, "g": 0}, 500),
    ]
    free = Budget({"f": 10, "g": 3}, {"f": 0, "g": 0}, 0)
    assert choose_admissions(both, free, 9) == ["other"]
    young = [("big", {"f": 50}, 127), ("small", {"f": 2}, 0)]
    assert choose_admissions(young, budget(10), 9) == ["small"]


def simulate(line: AdmissionLine[str], ticks: int) -> int | None:
    """A pool of 10: a request of 9 waits while one of 4 arrives whenever one of 4 ends.
    Returns how many ticks after its arrival the large one is admitted."""
    free = 10
    running: list[int] = []
    for tick in range(ticks):
        if tick == 5:
            line.add("large", {"f": 9})
        for end in [r for r in running if r <= tick]:
            running.remove(end)
            free += 4
        line.add(f"small{tick}", {"f": 4})
        for key in line.offer(budget(free), 9):
            line.discard(key)
            if key == "large":
                return tick - 5
            free -= 4
            running.append(tick + 2)
    return None


def test_a_large_request_is_admitted_eventually() -> None:
    """Invariant 6: skipping alone starves it for ever."""
    patient = simulate(AdmissionLine(patience=20), 200)
    assert patient is not None
    assert 20 <= patient <= 25
    assert simulate(AdmissionLine(patience=10**9), 200) is None, "the mutant starves"


def test_the_line_keeps_order_and_first_place() -> None:
    line: AdmissionLine[str] = AdmissionLine()
    line.add("a", {"f": 3})
    line.add("b", {"f": 2})
    line.add("a", {"f": 1})
    assert len(line) == 2
    assert "a" in line
    assert line.offer(budget(3), 9) == ["a"]
    assert line.offer(budget(5), 9) == ["a", "b"]
    line.discard("a")
    line.discard("a")
    assert line.offer(budget(2), 9) == ["b"]
    assert line.offer(budget(2), 0) == []
    assert repr(line) == "AdmissionLine(waiting=1, tick=4)"


class Counting(Budget):
    """Counts how often somebody asks for blocks."""

    asked = 0

    def try_take(self, need: Mapping[str, int]) -> bool:
        Counting.asked += 1
        return super().try_take(need)


def test_a_full_pool_is_not_compared_with_everybody_every_tick() -> None:
    """Cost follows what changed: one comparison with the smallest need."""
    line: AdmissionLine[int] = AdmissionLine()
    for i in range(100):
        line.add(i, {"f": 5 + i})
    Counting.asked = 0
    for _ in range(50):
        assert line.offer(Counting({"f": 4}, {"f": 0}, 0), 9) == []
    assert Counting.asked == 0
    line.discard(0)
    assert line.offer(Counting({"f": 5}, {"f": 0}, 0), 9) == []
    assert Counting.asked == 99
    assert line.offer(Counting({"f": 5}, {"f": 0}, 0), 9) == []
    assert Counting.asked == 99, "the bound is exact again after a fruitless scan"
    assert line.offer(Counting({"f": 6}, {"f": 0}, 0), 9) == [1]
