"""Cutting a failing world down: fewer faults, then fewer requests, while it still fails.

Deterministic: the same plan is cut the same way. What counts as failing is the caller's
to say (:func:`pdcore.sim.seeds.kind_of`). What is left is small enough to read, and is written
as options of a command.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from pdcore.sim.plan import Plan

#: Worlds tried at most; each takes about a tenth of a second.
MAX_TRIES: Final = 200


class Shrunk(NamedTuple):
    """The smallest plan found that still fails, and how many worlds that took."""

    plan: Plan
    num_tries: int


class _Budget:
    def __init__(self, fails: Callable[[Plan], bool], max_tries: int) -> None:
        self._fails = fails
        self._left = max_tries
        self.num_tries = 0

    @property
    def is_spent(self) -> bool:
        return self.num_tries >= self._left

    def fails(self, plan: Plan) -> bool:
        self.num_tries += 1
        return self._fails(plan)


def shrink(plan: Plan, fails: Callable[[Plan], bool], *, max_tries: int = MAX_TRIES) -> Shrunk:
    """``fails(plan)`` runs a world and says whether anything was wrong; it must be true of
    ``plan`` itself."""
    budget = _Budget(fails, max_tries)
    faults = _reduce(
        [fault.number for fault in plan.faults],
        lambda kept: budget.fails(plan.only(faults=kept)),
        budget,
    )
    plan = plan.only(faults=faults)
    requests = _reduce(
        [request.number for request in plan.requests],
        lambda kept: budget.fails(plan.only(requests=kept)),
        budget,
    )
    return Shrunk(plan.only(requests=requests), budget.num_tries)


def _reduce(
    numbers: Sequence[int], still_fails: Callable[[Sequence[int]], bool], budget: _Budget
) -> Sequence[int]:
    """Drop ever smaller pieces while what is left still fails (delta debugging)."""
    kept = list(numbers)
    size = len(kept)
    while size and kept:
        start = 0
        while start < len(kept) and not budget.is_spent:
            without = kept[:start] + kept[start + size :]
            if still_fails(without):
                kept = without
            else:
                start += size
        size //= 2
    return kept


def replay_command(plan: Plan, whole: Plan, mutant: str = "") -> str:
    """The command that runs exactly this plan again. ``whole`` is what the seed makes."""
    words = [f"pdcore verify cluster --seed {plan.seed}"]
    if len(plan.faults) < len(whole.faults):
        words.append(f"--only-faults {_list([f.number for f in plan.faults])}")
    if len(plan.requests) < len(whole.requests):
        words.append(f"--only-requests {_list([r.number for r in plan.requests])}")
    if mutant:
        words.append(f"--mutant {mutant}")
    return " ".join(words)


def _list(numbers: Sequence[int]) -> str:
    return ",".join(str(number) for number in numbers) or "none"
