"""Counterexamples as files: each replays, with its known-bad variant and without.

``pdcore verify lifecycles --save tests/sim/lifecycles`` puts there what it finds wrong with the
product: that file fails here until it is mended, and stays. With ``--mutant NAME`` it puts there
the shortest way to what the variant breaks, as the files here are.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from pdcore.cli import main
from pdcore.cli.proving import Scenario, read_scenario, world_of
from pdcore.sim.explore import SAFETY, ReplayError
from pdcore.sim.mutants import MUTANTS

FILES = sorted(Path(__file__).with_name("lifecycles").glob("*.json"))


def check_holds(scenario: Scenario, *, may_end_early: bool) -> None:
    """The product is never where it must not be, on all of the way; ``may_end_early``: where it
    refuses a step that only the variant takes, the way ends for it."""
    config, trace = world_of(scenario), scenario.trace
    while True:
        try:
            steps = config.replay(scenario.mutant, trace)
            break
        except ReplayError:
            if not may_end_early:
                raise
            trace = trace[:-1]
    assert [problem for step in steps for problem in step.problems] == []
    assert scenario.kind == SAFETY or config.can_end(scenario.mutant, trace)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_counterexample_holds_without_its_variant(path: Path) -> None:
    """Issue 3, point 8: the regression tests of the explorer."""
    scenario = read_scenario(path)
    bare = msgspec.structs.replace(scenario, mutant="")
    check_holds(bare, may_end_early=bool(scenario.mutant))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_counterexample_fails_with_its_variant(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Or it shows nothing: every step of it can still be taken, and ends where the file says."""
    scenario = read_scenario(path)
    if not scenario.mutant:
        pytest.skip("found in the product, and mended")
    assert main(["verify", "lifecycles", "--replay", str(path)]) == 1
    said = capsys.readouterr().out
    assert scenario.problem in said
    assert said.endswith("still fails\n")
    with pytest.raises(AssertionError):
        check_holds(scenario, may_end_early=False)


def test_every_variant_that_undoes_a_rule_of_the_protocol_has_a_file() -> None:
    """Those that issue 3, point 8, names, and one that breaks liveness."""
    found = {read_scenario(path).mutant for path in FILES}
    named = {
        "free-on-abort",
        "max-merged-status",
        "no-incarnation",
        "no-claim-tombstones",
        "claim-without-lease",
        "min-over-states",
        "ack-between-chunks",
        "restart-acks-for-predecessor",
        "send-once",
    }
    assert named <= found <= MUTANTS.keys() | {""}
