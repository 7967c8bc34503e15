"""The router by exhaustive exploration: one request, the real core, legs that do their worst."""

from __future__ import annotations

import pytest

from pdcore.router.outbox import CancelKey, Outbox
from pdcore.sim.explore import explore, replay
from pdcore.sim.router_world import LOSSES, ROUTER_MUTANTS, RouterWorld


def test_one_attempt_ends_well_where_nothing_is_lost() -> None:
    """D10, D11, protocol models Q5 PROMPT: with no deadline at all, every request ends with one
    answer, and both legs with it, by deliveries alone."""
    found = explore(RouterWorld(is_lossy=False, max_attempts=1))
    assert found.violations == ()
    assert found.exhausted
    assert found.states > 1000


def test_whatever_is_lost_the_first_steps_are_sound() -> None:
    """Q5 LOSS; ``pdcore verify lifecycles`` walks this world to its end."""
    found = explore(RouterWorld(is_lossy=True, max_attempts=1), max_states=3000)
    assert found.violations == ()


def test_another_attempt_runs_beside_the_lost_one() -> None:
    """D47b, D20: a second attempt after one fault, the first one's legs still on their way."""
    found = explore(RouterWorld(is_lossy=False, max_attempts=2, max_faults=1))
    assert found.violations == ()
    assert found.exhausted
    assert any("--retried" in row for row in found.rows)


def test_the_pause_before_a_third_attempt_ends_in_every_way() -> None:
    """The rows of Retrying: the next attempt, nobody left, the client gone, a deadline."""
    world = RouterWorld(is_lossy=False, max_attempts=3, max_faults=3, faults=LOSSES)
    state = world.initial()
    for label in ("prefill is overloaded #1", "prefill's answer U at the router #1",
                  "prefill is overloaded #2", "prefill's answer U at the router #2"):  # fmt: skip
        found = {move.label: move.state for move in world.moves(state)}
        state = found[label]
    nobody = next(move.state for move in world.moves(state) if move.label == "all probes fail")
    offered = [*world.moves(state), *world.moves(nobody)]
    rows = {row for move in offered for row in move.rows if "row Retrying" in row}
    assert len(rows) == 4


@pytest.mark.parametrize(
    ("mutant", "is_lossy", "max_faults", "problem"),
    [
        ("unknown-is-failure", True, 0, "healthy answer"),
        ("any-attempt", False, 2, "."),
        ("no-retry-cancels", False, 2, "goes on uncancelled"),
    ],
)
def test_a_known_bad_variant_is_caught(
    mutant: str, is_lossy: bool, max_faults: int, problem: str
) -> None:
    """Protocol models Q5: what each rule is for, shown by leaving it out."""
    world = RouterWorld(
        is_lossy=is_lossy,
        max_attempts=1 if is_lossy else 2,
        max_faults=max_faults,
        routed_type=ROUTER_MUTANTS[mutant],
    )
    found = explore(world)
    with pytest.raises(AssertionError, match=problem):
        assert not found.violations, found.violations[0].problem
    again = RouterWorld(
        is_lossy=is_lossy,
        max_attempts=1 if is_lossy else 2,
        max_faults=max_faults,
        routed_type=ROUTER_MUTANTS[mutant],
    )
    assert replay(again, found.violations[0].trace)[-1].state == found.violations[0].state


def test_a_cancel_that_a_weaker_ones_answer_ends_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Q5 RES: the mutant is what the outbox did: the answer to the weaker cancel ended the
    stronger one that had taken its place."""
    good = Outbox.answer

    def any_answer(
        outbox: Outbox,
        key: CancelKey,
        is_known: bool | None,
        unless_received: bool = False,
        *,
        now_s: float,
    ) -> None:
        good(outbox, key, is_known, False, now_s=now_s)

    monkeypatch.setattr(Outbox, "answer", any_answer)
    found = explore(RouterWorld(is_lossy=False, max_attempts=1))
    with pytest.raises(AssertionError, match="is not sent again"):
        assert not found.violations, found.violations[0].problem
